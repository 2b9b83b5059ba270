"""eval on answers: what a model writes for tasks, and how far two models agree on answers."""

import copy
import math
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from edits import json_in, jsonl
from fits import QUICK
from greedy import greedy
from judged_runs import RUNS, curve
from transformers import AutoModelForCausalLM

import twellctl.evaluation.agreement as agreement
from twellctl.compare import PROMPTS, compare
from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.evaluate import evaluate
from twellctl.evaluation import limited, questions
from twellctl.evaluation.answers import Answer, answers
from twellctl.evaluation.questions import Coded
from twellctl.evaluation.subject import Subject
from twellctl.models import verdict
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.screens.measure import evaluated
from twellctl.text.tokens import encode_prompt


@pytest.fixture
def prompts(tmp_path):
    return jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"What is {n}?"} for n in range(5)])


@pytest.fixture(scope="module")
def short(make_model, tmp_path_factory):
    """A SiLU model whose context soon ends an answer, and that converted; read only."""
    model, relu = make_model("llama", max_position_embeddings=96), tmp_path_factory.mktemp("relu")
    convert(model, relu / "model")
    return model, relu / "model"


def test_answers_are_those_of_one_at_a_time(silu_llama, tokenizer):
    model = load_model(open_checkpoint(silu_llama), dtype=torch.float32)
    asked = ["import os", "What?", "def f(x):\n    return x" * 4]
    prompts = [encode_prompt(tokenizer, text) for text in asked]
    found = answers(model, tokenizer, prompts, 20)
    for prompt, answer in zip(prompts, found, strict=True):
        assert list(answer.tokens) == greedy(model, prompt, 20)
    with pytest.raises(TwellError, match=r"prompt of 300 tokens leaves no room .* context is 256"):
        answers(model, tokenizer, [[1] * 300], 20)


def test_room_is_a_matter_of_each_prompt(silu_llama, tokenizer):
    model = load_model(open_checkpoint(silu_llama), dtype=torch.float32)
    short, long, too_long = [5, 6, 7], [5] * 250, [5] * 256
    found = answers(model, tokenizer, [too_long, short, long], 20)
    assert [list(answer.tokens) for answer in found] == [
        [],
        greedy(model, short, 20),
        greedy(model, long, 6),
    ]
    other = load_model(open_checkpoint(silu_llama), dtype=torch.float32)
    score = agreement.score_answers(model, other, [too_long, short, long], found, found)
    assert (score.answers, score.agree) == (2, 2)


def test_prompts_without_room_are_left_out_and_counted(success, short, tmp_path):
    model, _ = short
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "Why?"}, {"prompt": "long " * 400}])
    out, err = success("compare", model, model, "--prompts", file, "--max-tokens", 4)
    assert "1 prompt left out: the model's context is too short" in "".join(err)
    assert "the same to the end" in out.splitlines()[1]
    rows = [{"prompt": "Why?", "answer": "x"}, {"prompt": "long " * 400, "answer": "x"}]
    tasks = jsonl(tmp_path / "t.jsonl", rows)
    _, err = success("eval", model, "--tasks", tasks)
    assert "1 question without an answer: the model's context is too short" in "".join(err)


def test_a_prompt_that_the_template_refuses_is_left_out(success, short, tmp_path, caplog):
    model = shutil.copytree(short[0], tmp_path / "model")
    template = "{% if messages[0].content == 'No' %}{{ raise_exception('no') }}{% endif %}Why?"
    (model / "chat_template.jinja").write_text(template)
    rows = [{"prompt": "No", "answer": "x"}, {"prompt": "Why?", "answer": "x"}]
    file = jsonl(tmp_path / "p.jsonl", rows)
    few = "--max-tokens", 4
    out, _ = success("compare", model, model, "--prompts", file, *few)
    assert "the same to the end" in out.splitlines()[1]
    success("eval", model, "--tasks", file, *few)
    success("eval", model, "--reference", model, "--prompts", file)
    success("write", model, tmp_path / "own.jsonl", "--prompts", file, *few)
    said = re.compile("1 of 2 (prompts|questions, which count as wrong,) are left out; the first: ")
    reasons = [r.getMessage() for r in caplog.records if said.match(r.getMessage())]
    assert len(reasons) == 4
    assert all("the chat template refuses these messages: no" in reason for reason in reasons)


