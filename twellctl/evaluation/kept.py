"""How many of its reference's tasks a model keeps, and for how many bytes: a point of a plot.

Made from the JSON of an evaluation, so that a file is as good as the evaluation itself. No torch.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from twellctl.errors import TwellError
from twellctl.report.charts import Point, Points, short_name

TITLE = "Tasks kept, and bytes read for a token"


class Kept(NamedTuple):
    """The tasks that a model solves, over those that its reference solves; with its error."""

    share: float
    stderr: float


def kept_of(tasks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Kept | None:
    """Of the marks of the model and of the reference, question by question in each task.

    None where the reference solves nothing. The standard error is that of a ratio of two sums over
    the same questions (the delta method): what both solve adds little to it.
    """
    pairs = [pair for own, theirs in tasks for pair in zip(own, theirs, strict=True)]
    solved = sum(theirs for _, theirs in pairs)
    if not solved:
        return None
    share = sum(own for own, _ in pairs) / solved
    squares = sum((own - share * theirs) ** 2 for own, theirs in pairs)
    count = len(pairs)
    return Kept(share, math.sqrt(squares * count / max(1, count - 1)) / solved)


def point_of(evaluation: dict[str, Any], where: object, label: str | None = None) -> Point:
    """The point of an evaluation's JSON; `where` it is from. Its label is the model's name.

    `TwellError` where it lacks tasks in the model's own words that a reference solves, too, or the
    bytes of either.
    """
    try:
        tasks = [
            (task["right"], task["reference_right"])
            for task in evaluation["tasks"]
            if task["reference_right"]
        ]
        kept = kept_of(tasks)
        own, reference = evaluation["bytes_read"], evaluation["reference_bytes_read"]
        if kept is None:
            raise TwellError(
                f"{where} has no task that a reference solves in its own words, which is what is "
                "kept: evaluate with --tasks FILE --reference MODEL"
            )
        if not own or not reference:
            raise TwellError(
                f"{where} does not say how many bytes both models read for a token: evaluate again "
                "with --data FILE, by which is known what fires"
            )
        label = label or short_name(evaluation["model"])
        return Point(label, own / reference, *kept, short_name(evaluation["reference"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TwellError(
            f"{where} is not a complete evaluation: run twellctl eval again"
        ) from error


def chart_of(points: Sequence[Point]) -> Points:
    """A plot of them."""
    return Points(
        TITLE, points, "kept: of the tasks that the original solves, ± one standard error"
    )
