"""The pipeline as functions: names of the package, whatever was imported before."""

import inspect
import subprocess
import sys

import pytest
from finetune_runs import SMALL, InterruptAt, small

import twellctl
from twellctl.errors import UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.training.recipe import Recipe, recipe_names, resolve_recipe

NAMES = ("convert", "write", "draft", "finetune", "profile", "export", "evaluate")
BEFORE = (
    "pass",
    "import twellctl.convert, twellctl.finetune; from twellctl.export import export",
    "from twellctl import *",
)
# what twellctl imports is there already, twellctl itself is not
AFRESH = """
import warnings

warnings.simplefilter("error", ImportWarning)
for name in [name for name in sys.modules if name.split(".")[0] == "twellctl"]:
    del sys.modules[name]
"""
FUNCTIONS = """
import inspect
from twellctl import convert, write, finetune, profile, export, evaluate
import twellctl, twellctl.convert as again
from twellctl.convert import convert as inner, Converted
assert convert is inner is again is twellctl.convert
for f in (convert, write, finetune, profile, export, evaluate):
    assert inspect.isfunction(f), f
    assert getattr(twellctl, f.__name__) is f
"""


@pytest.mark.parametrize("before", BEFORE)
def test_they_are_functions_in_every_order(started, before):
    process = started(code=f"{AFRESH}{before}\n{FUNCTIONS}os._exit(0)")
    assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_the_package_alone_is_cheap():
    code = (
        "import sys, twellctl; dir(twellctl); "
        "sys.exit(bool({'torch', 'transformers', 'typer', 'rich', 'yaml'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(NAMES) <= set(dir(twellctl))
    assert twellctl.__doc__.startswith("twellctl makes")


def test_every_setting_is_a_keyword(relu_llama, text_file, tmp_path):
    settings = SMALL | {"max_steps": 2, "density": 0.03}
    done = twellctl.finetune(relu_llama, tmp_path / "out", data=[text_file], **settings)
    assert done.target_density == pytest.approx(0.03)
    assert resolve_recipe(tmp_path / "out/recipe.yaml").density == 0.03
    assert inspect.signature(twellctl.finetune).parameters["recipe"].default is None
    found = twellctl.profile(tmp_path / "out", text_file, windows=1, seq_len=16)
    assert found.windows == 1
    page = found._repr_html_()
    assert all(f'<th scope="col">{name}</th>' in page for name in ("nnz mean", "dead", "slots"))
    assert f"<td>{found.density:.4g}</td>" in page
    assert "<h4>by position</h4>" in page


def test_keywords_win_over_a_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("max-tokens: 100\nseed: 3\n")
    for recipe in (file, str(file), resolve_recipe(file)):
        both = resolve_recipe(recipe, {"max_steps": 7})
        assert (both.max_steps, both.max_tokens, both.seed) == (7, None, 3)
    for name in recipe_names():
        assert resolve_recipe(resolve_recipe(name)) == resolve_recipe(name)


@pytest.mark.parametrize(
    ("recipe", "settings", "said"),
    [
        (None, {"densty": 0.9}, "unknown key densty, did you mean density"),
        ({"data": ["a"]}, {}, "single settings are keywords"),
        (Recipe(), {}, "no text to train on"),
    ],
)
def test_wrong_calls_are_refused(tmp_path, recipe, settings, said):
    with pytest.raises(UsageError, match=said):
        finetune("model", tmp_path / "out", recipe, **settings)


def test_a_run_is_resumed_without_its_recipe(relu_llama, text_file, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        finetune(relu_llama, out, small(text_file), progress=InterruptAt(2))
    assert finetune(relu_llama, out, resume=True).num_steps == 12
