"""The settings of `twellctl convert`: flags with help, defaults and checks in one table."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from twellctl.models.checks import FfnShape
from twellctl.settings import setting

# called with (layers fitted, of how many, how far hidden states differ, seconds left)
Progress: TypeAlias = Callable[[int, int, float, float], None]
GROUP_SIZES = (128, 64, 32, 16, 8)  # inputs that share a scale: the first from a hidden size of
WIDE = 3072  # on, else the second, or the next that divides
LEAST_GROUP = 8  # so many codes are packed into one number
TOKENS_A_WEIGHT = 4  # the least number of tokens for each of the N + K unknowns of an output
QUICK_RIDGE = 0.3  # on so little text; with 0.001 an FFN erred twice as much (recipes/LAB.md)
TILE = 256  # of the format: N + R neurons are whole tiles where N are


@dataclass(frozen=True)
class Fit:
    """How a model is fitted; without `data` it is not."""

    data: list[str] = setting(
        [],
        "Text to fit on: a jsonl, JSON, txt, parquet or Arrow file, compressed or not, or a folder "
        "of them. Repeatable. The model's own answers work best (twellctl write). Without it, only "
        "the activation is swapped, and no weight changes.",
        group="Fitting",
    )
    text_column: str = setting("text", "The column that holds the text.")
    tokens: int = setting(2_000_000, "Tokens of text to fit on.", at_least=1024)
    density: float | None = setting(
        None,
        "Target share of neurons that fire per token, averaged over the layers. Above what ReLU "
        "lets through, about 20 %, gates move up: by 0.2 at most, which adds some 6 %. "
        "[default: 0.15, or 0.18 with --bits]",
        above=0,
        at_most=1,
    )
    map_rank: int | None = setting(
        None,
        "Rank of the linear map in each FFN: that many extra neurons, which always fire. "
        "[default: about half of the hidden size]",
        at_least=0,
    )
    steps: int = setting(
        800,
        "Adam steps on each layer alone, between two least-squares fits. 0: least squares alone, "
        "four times as fast, which suffices near the density that ReLU lets through.",
        at_least=0,
    )
    step_tokens: int = setting(4096, "Tokens per Adam step.", at_least=1)
    step_rate: float = setting(0.01, "Learning rate, relative to the rms of a weight.", above=0)
    quick: bool = setting(
        False,
        "Least squares alone, on the least text that a fit takes, in the place of --tokens and "
        "--steps: for a model of 0.5B half an hour of a processor's time. It keeps less.",
    )
    bits: int | None = setting(
        None,
        "4: round all linear layers to 4 bits inside the fit. [default: weights keep their dtype]",
        at_least=4,
        at_most=4,
    )
    group_size: int | None = setting(
        None,
        "Inputs that share a scale, with --bits. [default: 128, or 64 below a hidden size of 3072; "
        "less where it does not divide]",
        at_least=LEAST_GROUP,
    )
    keep_activation: bool = setting(
        False,
        "With --bits: keep the activation and all neurons. This is the model itself in 4 bits, to "
        "compare with. --density, --map-rank, --ridge and what concerns steps have no effect.",
    )
    ridge: float = setting(
        1e-3, "Ridge parameter of the least squares; with --quick at least 0.3.", above=0
    )
    seq_len: int = setting(512, "Tokens per window of text.", at_least=8)
    eval_windows: int | None = setting(
        None,
        "Windows held out for measuring. [default: 32, or an eighth of a short text]",
        at_least=1,
    )
    seed: int = setting(0, "Random seed.", at_least=0, at_most=2**31 - 1)


def least_tokens(hidden_size: int, num_neurons: int) -> int:
    """Of text, so that least squares has something to choose by."""
    return TOKENS_A_WEIGHT * (hidden_size + num_neurons)


def quickened(fit: Fit, ffn: FfnShape) -> Fit:
    """`fit` itself, or what it is for a model of these sizes if it is to be `quick`."""
    if not fit.quick:
        return fit
    windows = math.ceil(least_tokens(ffn.hidden_size, ffn.intermediate_size) / fit.seq_len)
    ridge = max(fit.ridge, QUICK_RIDGE)
    return replace(fit, tokens=windows * fit.seq_len, steps=0, ridge=ridge)


def windows_held_out(fit: Fit, count: int | None = None) -> int:
    """Those asked for, or one for eight to fit on, up to 32, of text that makes `count` windows.

    None: it makes as many as are wanted.
    """
    some = fit.tokens // fit.seq_len
    if count is not None:
        some = min(some, 8 * count // 9)
    return fit.eval_windows or min(32, max(1, some // 8))


def density_of(fit: Fit) -> float:
    """The density asked for, or what is worth its bytes: in 4 bits more is."""
    if fit.keep_activation:
        return 1.0
    if fit.density is not None:
        return fit.density
    return 0.18 if fit.bits else 0.15


def rank_of_map(fit: Fit, hidden_size: int, num_neurons: int) -> int:
    """The rank asked for, or half of the hidden size, such that all neurons are whole tiles."""
    if fit.keep_activation:
        return 0
    if fit.map_rank is not None:
        return fit.map_rank
    wanted = num_neurons + hidden_size // 2
    rank = max(1, round(wanted / TILE)) * TILE - num_neurons
    return rank if 0 < rank <= hidden_size else hidden_size // 2
