"""serve-local: the access log, and what /v1 and unknown URLs answer."""

import contextlib
import json
import re

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_client import Scripted, chat, complete, eventually, get, post, running, serving

from twellctl import serve_local
from twellctl.cli import use
from twellctl.decoding.engine import EngineError
from twellctl.screens import use as screen
from twellctl.serving.access import Access
from twellctl.serving.plan import ServedModel

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1 (\S+ \S+ \d+) (-|\d+\+\d+ tokens) \d+ ms"
)


@pytest.fixture
def logged(tokenizer):
    """`with logged(engine) as (client, log)`: what is asked, the status and the tokens."""

    @contextlib.contextmanager
    def logged(engine=None):
        lines, served = [], ServedModel("model", tokenizer, engine or Scripted([5, 6, 0]))

        def log(count):
            assert eventually(lambda: len(lines) >= count), lines
            assert len(lines) == count
            return [LINE.fullmatch(line).groups() for line in lines]

        with running(served, log=lines.append) as client:
            yield client, log

    return logged


def test_a_line_a_request_with_its_tokens(logged, tokenizer):
    with logged() as (client, log):
        answer = complete(client, prompt="x = 1", n=2)
        list(chat(client, stream=True))
        get(client, "/")
        get(client, "/health")
        usage = answer.usage
        whole, streamed, page, health = log(4)
    assert usage.completion_tokens == 6
    assert whole == ("POST /v1/completions 200", f"{usage.prompt_tokens}+6 tokens")
    assert streamed[0] == "POST /v1/chat/completions 200"
    assert streamed[1].endswith("+3 tokens")
    assert (page, health) == (("GET / 200", "-"), ("GET /health 200", "-"))


def test_what_fails_is_logged_as_what_it_is(logged, tokenizer):
    engine = Scripted(tokenizer.encode("print"), EngineError("lost"))
    count = len(engine.tokens)
    with logged(engine) as (client, log):
        got = []
        with pytest.raises(openai.APIError, match="lost"):
            got.extend(c.choices[0].text for c in complete(client, prompt=[5, 6], stream=True))
        assert "".join(got) == "print"
        with pytest.raises(openai.BadRequestError):
            complete(client, max_tokens=-1)
        get(client, "/nothing")
        assert log(3) == [
            ("POST /v1/completions 500", f"2+{count} tokens"),
            ("POST /v1/completions 400", "-"),
            ("GET /nothing 404", "-"),
        ]


def test_a_client_that_leaves_is_499_with_the_tokens_so_far(logged):
    with logged(Scripted([5] * 200, delay=0.05)) as (client, log):
        with pytest.raises(openai.APITimeoutError):
            complete(client.with_options(timeout=0.3), prompt=[5], max_tokens=200)
        ((asked, tokens),) = log(1)
    assert asked == "POST /v1/completions 499"
    assert 1 <= int(tokens.removeprefix("1+").removesuffix(" tokens")) < 200


def test_neither_prompts_nor_keys_nor_line_breaks_come_into_it(tokenizer):
    lines = []
    served = ServedModel("model", tokenizer, Scripted([5]))
    with running(served, access=Access("geheim"), api_key="geheim", log=lines.append) as client:
        complete(client, prompt="a secret prompt")
        get(client, "/v1/models?api_key=geheim&prompt=secret")
        get(client, "/v1/models/%0Aforged%1b[31m")
        post(client, b"{}", "/" + "long" * 500)
        assert eventually(lambda: len(lines) == 4)
    text = "".join(lines)
    assert "geheim" not in text
    assert "secret" not in text
    assert text.isprintable()
    assert all(LINE.fullmatch(line) or " ... " in line for line in lines)
    assert max(map(len, lines)) < 300


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
def test_the_root_of_the_api_lists_what_there_is(logged, path):
    with logged() as (client, _):
        answer = get(client, path)
        listed = json.loads(answer.body)["endpoints"]
        for endpoint in listed:
            method, _, where = endpoint.partition(" ")
            if method == "GET" and "{" not in where:
                assert get(client, where).status == 200, where
    assert answer.status == 200
    assert {"POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"} < set(listed)


