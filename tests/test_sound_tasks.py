"""Questions that say nothing about a model: which are left out, and what is said of them."""

import pytest

from twellctl.errors import TwellError
from twellctl.evaluation.questions import Asked, Coded, Question, Task
from twellctl.evaluation.sound_tasks import leave_out_unsound

SUM = Coded("Write a function add(a, b) that returns the sum.", "add", "assert add(1, 2) == 3")


def left_out(*questions) -> tuple[list[str], list[int]]:
    """(what is noted, the places of what is left)."""
    placed = tuple(questions)
    said: list[str] = []
    (task,) = leave_out_unsound(
        [Task("t", placed)], lambda text: None, said.append, lambda done, total: None
    )
    return said, [placed.index(question) for question in task.questions]


@pytest.mark.usefixtures("limits_programs")
def test_tests_that_cannot_fail_or_cannot_pass_are_left_out():
    said, left = left_out(
        SUM,
        Coded("f", "f", "# assert f() == 1", where="a:2"),
        Coded("f", "f", "f()", where="a:3"),
        Coded("f", "f", "assert f() is None", where="a:4"),
        Coded("f", "f", "assert f() == 1", "def f():\n    return 2", where="a:5"),
        Coded("f", "f", "assert f() == 2", "def f():\n    return 2", where="a:6"),
        Coded("def f():\n    '''2'''\n", "f", "assert f() == 2", "    return 2\n", where="a:7"),
    )
    assert left == [0, 5, 6]
    assert said == [
        "t: 1 question left out, the tests do not call the function: a:2",
        "t: 2 questions left out, a function that returns None passes: a:3, a:4",
        "t: 1 question left out, their own solution fails: a:5",
    ]


def test_choices_that_are_alike_and_patterns_that_match_all_are_left_out(monkeypatch):
    monkeypatch.setattr("twellctl.evaluation.sound_tasks.PATTERN_SECONDS", 0.01)
    said, left = left_out(
        Question("q", ("a", "a "), 0, where="b:1"), Question("q", ("a", "b"), 0, where="b:2")
    )
    assert (said, left) == (["t: 1 question left out, all choices are alike: b:1"], [1])
    said, left = left_out(
        Asked("q", ".*", "regex", where="c:1"),
        Asked("q", "^a", "regex", where="c:2"),
        Asked("q", "^(a|aa)+$", "regex", where="c:3"),
    )
    assert left == [1]
    assert said == [
        "t: 1 question left out, the pattern also matches an empty answer: c:1",
        "t: 1 question left out, the pattern takes too long: c:3",
    ]
    with pytest.raises(TwellError, match="t: no question is left: correct its file"):
        left_out(Question("q", ("a", "a"), 0))
