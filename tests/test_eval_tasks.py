"""eval on tasks: answers against likelihoods computed one by one, files, and lm-eval."""

import gzip
import json
import math
import random
import re

import pyarrow
import pytest
import torch
from conftest import stdlib_texts
from edits import jsonl, write_table
from transformers import AutoModelForCausalLM

from twellctl.errors import TwellError, UsageError
from twellctl.evaluate import evaluate
from twellctl.evaluation import choices
from twellctl.evaluation.questions import Asked, Coded, Question, Task, read_tasks
from twellctl.evaluation.results import Marks, Mean, TaskResult

GOOD = {"query": "def f(x):\n    return", "choices": ["x", "import os", "self.x"], "gold": 0}
SUM = {"prompt": "2 + 2?", "answer": "4", "match": "number"}
CODE = {"prompt": "Write f.", "entry_point": "f", "tests": "assert f() == 1"}


S, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "Sky?"}


@pytest.fixture(scope="module")
def stock(relu_llama):
    return AutoModelForCausalLM.from_pretrained(relu_llama, dtype=torch.float32).eval()


@torch.no_grad()
def likelihood(model, before: list[int], behind: list[int]) -> float:
    """One text at a time, without any padding."""
    log_p = model(torch.tensor([before + behind])).logits[0].log_softmax(-1)
    places = range(len(before) - 1, len(before) + len(behind) - 1)
    return sum(log_p[place, token].item() for place, token in zip(places, behind, strict=True))


def some_questions(count: int) -> list[Question]:
    """Pieces of real text, of very different lengths, whose gold is drawn."""
    drawn, text = random.Random(0), "".join(stdlib_texts(3))
    pieces = text.split()
    made = []
    for _ in range(count):
        start, size = drawn.randrange(len(pieces) - 60), drawn.choice([1, 5, 30])
        choices = tuple(drawn.sample(pieces, drawn.choice([2, 3, 5])))
        query = " ".join(pieces[start : start + size])
        made.append(Question(query, choices, drawn.randrange(len(choices))))
    return made


