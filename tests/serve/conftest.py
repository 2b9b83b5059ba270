"""One server for all tests of serving."""

import functools
from contextlib import contextmanager

import pytest
from greedy import greedy
from page_driver import Page
from serving_client import running, serving

from twellctl.models.answerer import open_answerer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.serve_local import load_served_model
from twellctl.serving import plan


@pytest.fixture(scope="session")
def served(relu_llama):
    return load_served_model(open_answerer(relu_llama))


@pytest.fixture(scope="session")
def client(served):
    with running(served) as made:
        yield made


@pytest.fixture(scope="session")
def reference(relu_llama):
    """`reference(prompt ids, count)`: the greedy tokens of a second copy of the model."""
    return functools.partial(greedy, load_model(open_checkpoint(relu_llama)))


@pytest.fixture
def seen(monkeypatch) -> list:
    """The messages of each chat that is asked for."""
    write, made = plan.chat_text, []
    seeing = lambda t, m, **how: made.append(m) or write(t, m, **how)  # noqa: E731
    monkeypatch.setattr(plan, "chat_text", seeing)
    return made


@pytest.fixture
def open_page(chromium, tokenizer):
    """`with open_page(engine) as page`."""

    @contextmanager
    def opened(engine, **settings):
        with serving(tokenizer, engine, **settings) as client:
            page = Page(chromium, client)
            yield page
            page.run("sessionStorage.clear()")

    return opened
