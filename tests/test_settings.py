"""Settings as flags: what is told of them, and what is refused."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from twellctl.bench.settings import MOST_ROWS, DecodeSettings
from twellctl.bundle.twell_few import FEW_TOKENS
from twellctl.cli.command import command
from twellctl.cli.flags import made, takes
from twellctl.errors import UsageError
from twellctl.fitting.settings import Fit
from twellctl.settings import chosen, refuse_wrong, setting


@dataclass(frozen=True)
class One:
    seed: int = setting(0, "Seed.")
    name: str | None = setting(None, "A name.", flag="NAME")
    sizes: tuple[int, ...] = setting((8, 16), "Sizes.", flag="size", at_least=8)
    share: float = setting(0.5, "A share.", above=0, below=1)
    modes: tuple[str, ...] = setting(("a",), "Ways.", flag="mode", choices=("a", "b", "c"))
    fast: bool = setting(True, "Fast.")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sizes": (8, 0)}, "size must be >= 8, got 0"),
        ({"sizes": (8, "16")}, "size must be a number, got '16'"),
        ({"share": 1}, "share must be > 0 and < 1, got 1"),
        ({"share": float("nan")}, "share must be finite, got nan"),
        ({"modes": ("d",)}, "mode must be a, b or c, got 'd'"),
        ({"fast": 1}, "fast must be true or false, got 1"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
    ],
)  # fmt: skip
def test_the_first_wrong_value_is_named(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        refuse_wrong(One(**given))


def ran(decorate, *words: str) -> tuple[dict, str]:
    """The flags that a command gets, and what it printed; `words` are its command line."""
    app, got = typer.Typer(), {}

    @command(app, "run")
    @decorate
    def run(*, first: bool = False, flags: dict) -> None:
        got.update(flags)

    done = CliRunner().invoke(app, words, env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    return got, " ".join(done.output.split())


def test_a_call_with_a_misspelt_argument_names_those_there_are():
    assert chosen(One, {"seed": 3}) == One(seed=3)
    with pytest.raises(TypeError, match=r"^there is no argument 'sed', but seed, name, sizes"):
        chosen(One, {"sed": 3})
    with pytest.raises(UsageError, match="size must be >= 8, got 0"):
        chosen(One, {"sizes": (8, 0)})
    for given in ("a", Path("a"), ["a"], [Path("a")]):
        assert chosen(Fit, {"data": given, "tokens": 4096.0}) == Fit(data=["a"], tokens=4096)
    with pytest.raises(UsageError, match="data must be text, got None"):
        chosen(Fit, {"data": None})


def test_flags_are_those_given():
    assert ran(takes(One))[0] == {}
    words = ("me", "--size", "8", "--size", "24", "--no-fast", "--mode", "b")
    flags, _ = ran(takes(One), *words)
    expected = {"NAME": "me", "size": [8, 24], "fast": False, "mode": ["b"]}
    assert flags == expected
    assert made(One, flags) == One(name="me", sizes=(8, 24), fast=False, modes=("b",))


def test_the_help_says_the_defaults():
    _, text = ran(takes(One), "--help")
    for part in ("Sizes. [default: 8, 16]", "Fast. [default: on]", "--no-fast", "a|b|c"):
        assert part in text
    places = [text.index(f"--{name}") for name in ("first", "seed", "size", "fast")]
    assert places == sorted(places)


def test_what_is_said_without_torch_is_true():
    assert MOST_ROWS == FEW_TOKENS
    assert DecodeSettings().check() is None
