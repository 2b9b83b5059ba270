"""What a command says while it works: what lasts, one time to go, figures that are not stale."""

import io
import re
import threading
from types import SimpleNamespace

import pytest
from finetune_runs import small
from fits import QUICK
from rich.console import Console

from twellctl.convert import convert
from twellctl.finetune import finetune
from twellctl.models.bytes_read import share_read
from twellctl.models.checkpoint import open_checkpoint
from twellctl.screens import advice, ui
from twellctl.screens.run import RunScreen
from twellctl.screens.ui import Activity


@pytest.fixture
def console(monkeypatch):
    """`console(terminal)` takes the place of stderr; its file holds what was said."""

    def replace(terminal: bool) -> Console:
        how = {"force_terminal": terminal, "highlight": False, "width": 120, "color_system": None}
        made = Console(file=io.StringIO(), **how)
        monkeypatch.setattr(ui, "stderr", made)
        monkeypatch.setattr(ui, "activity", Activity(made))
        return made

    return replace


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (3780, "1 h 03 min"),
        (14494.5 * 60, "10 d 1 h"),
    ],
)
def test_durations_are_as_people_say_them(seconds, said):
    assert ui.duration(seconds) == said


def test_what_lasts_is_said_and_what_does_not_is_not(console, monkeypatch):
    said = threading.Event()
    made = console(terminal=False)
    show = Activity._show
    monkeypatch.setattr(Activity, "_show", lambda self, text: (show(self, text), said.set()))
    monkeypatch.setattr(ui, "PATIENCE", 600)
    ui.doing("what is soon over")
    monkeypatch.setattr(ui, "PATIENCE", 0)
    ui.doing("what lasts")
    assert said.wait(10)
    ui.activity.over()
    assert made.file.getvalue() == "what lasts ...\n"


def test_tables_lose_no_figure(monkeypatch):
    columns = ["model", "cross-entropy", "steady tokens/s", "ratio"]
    rows = [["a long name " * 8 + "x" * 90, "49.1234 ± 0.0012", "123456789.0123", "1.23x"]]
    for terminal, width in ((False, 80), (True, 80), (True, 40)):
        made = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
        monkeypatch.setattr(ui, "stdout", made)
        ui.table("title", columns, rows)
        said = made.file.getvalue()
        for figure in (*rows[0][1:], "cross-entropy", "ratio"):
            assert figure in said, (terminal, width)
        assert said.count("x") == 91  # the name's are all there, and the ratio's
        assert (rows[0][0] in said) is not terminal


def test_quiet_leaves_errors_only(console):
    made = console(terminal=False)
    ui.be_quiet()
    ui.note("a note")
    ui.fail("an error")
    assert made.file.getvalue() == "error: an error\n"


def test_the_lines_of_a_run(console, relu_llama, text_file, tmp_path):
    made = console(terminal=False)
    recipe = small(text_file, max_steps=7, eval_steps=5, logging_steps=3)
    done = finetune(relu_llama, tmp_path / "out", recipe, progress=RunScreen())
    lines = [line for line in made.file.getvalue().splitlines() if line.startswith("step ")]
    steps = [int(re.match(r"step (\d+)/7  ", line)[1]) for line in lines]
    held_out = [line for line in lines if "held-out" in line]
    assert steps == [0, 1, 3, 5, 6, 7, 7]
    assert [int(re.match(r"step (\d+)", line)[1]) for line in held_out] == [0, 5, 7]
    assert held_out[-1].endswith(f"held-out {done.cross_entropy:.4f} at {done.density:.2%}")
    for line in set(lines) - set(held_out):
        assert line.count("left") == 1
        assert "eta" not in line
    mean = sum(done.density_by_layer) / len(done.density_by_layer)
    assert mean == pytest.approx(done.density)


def test_a_terminal_shows_each_step_and_keeps_what_was_held_out(
    console, relu_llama, text_file, tmp_path, monkeypatch
):
    made, shown = console(terminal=True), []
    monkeypatch.setattr(ui, "doing", shown.append)
    recipe = small(text_file, max_steps=6, eval_steps=5)
    done = finetune(relu_llama, tmp_path / "out", recipe, progress=RunScreen())
    steps = [text for text in shown if text.startswith("step ")]
    assert [text.split()[1] for text in steps] == [f"{n}/6" for n in range(1, 7)]
    assert all("loss " in text and text.count(" left") == 1 for text in steps)
    kept = [line for line in made.file.getvalue().splitlines() if line.startswith("step ")]
    assert kept[-1].endswith(f"held-out {done.cross_entropy:.4f} at {done.density:.2%}")


# ---- advice


@pytest.mark.parametrize(
    ("density", "sentence"),
    [
        (0.01, "1.00% of the neurons fire: few enough for prompts and for decoding."),
        (0.04, "a gain token by token"),
        (0.1, "a gain only where few sequences are decoded at once"),
        (0.3, "30.00% of the neurons fire: a step of one token reads 65% of the bytes that it"),
    ],
)
def test_of_a_profile(relu_llama, density, sentence):
    found = SimpleNamespace(density=density, intermediate_size=2048)
    assert sentence in advice.of_profile(found, open_checkpoint(relu_llama))


def test_of_a_profile_in_4_bits(silu_llama, text_file, tmp_path):
    """There a lower density gains little, and fine-tuning is refused."""
    convert(silu_llama, tmp_path / "fit", data=[str(text_file)], bits=4, group_size=16, **QUICK)
    checkpoint = open_checkpoint(tmp_path / "fit")
    for density in (0.02, 0.18, 0.3):
        said = advice.of_profile(SimpleNamespace(density=density, intermediate_size=96), checkpoint)
        read = f"reads {share_read(checkpoint, density):.0%} of the bytes that it would if all did"
        assert said.startswith(
            f"{density:.2%} of the neurons fire: a step of one token {read}, but"
        )
        assert said.endswith("in 4 bits takes about as long. So a higher --density costs little.")


@pytest.mark.parametrize(("density", "prompts"), [(0.01, "few enough"), (0.03, "many")])
def test_small_layers_promise_no_decoding(relu_llama, density, prompts):
    found = SimpleNamespace(density=density, intermediate_size=2047)
    said = advice.of_profile(found, open_checkpoint(relu_llama))
    assert f"of the neurons fire: {prompts} for long prompts. " in said
    assert "Layers of 2047 neurons are small, and may decode no faster: bench decode says." in said


def test_of_a_run():
    ended = {"target_density": 0.05, "density": 0.05}
    assert advice.of_run(ended) == []
    near = [advice.of_run(ended | {"density": 0.05 * by}) for by in (0.89, 0.91, 1.09, 1.11)]
    assert [len(said) for said in near] == [1, 0, 0, 1]
    assert advice.of_run(ended | {"target_density": None}) == []
    (more,) = advice.of_run(ended | {"density": 0.06})
    assert "was not met" in more
    losses = {"cross_entropy": 2.2, "teacher_cross_entropy": 2.0, "teacher_kl": 0.21}
    first, *_ = advice.of_run(ended | losses | {"density": 0.06})
    assert first.startswith("far from its teacher, +0.200 nats a token of held-out text, KL 0.210")
    assert advice.of_run(ended | losses | {"cross_entropy": 2.05, "teacher_kl": 0.06}) == []
    (less,) = advice.of_run(ended | {"density": 0.04})
    assert less.startswith("sparser than the 5.00% asked for")
