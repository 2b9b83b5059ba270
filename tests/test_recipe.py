"""Recipes: flag over file over default, every mistake named at once, what ships is sound."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
import yaml
from typer.testing import CliRunner

from twellctl.bench.settings import MOST_ROWS, DecodeSettings
from twellctl.bundle.twell_few import FEW_TOKENS
from twellctl.cli.command import command
from twellctl.errors import TwellError, UsageError
from twellctl.fitting.settings import Fit
from twellctl.here.resources import resource_dir
from twellctl.settings import chosen, refuse_wrong, setting
from twellctl.training.recipe import (
    UNNAMED_TEACHER,
    Recipe,
    flag_name,
    public_recipe,
    recipe_names,
    resolve_recipe,
    save_recipe,
)


@pytest.fixture
def write(tmp_path):
    """`write(text)` makes a recipe file and returns its path."""

    def make(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def refusal(error: type[TwellError], recipe=None, **flags) -> str:
    with pytest.raises(TwellError) as raised:
        resolve_recipe(recipe, flags)
    assert type(raised.value) is error, raised.value
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_flag_over_recipe_over_default(write):
    path = write("l1: 0.001\nseq-len: 64\nreport-to: wandb\n")
    recipe = resolve_recipe(path, {"l1": 0.25, "lora_rank": 4})
    assert recipe == Recipe(l1=0.25, seq_len=64, report_to="wandb", lora_rank=4)
    assert resolve_recipe() == Recipe()


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "'2e-5'", "0.00002"])
def test_numbers_that_yaml_takes_for_text(write, text):
    recipe = resolve_recipe(write(f"l1: {text}\nsave-steps: 1e3\nmax-tokens: 9007199254740993\n"))
    assert (recipe.l1, recipe.save_steps, recipe.max_tokens) == (2e-5, 1000, 2**53 + 1)
    assert type(recipe.save_steps) is int


def test_kinds(write):
    text = "data: a.txt\neval-data: [b.txt, c]\nlora-ffn: yes\nlora-rank: 0x2\nmax-steps: null\n"
    recipe = resolve_recipe(write(text), {"data": [Path("d"), "e"]})
    assert (recipe.data, recipe.eval_data) == (["d", "e"], ["b.txt", "c"])
    assert (recipe.lora_ffn, recipe.max_steps) == (True, None)
    assert resolve_recipe(write("data: a.txt")).data == ["a.txt"]
    assert resolve_recipe(write("data: '010'\nl1: 0.5\nseed: 0\n")).data == ["010"]


def test_target_sparsity_of_older_recipes_is_read_as_density(write):
    assert resolve_recipe(write("target-sparsity: 0.97")).density == 0.03
    assert resolve_recipe(None, {"target_sparsity": 0.9}).density == 0.1
    text = refusal(UsageError, None, target_sparsity=2)
    assert text == "density must be > 0 and < 1, got -1"


def test_unknown_keys_are_named_with_what_was_meant(write):
    text = refusal(TwellError, write("max_tokens: 9\nlearnin-rate: 1\nxyz: 1\n3: 4\n"))
    assert "mine.yaml: " in text
    assert "unknown key max_tokens, did you mean max-tokens?" in text
    assert "unknown key learnin-rate, did you mean learning-rate?" in text
    assert "unknown key xyz;" in text
    assert text.endswith("unknown key 3")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("l1", "-2e-5", "must be >= 0, got '-2e-5'"),
        ("l1", ".nan", "must be finite"),
        ("l1", "1e308", "must be <= 1e+30"),
        ("lora-rank", "9223372036854775808", "must be >= 0 and <= 16384"),
        ("l1", "yes", "must be a number, got True"),
        ("l1", "fast", "must be a number, got 'fast'"),
        ("seed", "1" + "0" * 400, "must be finite"),
        ("seed", "4294967296", "must be >= 0 and <= 4294967295"),
        ("seq-len", "7", "must be >= 8"),
        ("seq-len", "64.5", "must be a whole number"),
        ("eval-fraction", "1", "must be >= 0 and < 1"),
        ("density", "0", "must be > 0 and < 1, got 0"),
        ("density", "15", "must be > 0 and < 1 (15 % is 0.15), got 15"),
        ("density", "150", "must be > 0 and < 1, got 150"),
        ("teacher-weight", "1.1", "must be >= 0 and <= 1"),
        ("max-steps", "0", "must be >= 1"),
        ("lora-ffn", "1", "must be true or false"),
        ("l1-schedule", "linear", "must be target or constant, got 'linear'"),
        ("report-to", "no", "must be text, got False"),
        ("data", "3", "must be one path or a list of paths"),
    ],
)
def test_values_out_of_range(write, key, value, why):
    assert f"mine.yaml: {key} {why}" in refusal(TwellError, write(f"{key}: {value}\n"))


def test_all_errors_at_once(write):
    path = write("l1: -1\nseq-len: x\nshuffle: true\n")
    text = refusal(TwellError, path, batch_size=0, density=2.0)
    for key in ("l1 must", "seq-len must", "unknown key shuffle", "batch-size", "density"):
        assert key in text
    text = refusal(UsageError, None, batch_size=0, density=2.0)
    wrong = "batch-size must be >= 1, got 0", "density must be > 0 and < 1 (2 % is 0.02), got 2.0"
    assert text == "; ".join(wrong)


def test_settings_that_exclude_each_other(write):
    assert "max-tokens exclude each other" in refusal(UsageError, max_steps=1, max_tokens=1)
    assert "needs a lora-rank" in refusal(UsageError, lora_ffn=True)
    assert "l1 must be > 0 to be raised" in refusal(UsageError, l1=0)
    assert resolve_recipe(None, {"l1": 0, "l1_schedule": "constant"}).l1 == 0
    assert "mine.yaml: lora-ffn needs" in refusal(TwellError, write("lora-ffn: true"))
    assert resolve_recipe(None, {"batch_size": 2, "micro_batch_size": 4}).batch_size == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "must hold 'key: value' lines, got None"),
        ("- l1\n", "must hold 'key: value' lines, got ['l1']"),
        ("l1: [\n", "is not valid YAML"),
        ("l1: 1\nseed: 2\nl1: 3\n", "line 3 gives l1 more than once: keep one"),
        ("data: [{a: 1, a: 2}]\n", "line 1 gives a more than once"),
        ("l1: 1\nseed: 010\n", "line 2: YAML takes '010' for another number: put it in quotes"),
        ("seed: -0_7\n", "line 1: YAML takes '-0_7' for another number"),
        ("data: 12:30\n", "line 1: YAML takes '12:30' for another number"),
        ("l1: 1:30.5\n", "line 1: YAML takes '1:30.5' for another number"),
        ("seed: !!int 010\n", "line 1: YAML takes '010' for another number"),
        ("l1: !!python/object:os.system x\n", "is not valid YAML"),
        ("l1: \xff\n".encode("latin-1"), "is not valid YAML"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, content, why):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = refusal(TwellError, path)
    assert str(path) in text
    assert why in text


def test_no_such_recipe(tmp_path):
    text = refusal(UsageError, "standart")
    assert "standart" in text
    assert all(name in text for name in recipe_names())
    assert "is not a regular file" in refusal(TwellError, tmp_path)


def test_the_saved_recipe_repeats_the_run(tmp_path):
    first = resolve_recipe("standard", {"data": ["a", "b"], "l1": 2e-5, "max_steps": 3})
    save_recipe(first, tmp_path / "recipe.yaml")
    assert resolve_recipe(tmp_path / "recipe.yaml") == first
    saved = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    fields = {flag_name(field.name) for field in dataclasses.fields(Recipe)}
    assert fields - set(saved) == {"compile", "eval-data", "learning-rate", "max-tokens", "seq-len"}


def test_what_goes_out_with_a_model_names_no_path(tmp_path):
    paths = {"data": [str(tmp_path)], "eval_data": ["b"], "teacher": str(tmp_path)}
    first = resolve_recipe("standard", paths | {"l1": 1e-4})
    public = public_recipe(first)
    assert public == resolve_recipe("standard", {"l1": 1e-4, "teacher": UNNAMED_TEACHER})
    assert public_recipe(public) == public
    save_recipe(public, tmp_path / "recipe.yaml")
    assert resolve_recipe(tmp_path / "recipe.yaml") == public
    of_the_hub = resolve_recipe("standard", {"teacher": "owner/model"})
    assert public_recipe(of_the_hub) == of_the_hub


def test_what_ships():
    assert {"paper", "quickstart", "standard"} <= set(recipe_names())
    readme = (resource_dir("recipes") / "README.md").read_text(encoding="utf-8")
    for name in recipe_names():
        assert resolve_recipe(name).data == []
        assert f"]({name}.yaml)" in readme
    paper = resolve_recipe("paper")
    assert (paper.l1, paper.l1_schedule, paper.teacher) == (2e-5, "constant", "none")


# ---- settings as flags: their help, and what is refused


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
        ({"modes": ("d",)}, "mode must be a, b or c, got 'd'"),
    ],
)
def test_the_first_wrong_value_is_named(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        refuse_wrong(One(**given))


def ran(*words: str) -> tuple[dict, str]:
    """The flags that a command gets, and what it printed; `words` are its command line."""
    app, got = typer.Typer(), {}

    @command(app, "run")
    def run(*, first: bool = False, flags: Annotated[dict, One]) -> None:
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
    assert ran()[0] == {}
    words = ("me", "--size", "8", "--size", "24", "--no-fast", "--mode", "b")
    flags, _ = ran(*words)
    assert flags == {"name": "me", "sizes": (8, 24), "fast": False, "modes": ("b",)}


def test_the_help_says_the_defaults():
    _, text = ran("--help")
    for part in ("Sizes. [default: 8, 16]", "Fast. [default: on]", "--no-fast", "a|b|c"):
        assert part in text
    places = [text.index(f"--{name}") for name in ("first", "seed", "size", "fast")]
    assert places == sorted(places)


def test_what_is_said_without_torch_is_true():
    assert MOST_ROWS == FEW_TOKENS
    assert DecodeSettings().check() is None