def test_an_unknown_url_names_the_list(logged):
    with logged() as (client, _):
        status, answer = post(client, b"{}", "/chat/completions")
    assert status == 404
    said = "no such URL: POST /chat/completions (GET /v1 lists those there are)"
    assert answer["error"]["message"] == said


@pytest.mark.parametrize(
    ("flags", "log"), [([], screen.log), (["--no-access-log"], None)], ids=["default", "off"]
)
def test_the_command_logs_unless_a_flag_forbids_it(cli, monkeypatch, flags, log):
    seen = {}
    monkeypatch.setattr(serve_local, "serve_local", lambda model, **given: seen.update(given))
    monkeypatch.setattr(use, "end", lambda: None)
    assert cli("serve-local", "model", *flags)[0] == 0
    assert seen["log"] is log


def test_a_log_that_nobody_reads_ends_nothing(monkeypatch):
    tried = []

    class Closed:
        def write(self, text):
            tried.append(text)
            raise BrokenPipeError

    monkeypatch.setattr(screen.sys, "stderr", Closed())
    screen.log("a line")
    assert "a line" in tried[0]


# ---- /metrics, read as Prometheus reads it


def metrics(client) -> dict:
    """(name, labels without `le`) -> value; the buckets are left out."""
    answer = get(client, "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_requests_and_latencies(tokenizer):
    engine = Scripted(tokenizer.encode("print(x)"), delay=0.01)
    with serving(tokenizer, engine) as client:
        chat(client, n=2)
        list(complete(client, stream=True))
        with pytest.raises(openai.BadRequestError):
            complete(client, max_tokens=-1)
        post(client, b"{}", "/v1/none")
        post(client, b"{}", "/v1/none/other")
        found = metrics(client)
    chats, texts = "/v1/chat/completions", "/v1/completions"
    assert found["twell_requests_total", chats, "200"] == 1
    assert found["twell_requests_total", texts, "200"] == 1
    assert found["twell_requests_total", texts, "400"] == 1
    assert found["twell_requests_total", "unknown", "404"] == 2
    assert found["twell_request_seconds_count", texts] == 2
    count = len(engine.tokens)
    assert found["twell_time_to_first_token_seconds_count", "model"] == 3
    assert 0.03 <= found["twell_time_to_first_token_seconds_sum", "model"] < 3
    assert found["twell_time_per_token_seconds_count", "model"] == 3 * (count - 1)
    assert found["twell_time_per_token_seconds_sum", "model"] >= 3 * (count - 1) * 0.009
    assert found["twell_request_seconds_sum", chats] >= count * 0.009


def test_the_engines_counters(tokenizer):
    engine = Scripted(tokenizer.encode("print"), num_layers=2)
    with serving(tokenizer, engine) as client:
        assert ("twell_density_ratio", "0", "model") not in metrics(client)
        complete(client)
        found = metrics(client)
    stats = engine.stats()
    assert found["twell_prompt_tokens_total", "model"] == stats.prompt_tokens
    assert (
        found["twell_generated_tokens_total", "model"]
        == stats.generated_tokens
        == len(engine.tokens)
    )
    assert found["twell_sequences_running", "model"] == 0
    assert found["twell_sequences_waiting", "model"] == stats.waiting
    assert found["twell_sequences_capacity", "model"] == stats.capacity
    assert found["twell_cache_used_ratio", "model"] == stats.cache_used
    assert found["twell_density_ratio", "0", "model"] == 0.001
    assert found["twell_density_ratio", "1", "model"] == 0.002


def test_two_servers_do_not_share_their_metrics(tokenizer):
    served = ServedModel("model", tokenizer, Scripted([5]))
    with running(served) as one, running(served) as other:
        complete(one)
        assert ("twell_requests_total", "/v1/completions", "200") in metrics(one)
        assert ("twell_requests_total", "/v1/completions", "200") not in metrics(other)
