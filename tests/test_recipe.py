"""Recipes: flag over file over default, every mistake named at once, what ships is sound."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from twellctl.errors import TwellError, UsageError
from twellctl.here.resources import resource_dir
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


def test_a_flag_replaces_the_recipes_other_length(write):
    path = write("max-tokens: 5000\n")
    assert resolve_recipe(path, {"max_steps": 7}) == Recipe(max_steps=7)
    assert resolve_recipe(path, {"max_tokens": 7}) == Recipe(max_tokens=7)


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "'2e-5'", "0.00002"])
def test_numbers_that_yaml_takes_for_text(write, text):
    recipe = resolve_recipe(write(f"l1: {text}\nsave-steps: 1e3\nmax-tokens: 9007199254740993\n"))
    assert (recipe.l1, recipe.save_steps, recipe.max_tokens) == (2e-5, 1000, 2**53 + 1)
    assert type(recipe.save_steps) is int


def test_kinds(write):
    text = "data: a.txt\neval-data: [b.txt, c]\nlora-ffn: yes\nlora-rank: 2\nmax-steps: null\n"
    recipe = resolve_recipe(write(text), {"data": [Path("d"), "e"]})
    assert (recipe.data, recipe.eval_data) == (["d", "e"], ["b.txt", "c"])
    assert (recipe.lora_ffn, recipe.max_steps) == (True, None)
    assert resolve_recipe(write("data: a.txt")).data == ["a.txt"]


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
        ("l1", "[1]", "must be a number, got [1]"),
        ("l1", "yes", "must be a number, got True"),
        ("l1", "fast", "must be a number, got 'fast'"),
        ("seed", "1" + "0" * 400, "must be finite"),
        ("seed", "4294967296", "must be >= 0 and <= 4294967295"),
        ("seq-len", "7", "must be >= 8"),
        ("seq-len", "64.5", "must be a whole number"),
        ("eval-fraction", "1", "must be >= 0 and < 1"),
        ("density", "0", "must be > 0 and < 1"),
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
    assert text == "batch-size must be >= 1, got 0; density must be > 0 and < 1, got 2.0"


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
        ("l1: 1\n\tl1: 2\n", "is not valid YAML"),
        ("l1: 1\nseed: 2\nl1: 3\n", "gives l1 more than once"),
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
    assert "is no regular file" in refusal(TwellError, tmp_path)


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