def test_answers_are_those_of_one_choice_at_a_time(
    relu_llama, stock, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("twellctl.evaluation.windows.BATCH_TOKENS", 150)
    questions = some_questions(25)
    rows = [{"query": q.query, "choices": list(q.choices), "gold": q.gold} for q in questions]
    file = jsonl(tmp_path / "pieces.jsonl", rows)
    steps = []
    done = evaluate(relu_llama, tasks=file, progress=lambda *step: steps.append(step))
    right, right_norm = 0, 0
    for question in questions:
        before = tokenizer.encode(question.query)
        sums = [
            likelihood(stock, before, tokenizer.encode(f"{question.query} {choice}")[len(before) :])
            for choice in question.choices
        ]
        norms = [s / len(choice) for s, choice in zip(sums, question.choices, strict=True)]
        right += sums.index(max(sums)) == question.gold
        right_norm += norms.index(max(norms)) == question.gold
    (task,) = done.tasks
    share = right / 25
    assert task.accuracy.acc.mean == pytest.approx(share)
    assert task.accuracy.acc.stderr == pytest.approx(math.sqrt(share * (1 - share) / 24))
    assert task.accuracy.acc_norm.mean == pytest.approx(right_norm / 25)
    assert right != right_norm  # so that the two are not the same thing
    assert task.chance == pytest.approx(sum(1 / len(q.choices) for q in questions) / 25)
    assert (task.task, task.questions, task.cut, done.text) == ("pieces", 25, 0, None)
    total = sum(len(q.choices) for q in questions)
    assert len(steps) > 3
    assert steps[-1] == (total, total)


@pytest.mark.parametrize(
    ("query", "choice", "whole"),
    [
        ("a = b", "cd", "a = b cd"),
        ("a = b ", "cd", "a = b cd"),
        ("a = b\n", "cd", "a = b\ncd"),
        ("a = b", " cd", "a = b cd"),
        ("", "cd", "cd"),
        (" \n", "cd", "cd"),
    ],
)
def test_a_space_is_put_where_there_is_none(tokenizer, query, choice, whole):
    made = choices.continuation(tokenizer, Question(query, (choice, "x"), 0), choice, None)
    stem = query.rstrip()
    opening = [] if stem else [tokenizer.eos_token_id]
    assert made.tokens == opening + tokenizer.encode(whole)
    assert made.tokens[: -made.scored] == opening + tokenizer.encode(stem)


def test_what_a_tokenizer_puts_around_a_text_goes_in_front_only(tokenizer, monkeypatch):
    plain = tokenizer.encode
    bos = tokenizer.bos_token_id

    def around(text, add_special_tokens=True, **how):
        ids = plain(text, add_special_tokens=False, **how)
        return [bos, *ids, bos] if add_special_tokens else ids

    monkeypatch.setattr(tokenizer, "encode", around)
    made = choices.continuation(tokenizer, Question("a = b", ("c", "x"), 0), "c", None)
    assert made.tokens == [bos, *plain("a = b c")]
    assert made.scored == len(plain(" c"))


def test_long_questions_are_cut_from_the_left_and_counted(relu_llama, stock, tokenizer):
    (text,) = stdlib_texts(1)
    asked = (Question(text[:3000], ("yes", "no"), 0), Question("a", ("yes", "no"), 1))
    marks = choices.answer(stock, tokenizer, 256, Task("long", asked))
    assert marks.cut == 1
    long = choices.continuation(tokenizer, asked[0], "yes", 256)
    assert (len(long.tokens), long.cut) == (256, True)
    assert long.tokens == tokenizer.encode(text[:3000].rstrip() + " yes")[-256:]
    (found,) = choices.log_likelihoods(stock, [long])
    split = len(long.tokens) - long.scored
    assert found == pytest.approx(likelihood(stock, long.tokens[:split], long.tokens[split:]))
    marks = choices.answer(stock, tokenizer, 64, Task("t", (Question("a", (text[:900], "b"), 0),)))
    assert marks.cut == 1  # a choice that is longer by itself is read from its end
    whole = choices.continuation(tokenizer, Question("a", (text[:900], "b"), 0), text[:900], 64)
    assert (len(whole.tokens), whole.scored) == (64, 63)


def test_a_model_that_computes_nan_is_refused(stock, tokenizer, monkeypatch):
    task = Task("t", (Question("a", ("b", "c"), 0),))
    broken = torch.nn.Parameter(stock.lm_head.weight * math.nan)
    monkeypatch.setitem(stock.lm_head._parameters, "weight", broken)
    with pytest.raises(TwellError, match="t: the model computes NaN"):
        choices.answer(stock, tokenizer, 256, task)


def test_the_screen_says_what_was_cut_and_what_is_guessed(success, relu_llama, tmp_path):
    rows = [{"query": stdlib_texts(1)[0][:3000], "choices": ["a", "b"], "gold": n} for n in (0, 1)]
    jsonl(tmp_path / "tasks" / "long.jsonl", rows)
    packed = gzip.compress(f"{json.dumps(GOOD)}\n".encode() * 40)
    (tmp_path / "tasks" / "short.jsonl.gz").write_bytes(packed)
    out, err = success("eval", relu_llama, "--reference", relu_llama, "--tasks", tmp_path / "tasks")
    assert "long: 2 of 2 questions are longer than the model's context" in err[0]
    assert "no better than guessing, by 3 standard errors: long" in err[1]
    assert len(err) == 2
    rows = [line.split() for line in out.splitlines()]
    assert ["long", "2", "50.0%"] in [row[:3] for row in rows]
    assert rows.count(["difference", "+0.0", "+0.0"]) == 3
    assert ["mean", "42"] in [row[:2] for row in rows]


def test_means_and_their_errors():
    how = {"options": (2, 2, 4, 4)}
    model = Marks("t", (1, 1, 0, 1), (1, 0, 0, 0), **how)
    other = Marks("t", (1, 0, 0, 1), (1, 1, 0, 0), **how)
    found = TaskResult.of(model, other)
    assert found.chance == pytest.approx(0.375)
    assert found.accuracy.acc == Mean(0.75, pytest.approx(0.25))
    assert found.difference.acc == Mean(0.25, pytest.approx(0.25))
    assert found.difference.acc_norm == Mean(-0.25, pytest.approx(0.25))
    without = TaskResult.of(Marks("u", (1,), options=(4,)))
    assert without.accuracy.acc == Mean(1, None)
    mean = TaskResult.over([found, without])
    assert mean.accuracy.acc == Mean(0.875, None)
    assert mean.accuracy.acc_norm == Mean(pytest.approx(0.625), None)  # acc where there is no other
    assert mean.reference is None
    # one in which all agree does not hide the error of the other
    assert Mean.over([Mean.of([1, 1]), Mean(0.5, 0.3)]) == Mean(0.75, pytest.approx(0.15))
    assert Mean.over([Mean(0.5, 0.3), Mean(1, 0.4)]) == Mean(0.75, pytest.approx(0.25))


def without(key: str) -> str:
    return json.dumps({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (without("query"), "it has no 'query', as in"),
        (without("choices"), "it has none of 'choices', 'answer', 'tests'"),
        (without("gold"), "it has no 'gold'"),
        (json.dumps(GOOD | {"query": 3}), "query must be a text, got 3"),
        (json.dumps(GOOD | {"choices": ["a"]}), "choices must be two or more, got 1"),
        (json.dumps(GOOD | {"choices": ["a", ""]}), "choices must be a list of texts"),
        (json.dumps(GOOD | {"gold": 3}), "gold must be 0 to 2, got 3"),
        (json.dumps(GOOD | {"gold": True}), "gold must be 0 to 2, got True"),
        (json.dumps(GOOD | {"tests": "x"}), "it has keys of two kinds, 'choices' and 'tests'"),
        (json.dumps(SUM | {"tests": "x"}), "it has keys of two kinds, 'answer' and 'tests'"),
        (json.dumps(SUM | {"answer": ""}), "answer must be a text or a number, got ''"),
        (json.dumps(SUM | {"answer": "no"}), "answer must hold a number, got 'no'"),
        (json.dumps(SUM | {"match": "regex", "answer": "("}), "must be a regular expression"),
        (json.dumps(SUM | {"match": "is"}), "match must be exact, number, contains or regex, got"),
        (json.dumps({"answer": "4"}), "it has nothing in a column such as prompt, .*, only answer"),
        (json.dumps(CODE | {"prompt": " "}), "it has no text of a user's that could be answered"),
        (json.dumps({"prompt": "f", "tests": "f()"}), "it has no 'entry_point'"),
        (json.dumps(CODE | {"entry_point": "f()"}), "entry_point must be the name of a function"),
        (json.dumps(CODE | {"entry_point": "a b"}), "entry_point must be the name of a function"),
        (json.dumps({"query": "q", "choices": ["a", "b"]}), r"no 'gold', as in \{\"query\": .*1\}"),
        (json.dumps(SUM), "is a question of another kind than most"),
        (json.dumps({"choices": {"text": 3, "label": []}}), "it has no 'query'"),
        (json.dumps({"code": "f", "test_list": [], "test_imports": 3}), "it has none of"),
        ("[]", r"a question must be a JSON object, got \[\]"),
        ("{", "not valid JSON"),
    ],
)
def test_a_bad_question_is_named_by_file_and_line_and_left_out(tmp_path, caplog, line, said):
    file = tmp_path / "task.jsonl"
    file.write_text("\n\n" + line + "\n" + (json.dumps(GOOD) + "\n") * 2)
    remedy = "(correct or leave|put each kind|each line must)"
    (task,) = read_tasks([str(file)], limit=1)
    assert [question.where for question in task.questions] == [f"{file}:4"]
    left_out = rf"1 of 3 (rows|questions) of {file} are left out; the first: "
    assert re.search(rf"{left_out}{file}:3:? .*{said}.*: {remedy}", caplog.text)


def test_a_file_of_bad_questions_is_refused(tmp_path):
    file = jsonl(tmp_path / "task.jsonl", [{"query": "Q"}, {"choices": []}])
    with pytest.raises(TwellError, match=r"task\.jsonl:1: it has none of .*: correct or leave"):
        read_tasks([file])


@pytest.mark.parametrize(
    ("row", "question"),
    [
        (
            {
                "question": "Q",
                "choices": {"text": ["a", "b"], "label": ["A", "B"]},
                "answerKey": "B",
            },
            Question("Question: Q\nAnswer:", ("a", "b"), 1),
        ),
        (
            {"question": "Q", "choices": ["a", "b"], "answer": 1},
            Question("Question: Q\nAnswer:", ("a", "b"), 1),
        ),
        (
            {"question": "Q", "choices": ["a", "b"], "answer": "B"},
            Question("Question: Q\nAnswer:", ("a", "b"), 1),
        ),
        ({"query": "Q", "choices": ["a", "b"], "gold": "1"}, Question("Q", ("a", "b"), 1)),
        ({"query": "Q", "choices": ["a", "b"], "gold": "b"}, Question("Q", ("a", "b"), 1)),
        ({"query": "Q", "choices": ["1", "0"], "gold": "1"}, Question("Q", ("1", "0"), 0)),
        ({"question": "3 + 4?", "answer": "So 7.\n#### 7"}, Asked("3 + 4?", "7", "number")),
        ({"question": "Sky?", "answer": "blue"}, Asked("Sky?", "blue", "exact")),
        ({"question": "5?", "answer": "#### 5", "match": "exact"}, Asked("5?", "#### 5", "exact")),
        (
            {"instruction": "Add.", "input": "3, 4", "answer": 7},
            Asked("Add.\n\n3, 4", "7", "number"),
        ),
        ({"problem": "3 + 4?", "solution": "So", "answer": "7"}, Asked("3 + 4?", "7", "exact")),
        (
            {"context": "t(a)", "question": "Sum?", "answer": "s"},
            Asked("Sum?\n\nt(a)", "s", "exact"),
        ),
        ({"system": "S", "prompt": "Sky?", "answer": "b"}, Asked("Sky?", "b", "exact", "", (S,))),
        ({"messages": [S, USER], "answer": "b"}, Asked("Sky?", "b", "exact", "", (S,))),
        ({"prompt": [S, USER], "answer": "b"}, Asked("Sky?", "b", "exact", "", (S,))),
        (
            {"system_prompt": "S", "instruction": "Write f.", "entry_point": "f", "tests": "f()"},
            Coded("Write f.", "f", "f()", None, "", (S,)),
        ),
        (
            {"system": "S", "problem": "Q", "choices": ["a", "b"], "gold": 1},
            Question("S\n\nQuestion: Q\nAnswer:", ("a", "b"), 1),
        ),
        (
            {"system": "S", "query": "Q", "choices": ["a", "b"], "gold": 1},
            Question("S\n\nQ", ("a", "b"), 1),
        ),
        ({"query": "", "choices": ["a", "b"], "gold": 1}, Question("", ("a", "b"), 1)),
        (
            {"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"]},
            Coded(
                "Write f.\nYour code should pass these tests:\n\nassert f() == 1",
                "f",
                "assert f() == 1",
                "def f(): return 1",
            ),
        ),
        (
            {
                "prompt": "Write f.",
                "code": "def g(): return 1\ndef f(): return g()",
                "test_imports": ["import math"],
                "test_list": ["assert f() == 1"],
                "test": "assert f() == 1.0",
            },
            Coded(
                "Write f.\nYour code should pass these tests:\n\nassert f() == 1",
                "f",
                "import math\nassert f() == 1.0",
                "def g(): return 1\ndef f(): return g()",
            ),
        ),
        (
            {
                "prompt": "def f():\n",
                "entry_point": "f",
                "test": "def check(candidate): pass",
                "canonical_solution": "    return 1",
            },
            Coded("def f():\n", "f", "def check(candidate): pass", "    return 1"),
        ),
        (
            {"prompt": "import math", "query": "Write f.", "entry_point": "f", "test": "f()"}
            | {"completion": "def f(): return 1", "response": "It is easy."},
            Coded(
                "Write f.\n\nBefore your code stands:\n\n```python\nimport math\n```",
                "f",
                "f()",
                "def f(): return 1",
            ),
        ),
        (
            {"prompt": "class S:\n", "entry_point": "S().f", "test": "def check(candidate): pass"},
            Coded("class S:\n", "S().f", "def check(candidate): pass"),
        ),
    ],
)
def test_rows_of_the_hub_are_read(tmp_path, row, question):
    jsonl(tmp_path / "tasks" / "lines.jsonl", [row])
    table = pyarrow.Table.from_pylist([{"match": None} | row])  # a column that others have
    for suffix in (".parquet", ".arrow"):
        write_table(tmp_path / "tasks" / f"a{suffix[1:]}{suffix}", table)
    tasks = read_tasks([str(tmp_path / "tasks")])
    assert [task.questions for task in tasks] == [(question,)] * 3


def test_files_that_hold_no_task_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TwellError, match=r"empty holds no \.jsonl, .*, \.parquet, \.arrow file"):
        read_tasks([str(empty)])
    with pytest.raises(TwellError, match=r"none\.jsonl cannot be read: No such file"):
        read_tasks([str(tmp_path / "none.jsonl")])
    (empty / "a.jsonl").write_text("\n")
    with pytest.raises(TwellError, match="holds no question"):
        read_tasks([str(empty)])
    file = jsonl(tmp_path / "other" / "a.jsonl", [GOOD])
    with pytest.raises(TwellError, match="two tasks are called a"):
        read_tasks([file, file])


def test_tasks_by_name_are_left_to_lm_eval(relu_llama, tmp_path):
    with pytest.raises(UsageError, match=r"no task 'arc_easy': give a file .*--tasks arc_easy"):
        evaluate(relu_llama, tasks="arc_easy")
    with pytest.raises(TwellError, match="cannot be read"):  # a path is none of its names
        evaluate(relu_llama, tasks=str(tmp_path / "none"))
