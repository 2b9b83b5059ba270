"""generate and chat on the CPU: what transformers writes, figures, and what is refused."""

import functools
import io
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edits import json_in
from greedy import greedy
from other_processes import SLOW_STEPS

from twellctl.cli import use
from twellctl.decoding.engine import Sampling, Token
from twellctl.decoding.tally import Tally
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.firing.counts import fired_meter
from twellctl.generate import Chat, Generation, generate, load
from twellctl.models import loading
from twellctl.models.checkpoint import open_checkpoint
from twellctl.profile import profile
from twellctl.screens import ui
from twellctl.screens.use import generated
from twellctl.text.tokens import encode_prompt

PROMPT = "import os\n\ndef main"
STATS = (
    r"(\d+) \+ (\d+) tokens, the first after \d+\.\d\d s(, then \d+\.\d tokens/s)?, "
    r"(\d+\.\d\d)% of the neurons fired(, cut at --max-tokens)?"
)


@pytest.fixture(scope="module")
def stock(relu_llama):
    """`stock(prompt ids, count)`: greedy tokens of transformers, up to and with the end token."""
    stock = loading.load_model(open_checkpoint(relu_llama))
    return SimpleNamespace(model=stock, tokens=functools.partial(greedy, stock))


def test_greedy_text_is_that_of_transformers(relu_llama, stock, tokenizer):
    ids = tokenizer.encode(PROMPT)
    made = generate(relu_llama, PROMPT, max_tokens=40, chat=False)
    pieces = list(made)
    known = stock.tokens(ids, 40)
    kept = [token for token in known if token != tokenizer.eos_token_id]
    assert PROMPT + "".join(pieces) == tokenizer.decode(ids + kept)
    assert len(pieces) > 5
    figures = made.figures
    assert (figures.prompt_tokens, figures.tokens) == (len(ids), len(known))
    assert figures.cut == (len(kept) == 40)
    assert figures.first_seconds > 0
    assert figures.tokens_per_second > 1


def test_the_chat_template_is_used_where_there_is_one(relu_llama, stock, tokenizer):
    ids = tokenizer.encode(f"<|user|>{PROMPT}\n<|assistant|>")
    known = [t for t in stock.tokens(ids, 20) if t != tokenizer.eos_token_id]
    text = "".join(generate(relu_llama, PROMPT, max_tokens=20))
    assert text == tokenizer.decode(known)
    assert text == "".join(generate(relu_llama, PROMPT, max_tokens=20, chat=True))
    assert text != "".join(generate(relu_llama, PROMPT, max_tokens=20, chat=False))


def test_the_density_is_what_the_hooks_count(relu_llama, stock, tokenizer):
    made = generate(relu_llama, PROMPT, max_tokens=12, chat=False)
    assert made.figures.density is None
    list(made)
    ids = tokenizer.encode(PROMPT)
    tokens, shares = stock.tokens(ids, 12), []
    with (
        torch.no_grad(),
        fired_meter(stock.model, lambda _, __, active: shares.append(active != 0)),
    ):
        stock.model(torch.tensor([ids + tokens[:-1]]))
    known = torch.stack(shares)[:, -len(tokens) :].float().mean()
    assert made.figures.density == pytest.approx(float(known), rel=1e-4)
    assert f"<td>{made.figures.density:.4g}</td>" in made._repr_html_()  # in a notebook


def test_the_context_bounds_the_text(relu_llama, tokenizer):
    prompt = PROMPT
    while len(tokenizer.encode(prompt)) < 245:
        prompt += " x"
    made = generate(relu_llama, prompt, chat=False)
    list(made)
    figures = made.figures
    assert figures.prompt_tokens + figures.tokens == 256 or not figures.cut
    with pytest.raises(TwellError, match="there is room for 256: shorten the prompt or lower"):
        list(generate(relu_llama, prompt, max_tokens=50, chat=False))
    with pytest.raises(TwellError, match=r"the prompt has \d+ tokens, there is room for 256"):
        generate(relu_llama, prompt + " x" * 50, chat=False)


