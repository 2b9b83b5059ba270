"""Questions that say nothing about a model: no answer can be wrong, or none can be right.

They are named and left out before any model is loaded. No torch.
"""

from collections.abc import Sequence
from dataclasses import replace

import regex

from twellctl.errors import TwellError, counted
from twellctl.evaluation import limited, programs
from twellctl.evaluation.questions import (
    PATTERN_SECONDS,
    AnyQuestion,
    Asked,
    Coded,
    Question,
    Task,
    program,
)
from twellctl.evaluation.settings import Doing, Progress

_NAMED = 5  # places that a note names
_HARD = ("a" * 60 + "!", "1" * 60 + "!", "word " * 30 + "!")  # for patterns that try all splits


def leave_out_unsound(
    tasks: Sequence[Task[AnyQuestion]], doing: Doing, note: Doing, progress: Progress
) -> list[Task[AnyQuestion]]:
    """`tasks` without questions that cannot fail or cannot pass; `note` names them.

    Code is run, so it must be allowed. `TwellError` for a task of which nothing is left.
    """
    return [_sound(task, doing, note, progress) for task in tasks]


def _sound(
    task: Task[AnyQuestion], doing: Doing, note: Doing, progress: Progress
) -> Task[AnyQuestion]:
    faults = {i: why for i, q in enumerate(task.questions) if (why := _fault(q)) is not None}
    coded = {i: q for i, q in enumerate(task.questions) if isinstance(q, Coded) and i not in faults}
    if coded:
        doing(f"checking the tests of {task.name}")
        faults |= _faults_of_tests(coded, progress)
    for why in dict.fromkeys(faults.values()):
        places = [task.questions[i].where for i, other in faults.items() if other == why]
        note(f"{task.name}: {counted(len(places), 'question')} left out, {why}: {_named(places)}")
    left = tuple(q for i, q in enumerate(task.questions) if i not in faults)
    if not left:
        raise TwellError(f"{task.name}: no question is left: correct its file")
    return replace(task, questions=left)


def _fault(question: AnyQuestion) -> str | None:
    """What can be seen without running anything."""
    if isinstance(question, Question):
        is_alike = len({choice.strip() for choice in question.choices}) == 1
        return "all choices are alike" if is_alike else None
    if isinstance(question, Asked):
        return _fault_of_pattern(question.answer) if question.match == "regex" else None
    is_empty = programs.tests_nothing(question.tests, question.entry_point)
    return "the tests do not call the function" if is_empty else None


def _fault_of_pattern(pattern: str) -> str | None:
    try:
        empty, *_ = (
            regex.search(pattern.strip(), text, timeout=PATTERN_SECONDS) for text in ("", *_HARD)
        )
    except TimeoutError:
        return "the pattern takes too long"
    return None if empty is None else "the pattern also matches an empty answer"


def _faults_of_tests(questions: dict[int, Coded], progress: Progress) -> dict[int, str]:
    """Run the tests on an answer that does nothing, and on the reference solution."""
    solved = {i: q.solution for i, q in questions.items() if q.solution is not None}
    sources = [programs.stub(q.prompt, q.entry_point, q.tests) for q in questions.values()]
    sources += [program(questions[i], f"```python\n{code}\n```") for i, code in solved.items()]
    outcomes = limited.run_all(sources, progress)
    of_stubs = zip(questions, outcomes[: len(questions)], strict=True)
    faults = {i: "a function that returns None passes" for i, done in of_stubs if done.passed}
    of_solutions = zip(solved, outcomes[len(questions) :], strict=True)
    faults |= {i: "their own solution fails" for i, done in of_solutions if not done.passed}
    return faults


def _named(places: Sequence[str]) -> str:
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"{', '.join(places[:_NAMED])}{more}"