def test_an_answer_that_loops_is_known():
    def repeats(*tokens, ended=False):
        return Answer(tokens, "", ended).repeats

    loop = (1, 2, 3) + (5, 6, 7) * 11
    assert repeats(*loop)
    assert not repeats(*loop, ended=True)
    assert not repeats(*loop, 4)
    assert not repeats(*(5, 6, 7) * 5)  # too short to say
    assert not repeats(*range(100))


@torch.no_grad()
def test_agreement_is_that_of_transformers_logits(short, tokenizer, prompts):
    silu_llama, relu_llama = short
    done = evaluate(relu_llama, reference=silu_llama, prompts=prompts, limit=3)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval()
        for f in (relu_llama, silu_llama)
    )
    columns, agree, parted = [], 0, []
    for text in ("What is 0?", "What is 1?", "What is 3?"):
        prompt = encode_prompt(tokenizer, text)
        room = 96 - 40
        answer, own = (greedy(model, prompt, room) for model in (theirs, ours))
        answer, own = answer[: 96 - len(prompt)], own[: 96 - len(prompt)]
        log_q, log_p = (
            m(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            for m in (theirs, ours)
        )
        columns.append((log_q.exp() * (log_q - log_p)).sum(-1))
        agree += answer == own
        pairs = zip(answer, own, strict=False)
        parted.append(next(i for i, (a, b) in enumerate(pairs) if a != b))
    score = done.answers
    assert score.answers == 3
    assert score.kl.mean == pytest.approx(float(torch.cat(columns).mean()), rel=0.02)
    assert score.agree == agree == 0
    assert score.part_after == sorted(parted)[1]
    assert score.flips <= score.confident <= 1
    assert done.verdict == score.verdict
    assert [pair.prompt for pair in done.pairs] == ["What is 0?", "What is 1?", "What is 3?"]
    assert [pair.tokens for pair in done.pairs] == parted
    assert [pair.agrees for pair in done.pairs] == [False] * 3
    same = evaluate(silu_llama, reference=silu_llama, prompts=prompts).answers
    assert (same.answers, same.agree, same.same_top, same.flips) == (5, 5, 1, 0)
    assert same.kl.mean == pytest.approx(0, abs=1e-6)
    assert same.verdict.step is None  # 5 answers are too few


def test_a_fit_is_a_draft_of_its_original(capsys, short, text_file, prompts):
    (silu_llama, relu_llama), fit = short, prompts.parent / "fit"
    convert(silu_llama, fit, data=[str(text_file)], **QUICK)
    done = evaluate(fit, reference=silu_llama, prompts=prompts)
    assert done.acceptance == done.answers.same_top > 0
    assert done.to_json()["acceptance"] == done.acceptance
    evaluated(done)
    out = capsys.readouterr().out
    assert f"as a draft (--exact) it is right for {done.acceptance:.2%} of the reference's" in out
    for model, reference in ((silu_llama, silu_llama), (relu_llama, silu_llama), (fit, relu_llama)):
        assert evaluate(model, reference=reference, prompts=prompts, limit=1).acceptance is None


def test_prompts_come_out_of_chats(tokenizer, monkeypatch):
    chats = [f"<|user|>Question {n}?\n<|assistant|>Answer {n}.\n" for n in range(40)]
    tokens = torch.tensor([t for c in chats for t in [0, *tokenizer.encode(c)]])
    blocks = list(tokens[: len(tokens) // 64 * 64].view(-1, 64))
    found = [tokenizer.decode(p) for p in agreement.prompts_in(tokenizer, blocks)]
    assert len(found) == min(16, len(blocks))
    assert all(f"{text}" in "".join(chats) and text.endswith("<|assistant|>") for text in found)
    assert all(text.count("<|user|>") == 1 for text in found)
    plain = agreement.prompts_in(tokenizer, [torch.arange(1, 41)] * 3)
    assert plain == [list(range(1, 21))] * 3


def test_the_question_is_what_the_template_was_given(tokenizer):
    prompt = encode_prompt(tokenizer, "What is 0?")
    again = [*tokenizer.encode("<|user|>One?\n<|assistant|>Yes.\n"), *prompt]
    assert agreement.question_in(tokenizer, again) == "What is 0?"
    assert agreement.question_in(tokenizer, tokenizer.encode("def f():")) == "def f():"


def test_a_prompt_that_begins_the_function_wants_all_of_it():
    whole = Coded("import math\n\ndef f(x):\n    '''Root.'''\n", "f", "assert f(4) == 2")
    free = Coded("Write a function f.", "f", "assert f(4) == 2")
    (asked,) = questions.messages_of(whole)
    assert asked["content"].startswith("Complete this Python function. Answer with the whole")
    (asked,) = questions.messages_of(free)
    assert asked["content"] == "Write a function f.\n\nAnswer with one ```python block."


def test_without_a_chat_template_all_messages_are_read_as_text(tokenizer, silu_llama):
    plain, checkpoint = copy.copy(tokenizer), open_checkpoint(silu_llama)
    plain.chat_template = None
    subject = Subject(checkpoint, plain, AutoModelForCausalLM.from_pretrained(silu_llama))
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    assert subject.encoded(asked) == plain.encode("S\n\nhi")
    assert replace(subject, tokenizer=tokenizer).encoded(asked) == tokenizer.encode(
        "<|system|>S\n<|user|>hi\n<|assistant|>", add_special_tokens=False
    )


def scripted(monkeypatch, by_model: dict[str, list[str]]) -> None:
    """Let models answer what is written here, each by its `hidden_act`."""

    def spoken(model, tokenizer, prompts, max_tokens=512, progress=None):
        texts = by_model[model.config.hidden_act][: len(prompts)]
        return [Answer((*tokenizer.encode(text), 0), text, True) for text in texts]

    monkeypatch.setattr("twellctl.evaluation.subject.answers", spoken)


def test_what_was_lost_is_counted_and_shown(cli, silu_llama, relu_llama, tmp_path, monkeypatch):
    code = "```python\ndef f():\n    return {}\n```"
    scripted(
        monkeypatch,
        {
            "silu": [code.format(1), code.format(1), "4", "9", "nothing"],
            "relu": [code.format(2), code.format(1), "it is 4", "8", "16"],
        },
    )
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    coded = {"prompt": "Write f, which is 1.", "entry_point": "f", "tests": "assert f() == 1"}
    as_humaneval = {"prompt": "Write f", "entry_point": "f"}
    as_humaneval |= {"test": "def check(candidate):\n    assert candidate() == 1"}
    jsonl(tasks / "code.jsonl", [as_humaneval, coded])
    squares = [{"prompt": f"{n} times {n}?", "answer": n * n} for n in (2, 3, 4)]
    jsonl(tasks / "squares.jsonl", squares)
    words = ["eval", relu_llama, "--reference", silu_llama, "--tasks", tasks]
    assert cli(*words)[0] == 2
    assert "code: 2 programs that the model writes would be run with" in cli(*words)[2][-1]
    status, out, err = cli(*words, "--run-code")
    assert status == 0, err
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "code 2 50.0 +- 50.0 100.0 -50.0 +- 50.0 0 1" in rows
    assert "squares 3 66.7 +- 33.3 66.7 +- 33.3 +0.0 +- 57.7 1 1" in rows
    shown = out.splitlines()
    place = shown.index("lost of code: Write f")
    assert shown[place + 1] == "  reference: ```python def f(): return 1 ```"
    assert shown[place + 2] == "  this model: ```python def f(): return 2 ```"
    assert "lost of squares: 3 times 3?" in shown
    assert shown[0].startswith(f"{relu_llama}: ")  # the verdict, first of all
    assert "no verdict (5 answers of " in shown[0]


def test_the_verdict_is_of_tasks_if_there_are_enough(silu_llama, relu_llama, tmp_path, monkeypatch):
    scripted(monkeypatch, {"silu": ["4"] * 120, "relu": ["4"] * 90 + ["5"] * 30})
    file = jsonl(tmp_path / "sums.jsonl", [{"prompt": "2 + 2?", "answer": "4"}] * 120)
    done = evaluate(relu_llama, reference=silu_llama, tasks=file)
    assert (done.verdict.step, done.verdict.kept) == (3, 0.75)
    assert "90 tasks solved, 120 by the reference: 75% kept" in str(done.verdict)
    assert done.answers.answers == 64
    fewer = evaluate(relu_llama, reference=silu_llama, tasks=file, limit=50)
    assert "of 500 together" in fewer.verdict.because


def test_the_source_is_the_reference(short, tmp_path, monkeypatch, prompts):
    silu_llama, relu_llama = short
    shutil.copytree(relu_llama, tmp_path / "relu")
    said = []
    alone = evaluate(tmp_path / "relu", prompts=prompts, note=said.append)
    assert (alone.reference, alone.answers, alone.verdict) == (None, None, None)
    assert said == ["no --reference, and config.json names no source: what was lost is not known"]
    with json_in(tmp_path / "relu" / "config.json") as config:
        config["twell"]["source"] = "owner/model"
    monkeypatch.setattr("twellctl.models.checkpoint._download", lambda name, revision: silu_llama)
    assert evaluate(tmp_path / "relu", prompts=prompts, limit=1).answers.answers == 1


def test_code_is_not_run_without_limits(silu_llama, tmp_path, monkeypatch):
    coded = {"prompt": "f", "entry_point": "f", "tests": "assert f() == 1"}
    file = jsonl(tmp_path / "c.jsonl", [coded])
    monkeypatch.setattr(limited, "guards", lambda: limited.Guards("no seccomp here"))
    with pytest.raises(TwellError, match="no seccomp here: what a model writes is not run without"):
        evaluate(silu_llama, tasks=file, run_code=True)
    said = []
    monkeypatch.setattr(limited, "guards", lambda: limited.Guards(None, files=False))
    done = evaluate(silu_llama, tasks=file, run_code=True, note=said.append)
    assert done.tasks[0].right == (0,)
    assert said == ["beware: this kernel has no Landlock, so programs can read what you can read"]


def test_the_verdict_is_made_from_the_runs_that_were_judged():
    assert curve(RUNS) == pytest.approx((verdict.A, verdict.B), abs=1e-4)
    assert (len(RUNS), min(kept for _, kept, _ in RUNS)) == (verdict.RUNS, verdict.LEAST_KEPT)


def test_the_verdict_agrees_with_the_runs_that_it_was_not_made_from(monkeypatch):
    """One run left out at a time, it errs by one step of five at most."""
    for left_out in RUNS:
        a, b = curve([run for run in RUNS if run != left_out])
        monkeypatch.setattr(verdict, "A", a)
        monkeypatch.setattr(verdict, "B", b)
        kl, kept, name = left_out
        said, true = verdict.step_of(verdict.kept_at(kl)), verdict.step_of(kept)
        assert abs(said - true) <= 1, name


def test_a_verdict_gets_worse_with_kl():
    growing = (0, 0.004, 0.02, 0.05, 0.12, 0.5, 9.0)
    steps = [verdict.by_answers(kl, 16, 4000, 0.9).step for kl in growing]
    assert steps == sorted(steps)
    assert {*steps} == {0, 1, 2, 3, 4}
    assert math.isclose(verdict.kept_at(0.06), 0.8, abs_tol=0.05)


@pytest.mark.parametrize(
    ("facts", "because"),
    [
        ((0.0, 1, 1, 1.0), "1 answer of 1 token, it takes 8 of 500 together"),
        ((0.0, 8, 499, 1.0), "8 answers of 499 tokens, it takes 8 of 500 together"),
        ((0.02, 16, 4000, 0.0), "KL 0.0200, but 0.00% same tokens: the reference itself guesses"),
    ],
)
def test_answers_that_cannot_carry_a_verdict_have_none(facts, because):
    found = verdict.by_answers(*facts)
    assert (found.step, found.kept, found.is_bad) == (None, None, False)
    assert str(found) == f"no verdict ({because})"


def test_a_large_kl_is_bad_whatever_the_tokens():
    assert verdict.by_answers(9.0, 16, 4000, 0.0).step == 4


# ---- compare: answers side by side


def test_a_model_agrees_with_itself(success, silu_llama):
    out, _ = success("compare", silu_llama, silu_llama, "--limit", 2, "--max-tokens", 8)
    shown = out.splitlines()
    assert shown[0] == f"1. {PROMPTS[0]}"
    assert shown[1].startswith("   the same to the end, 8 tokens: ")
    assert "KL 0.0000" in out
    assert "2 of 2 agree to the end; " in out
    assert shown[-1].startswith(f"{silu_llama}: no verdict (2 answers of ")


def test_it_shows_where_answers_part(success, silu_llama, relu_llama, tokenizer, monkeypatch):
    said = {
        "silu": ["the sum is 391.", "<b>", "one two three"],
        "relu": ["the sum is 401.", "Yes, and more", "one two two" + " two" * 60],
    }

    def spoken(model, tokenizer, prompts, max_tokens, progress):
        texts = said[model.config.hidden_act]
        return [Answer(tuple(tokenizer.encode(text)), text, ended=len(text) < 40) for text in texts]

    monkeypatch.setattr(sys.modules["twellctl.compare"], "answers", spoken)
    out, _ = success("compare", silu_llama, relu_llama, "--limit", 3)
    shown = out.splitlines()
    same = tokenizer.encode("the sum is 391."), tokenizer.encode("the sum is 401.")
    tokens = next(i for i, (a, b) in enumerate(zip(*same, strict=False)) if a != b)
    assert shown[1] == f"   the same for {tokens} tokens, after ...'the sum is'"
    assert shown[2:4] == [f"   {silu_llama}: 391.", f"   {relu_llama}: 401."]
    assert shown[6] == "   the same for 0 tokens"
    assert shown[12].endswith("three")
    assert shown[13].endswith("[repeats itself]")
    assert "0 of 3 agree to the end" in out
    assert "(the reference's: 3), 1 repeat (0)" in out
    found = compare(silu_llama, relu_llama, limit=3)
    page = found._repr_html_()  # of a notebook
    assert all(f"<td>{text}</td>" in page for text in ("391., 401.", "&lt;b&gt;, Yes, and more"))
    assert f"<td>{found.score.verdict}</td>" in page


def test_what_cannot_be_compared_is_refused(silu_llama, make_model, tmp_path):
    with pytest.raises(UsageError, match="limit must be >= 1, got 0"):
        compare(silu_llama, silu_llama, limit=0)
    other = make_model("llama", vocab_size=600)
    with pytest.raises(TwellError, match=r"the second model .* has a different tokenizer from"):
        compare(silu_llama, other)


@pytest.mark.parametrize("command", ["compare", "eval"])
def test_the_chat_template_receives_its_settings(cli, silu_llama, tmp_path, monkeypatch, command):
    shutil.copytree(silu_llama, tmp_path / "model")
    template = "{{ messages[0].content }}{% if thinks %} I think so:{% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Is it?"}')
    words = [tmp_path / "model", "--reference"] if command == "eval" else [tmp_path / "model"]
    asked = []

    def answers(model, tokenizer, prompts, *_, **__):
        asked.extend(tokenizer.decode(prompt) for prompt in prompts)
        raise TwellError("enough")

    monkeypatch.setattr(sys.modules["twellctl.compare"], "answers", answers)
    monkeypatch.setattr(sys.modules["twellctl.evaluate"], "answers", answers)
    words += [tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl"]
    code, _, err = cli(command, *words, "--chat-template-kwargs", '{"thinks": true}')
    assert (code, asked) == (1, ["Is it? I think so:"]), err
    code, _, err = cli(command, *words, "--chat-template-kwargs", "thinks")
    assert (code, asked[1:]) == (2, []), err