def test_the_command_streams_and_shows_its_figures(success, relu_llama, stock, tokenizer):
    out, err = success("generate", relu_llama, PROMPT, "--no-chat", "--max-tokens", "8")
    ids = tokenizer.encode(PROMPT)
    known = stock.tokens(ids, 8)
    kept = [token for token in known if token != tokenizer.eos_token_id]
    assert PROMPT + out == tokenizer.decode(ids + kept) + "\n"
    beware, line = err
    noise = "was converted and not fine-tuned: what it writes is noise"
    assert beware == f"beware: {relu_llama} {noise}"
    found = re.fullmatch(STATS, line)
    assert found, line
    assert (int(found[1]), int(found[2])) == (len(ids), len(known))
    assert 0 < float(found[4]) < 100


def test_an_answer_without_a_word_is_reported(cli, relu_llama, stock, tokenizer, tmp_path):
    [first] = stock.tokens(tokenizer.encode(PROMPT), 1)
    model = shutil.copytree(relu_llama, tmp_path / "model")
    for file in ("config.json", "generation_config.json"):
        with json_in(model / file) as content:
            content["eos_token_id"] = first
    code, out, err = cli("generate", model, PROMPT, "--no-chat")
    assert (code, out.strip()) == (0, "")
    assert "the model ended its answer at once, without a word" in err


def test_a_prompt_from_stdin(cli, relu_llama, monkeypatch):
    words = ("--no-chat", "--max-tokens", "8")
    _, out, _ = cli("generate", relu_llama, "héllo\nthere", *words)
    typed = io.TextIOWrapper(io.BytesIO("héllo\nthere\n".encode()))
    monkeypatch.setattr(sys, "stdin", typed)
    assert cli("generate", relu_llama, "-", *words)[1] == out


def test_an_export_is_continued_as_its_model(relu_llama, text_file, tmp_path):
    measured = profile(relu_llama, [str(text_file)], windows=4, seq_len=32)
    export(relu_llama, tmp_path / "export", profile=measured)
    texts = ["".join(generate(m, PROMPT, max_tokens=15)) for m in (relu_llama, tmp_path / "export")]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tokens": 0}, "max-tokens must be >= 1, got 0"),
        ({"temperature": 2.5}, "temperature must be >= 0 and <= 2, got 2.5"),
        ({"top_p": -0.1}, "top-p must be >= 0 and <= 1, got -0.1"),
        ({"seed": 2**63}, f"seed must be >= {-(2**63)} and <= {2**63 - 1}"),
        ({"prompt": "a \udcff"}, "the prompt is not valid Unicode"),
        ({"prompt": "", "chat": False}, "the prompt holds no token: give some text"),
    ],
)
def test_bad_calls_are_refused(relu_llama, settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        generate(relu_llama, **{"prompt": PROMPT} | settings)


def test_a_silu_model_runs_densely_and_says_so(cli, silu_llama, tokenizer):
    code, out, err = cli("generate", silu_llama, PROMPT, "--max-tokens=9", "--no-chat")
    assert (code, len(err)) == (0, 2)
    assert err[0].endswith("is a SiLU model: every neuron is computed for every token")
    assert "fired" not in err[1]
    stock = loading.load_model(open_checkpoint(silu_llama))
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    made = tokenizer.decode(stock.generate(ids, do_sample=False, max_new_tokens=9)[0])
    assert made.startswith(PROMPT + out[:-1])
    assert out.strip()


def test_chat_without_a_template_is_refused(relu_llama, monkeypatch):
    def bare(checkpoint, *more):
        tokenizer = load_tokenizer(checkpoint, *more)
        tokenizer.chat_template = None
        return tokenizer

    load_tokenizer = loading.load_tokenizer
    monkeypatch.setattr(loading, "load_tokenizer", bare)
    with pytest.raises(TwellError, match="has no chat template: leave out --chat"):
        generate(relu_llama, PROMPT, chat=True)
    both = [generate(relu_llama, PROMPT, max_tokens=5, **how) for how in ({}, {"chat": False})]
    assert "".join(both[0]) == "".join(both[1])


def test_a_failure_on_the_way_is_one_line(cli, relu_llama, monkeypatch):
    from twellctl.decoding.torch_decoder import TorchDecoder

    calls, run = [], TorchDecoder.run

    def fail(*inputs, **how):
        calls.append(inputs)
        if len(calls) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*inputs, **how)

    monkeypatch.setattr(TorchDecoder, "run", fail)
    code, out, err = cli("generate", relu_llama, PROMPT, "--no-chat")
    assert code == 1
    assert out
    assert " tokens, the first after " in err[1]
    assert err[2:] == ["error: out of memory: shorten the prompt or lower max_tokens"]


