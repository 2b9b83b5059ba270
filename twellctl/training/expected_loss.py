"""What a target costs in quality, said before a run: the loss over SiLU to expect.

    loss over SiLU = COST * sqrt(2.4 million / (tokens * density)) - GAIN        [nats a token]

`tokens` are those of the run, `density` is the target's share of neurons that fire. So half the
density costs as much as half the tokens; 2.4 million are 80 million tokens at 3 %. GAIN is what the
model wins because it reads more text, or text of another kind than it has read.

The rule is fitted to the measured runs of recipes/runs.csv. The tests fit it again, and
recipes/LAB.md tells which other forms were tried. It knows two small models, one on Python text,
one on a mix of English and Python.
"""

import csv
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from twellctl.here.resources import resource_dir
from twellctl.models.checkpoint import Checkpoint
from twellctl.settings import flag_name
from twellctl.training.recipe import Recipe, resolve_recipe

COST, GAIN = 0.0597, 0.0177
FIRING = 2.4e6  # tokens times density, at which COST is paid
ERROR = 0.013  # of a setting, when the rule was fitted to all others: the largest
TOLERANCE = 1.05  # so far beyond the runs the rule still counts as measured
TOO_FAR = 10  # so many times fewer tokens x density than any run had: the rule says nothing
MOST_PASSES = 4  # over the text, of the measured runs
TARGETS, BUDGETS = (0.05, 0.03, 0.01), (20e6, 80e6, 300e6)  # of others; the shipped recipes'
_USED = "yes"  # of runs.csv: what the rule is fitted to; else it says why not
# what all recipes have in common that the rule is fitted to
_FITTED = ("penalty", "teacher_weight", "state_weight", "soften", "optimizer", "learning_rate")
_FITTED += ("lr_scheduler", "weight_decay", "param_dtype", "lora_rank")


@dataclass(frozen=True)
class MeasuredRun:
    """Runs of one setting, which differ by their seeds: `over_silu` is their mean."""

    model: str
    parameters: int
    tokens: int
    density: float
    over_silu: float

    @property
    def firing(self) -> float:
        return self.tokens * self.density


@dataclass(frozen=True)
class ExpectedLoss:
    """Nats a token over SiLU after a run of `tokens` whose target is `density`.

    `outside` names what lies beyond the measured runs; `error` is None then: it is not known.
    """

    tokens: float
    density: float
    nats: float
    outside: tuple[str, ...]

    @property
    def error(self) -> float | None:
        return None if self.outside else ERROR


@dataclass(frozen=True)
class LossOutlook:
    """The loss to expect, and that of `others`: with another target, or with another budget."""

    expected: ExpectedLoss
    others: tuple[ExpectedLoss, ...]


def why_no_outlook(checkpoint: Checkpoint, recipe: Recipe, tokens: int) -> str | None:
    """Why the rule says nothing of fine-tuning `checkpoint` by `tokens`; None: it does.

    What `recipe` leaves open counts as it was in the measured runs, though the smaller model's had
    another weight of the states.
    """
    if recipe.l1_schedule == "constant":
        return "--l1-schedule constant has no target"
    if not checkpoint.shards or not checkpoint.is_only_converted:
        return f"{checkpoint.name} is not freshly converted from SiLU"
    if recipe.teacher == "none":
        return "the measured runs had a teacher"
    if recipe.teacher != "auto":
        return "the measured runs learned from their own SiLU form, and not from another --teacher"
    fitted = resolve_recipe("standard"), Recipe()
    for name in _FITTED:
        if (given := getattr(recipe, name)) not in [getattr(one, name) for one in fitted]:
            return f"no measured run had --{flag_name(name)} {given}"
    if _is_too_far(tokens, 1 - recipe.target_sparsity):
        fewest = millions(min(run.tokens for run in measured_runs()))
        return f"{millions(tokens)} tokens are too few for this target, the rule begins at {fewest}"
    return None


def loss_outlook(
    tokens: int, density: float, parameters: int, text_tokens: float = math.inf
) -> LossOutlook:
    """What a run of `tokens` on a model of `parameters` is to cost at `density`.

    The text has `text_tokens`; a longer run reads it again.
    """
    of = parameters, text_tokens

    others = [(tokens, other) for other in TARGETS if not _reaches(other, density, density)]
    others += [(other, density) for other in BUDGETS if not _reaches(other, tokens, tokens)]
    return LossOutlook(
        expected_loss(tokens, density, *of),
        tuple(expected_loss(*run, *of) for run in others if not _is_too_far(*run)),
    )


def expected_loss(
    tokens: float, density: float, parameters: int, text_tokens: float = math.inf
) -> ExpectedLoss:
    """By the rule; as in `loss_outlook`."""
    nats = COST * math.sqrt(FIRING / (tokens * density)) - GAIN
    outside = _outside(tokens, density, parameters)
    if (passes := tokens / text_tokens) > MOST_PASSES * TOLERANCE:
        outside += (f"{passes:.0f} passes over the text (up to {MOST_PASSES} were measured)",)
    return ExpectedLoss(tokens, density, nats, outside)


@functools.cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """The settings that the rule is fitted to."""
    seeds: dict[tuple[str, int, int, float], list[float]] = {}
    with (resource_dir("recipes") / "runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            setting = int(row["parameters"]), int(row["tokens"]), float(row["target_density"])
            if row["used"] == _USED:
                seeds.setdefault((row["model"], *setting), []).append(float(row["over_silu"]))
    return tuple(MeasuredRun(*setting, mean(losses)) for setting, losses in seeds.items())


def millions(count: float) -> str:
    """Like "80 million", "8,030 million", "0.0064 million"."""
    number = count / 1e6
    return f"{number:,.0f} million" if number >= 10 else f"{number:.2g} million"


def _outside(tokens: float, density: float, parameters: int) -> tuple[str, ...]:
    runs = measured_runs()

    def beyond(
        what: str, value: float, of: Callable[[MeasuredRun], float], told: Callable[[float], str]
    ) -> list[str]:
        least, most = min(map(of, runs)), max(map(of, runs))
        if _reaches(value, least, most):
            return []
        return [f"{told(value)} {what} ({told(least)} to {told(most)} were measured)"]

    found = beyond("parameters", parameters, lambda run: run.parameters, millions)
    by_run = beyond("tokens", tokens, lambda run: run.tokens, millions)
    by_run += beyond("firing", density, lambda run: run.density, "{:.2%}".format)
    if not by_run:  # each alone was measured
        by_run = beyond("tokens x firing", tokens * density, lambda run: run.firing, millions)
    return (*found, *by_run)


def _is_too_far(tokens: float, density: float) -> bool:
    return tokens * density < min(run.firing for run in measured_runs()) / TOO_FAR


def _reaches(value: float, least: float, most: float) -> bool:
    return least / TOLERANCE <= value <= most * TOLERANCE