def test_ctrl_c_ends_cleanly(started, relu_llama):
    """With what came before, its figures and code 130."""
    words = "generate", relu_llama, "x = 1", "--temperature=2", "--seed=1"
    process = started(*words, code=SLOW_STEPS)
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert first
    assert out.endswith("\n")
    *before, figures, last = err.splitlines()
    allowed = "loading ", "beware: "  # the first on a slow machine only
    assert all(line.startswith(allowed) for line in before)
    assert re.match(r"\d+ \+ \d+ tokens?, the first after", figures)
    assert last == "error: interrupted"


@pytest.mark.parametrize(
    ("ended", "written"), [(False, "print"), (True, "print\N{REPLACEMENT CHARACTER}")]
)
def test_a_character_that_the_limit_cuts_is_left_out(tokenizer, ended, written):
    tokens = [*tokenizer.encode("print"), tokenizer.encode("é")[0], *([0] if ended else [])]
    scheduler = SimpleNamespace(
        run=lambda prompts, sampling: iter([[(None, Token(token))] for token in tokens]),
        eos_tokens={0},
        reports=SimpleNamespace(fired=np.zeros(1), generated_tokens=0),
        tally=Tally((), None),
    )
    found = Generation(scheduler, tokenizer, [1], Sampling(len(tokens), 0), continued=False)
    assert "".join(found) == written


# ---- chat: what was said goes along, its commands, and what Ctrl-C stops


@pytest.fixture(scope="module")
def loaded(relu_llama):
    return load(relu_llama)


@pytest.fixture
def say(cli, relu_llama, monkeypatch):
    """`say(*lines)`: (exit code, stdout, stderr) of a chat whose input they are."""

    def run(*lines: str | bytes):
        given = b"".join(x if isinstance(x, bytes) else f"{x}\n".encode() for x in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        return cli("chat", relu_llama, "--max-tokens", "8")

    return run


def answer(loaded, *turns: str) -> str:
    """The model's answer to a user's and its own turns; a first one that is None: no system's."""
    roles = ["system", *("user", "assistant") * len(turns)]
    spoken = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False) if t]
    return loaded.generate(spoken, max_tokens=8).text()


def test_earlier_turns_are_part_of_the_prompt(loaded, say):
    one = answer(loaded, "", "Why?")
    two = answer(loaded, "", "Why?", one, "And then?")
    brief = answer(loaded, "Be brief.", "Why?")
    assert len({one, two, brief, answer(loaded, "", "And then?")}) == 4
    code, out, err = say("Why?", "", "And then?", "/new", "Why?", "/system Be brief.", "Why?")
    assert (code, out) == (0, "".join(f"{text}\n" for text in (one, two, one, brief)))
    assert len(err) == 5  # that it is noise, and figures of each answer
    assert say("Why?", "/exit", "Why?")[:2] == (0, f"{one}\n")


@pytest.mark.parametrize(
    ("line", "said", "sent"),
    [
        ("/nwe", "there is no command '/nwe': /new starts over, ", None),
        ("/tmp is full", "there is no command '/tmp': ", None),
        ("/think", "; a space in front sends it", None),
        ("/new Why?", "/new stands alone, got 'Why?' behind it", None),
        ("/exit now", "/exit stands alone, got 'now' behind it", None),
        ("   ", "", None),
        (" /think", "", "/think"),
        ("/no_think Why?", "", "/no_think Why?"),
        ("/* a comment */", "", "/* a comment */"),
        ("//", "", "//"),
        ("/bin/ls?", "", "/bin/ls?"),
        ("  indented", "", "  indented"),
    ],
)
def test_what_begins_like_a_command(capsys, monkeypatch, line, said, sent):
    asked = []
    chat = SimpleNamespace(ask=lambda text, _: asked.append(text) or [], figures=None)
    monkeypatch.setattr(use, "generated", lambda figures: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{line}\n".encode())))
    use._converse(chat)
    assert asked == ([] if sent is None else [sent])
    assert said in capsys.readouterr().err


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
USERS = "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"


@pytest.mark.parametrize("template", [REFUSING + USERS, USERS], ids=["refuses", "drops"])
def test_a_template_that_takes_no_system_message(loaded, monkeypatch, template):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    wanted = "its chat template takes no system message: write it into the first message"
    with pytest.raises(TwellError, match=wanted):
        Chat(loaded, "Be brief.")
    chat = Chat(loaded, max_tokens=2)
    list(chat.ask("Why?"))
    before = chat.messages
    with pytest.raises(TwellError, match=wanted):
        chat.begin("Be brief.")
    assert chat.messages == before


def test_a_template_that_refuses_all_is_no_matter_of_the_system(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", "{{ raise_exception('not today') }}")
    with pytest.raises(TwellError, match=r"refuses these messages: not today$"):
        list(Chat(loaded, "Be brief.").ask("Why?"))


def test_an_answer_that_is_stopped_stays_in_the_chat(loaded):
    chat = Chat(loaded, max_tokens=30, temperature=2.0, seed=1)
    whole = [piece for piece in chat.ask("Why?")]
    chat.begin()
    stops = iter([False, False, True])
    assert list(chat.ask("Why?", lambda: next(stops))) == whole[:2]
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(whole[:2])}
    assert chat.figures.tokens < 30
    before = chat.messages
    assert list(chat.ask("Why?", lambda: True)) == []
    assert chat.messages == before
    assert list(chat.ask("And?"))


def test_a_conversation_that_fills_the_context(loaded, say):
    chat = Chat(loaded, max_tokens=1000)
    with pytest.raises(TwellError, match="there is room for 256 with the answer"):
        list(chat.ask("So " * 300))
    list(chat.ask("Why?"))
    with pytest.raises(TwellError, match="fills the context, 256 tokens: /new starts over"):
        list(chat.ask("So " * 300))
    assert len(chat.messages) == 2
    code, _, err = say("So " * 300, "Why?")
    assert (code, "room for 256" in err[-1]) == (1, True)
    assert say(b"\xff\n")[2][-1] == "error: stdin is not UTF-8 (byte 0): convert it"


def test_an_answer_says_what_cut_it(loaded, monkeypatch):
    notes = []
    monkeypatch.setattr(ui, "note", notes.append)
    texts = ["So " * times for times in range(300)]
    long = [t for t in texts if len(encode_prompt(loaded.tokenizer, t, True)) < 256][-1]
    for text, most, said in ((long, 1000, "where the context ends"), ("Why?", 1, "--max-tokens")):
        made = loaded.generate([{"role": "user", "content": text}], max_tokens=most)
        made.text()
        assert made.figures.cut
        assert made.figures.full == (text == long)
        generated(made.figures)
        assert notes[-1].endswith(said)


def test_a_model_without_a_template_is_refused(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", None)
    with pytest.raises(TwellError, match="has no chat template: give one with --chat-template"):
        Chat(loaded)


def test_chat_needs_a_template_before_weights_are_loaded(cli, silu_llama, tmp_path, monkeypatch):
    model = shutil.copytree(silu_llama, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    monkeypatch.setattr("twellctl.models.loading.load_model", None)
    code, _, err = cli("chat", model)
    assert code == 1
    assert err[-1].startswith(f"error: {model} has no chat template: give one with")


def test_ctrl_c_stops_the_answer_and_not_the_chat(started, relu_llama):
    """On a terminal: in an answer, and where a line is awaited."""
    terminal, theirs = pty.openpty()
    words = "chat", relu_llama, "--temperature=2", "--seed=1", "--max-tokens=200"
    process = started(*words, code=SLOW_STEPS, terminal=os.ttyname(theirs))

    def until(text: str) -> str:
        seen = ""
        while text not in seen:
            assert select.select([terminal], [], [], 60)[0], f"no {text!r} behind {seen!r}"
            seen += os.read(terminal, 4096).decode(errors="replace")
        return seen

    until("> ")
    for _ in range(2):
        time.sleep(0.5)  # a signal between the prompt and the wait behind it waits for a key
        process.send_signal(signal.SIGINT)
        assert "error" not in until("> ")
        os.write(terminal, b"Why?\n")
        until("Why?\r\n")
        os.read(terminal, 1)  # of the answer
    process.send_signal(signal.SIGINT)
    assert "the first after" in until("> ")
    os.write(terminal, b"\x04")
    assert process.wait() == 0
    os.close(terminal)
    os.close(theirs)
