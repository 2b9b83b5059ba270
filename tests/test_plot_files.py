"""Files of plots: what is refused before any work. No matplotlib is needed here."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from edits import contents

from twellctl.cli.command import result_writer
from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.kept import kept_of
from twellctl.plot import read_points
from twellctl.report.plot_file import check_plot

POINT = {
    "label": "a",
    "bytes_percent": 15,
    "kept_percent": 81.3,
    "stderr_percent": 3.0,
    "original": "owner/model",
}
EVALUATION = {
    "eval_schema_version": 1,
    "model": "made/relu",
    "reference": "owner/model",
    "tasks": [
        {"right": [], "reference_right": None},
        {"right": [1.0, 0.0, 1.0, 0.0], "reference_right": [1.0, 1.0, 0.0, 1.0]},
    ],
    "bytes_read": 25,
    "reference_bytes_read": 100,
}


@pytest.fixture
def no_matplotlib(monkeypatch):
    real = importlib.util.find_spec
    absent = lambda name, *more: None if name == "matplotlib" else real(name, *more)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)


@pytest.fixture
def with_matplotlib(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: name)


COMMANDS = (
    "profile {model} --data {text}",
    "eval {model} --tasks {text}",
    "compare {model} {model}",
    "convert {model} {out} --data {text}",
    "finetune {model} {out} --data {text}",
    "bench decode {model} --data {text}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_plot_before_it_begins(
    command, refusal, relu_llama, text_file, tmp_path, no_matplotlib
):
    words = command.format(model=relu_llama, text=text_file, out=tmp_path / "out").split()
    said = refusal(*words, "--plot", tmp_path / "plot.gif", code=2)
    assert said == (
        f"error: a plot is an svg, png or pdf, by its ending: name {tmp_path}/plot.gif so"
    )
    said = refusal(*words, "--plot", tmp_path / "plot.svg")
    assert said == (
        "error: matplotlib, which draws plots, is not installed: pip install matplotlib"
    )
    assert not contents(tmp_path)


@pytest.mark.usefixtures("with_matplotlib")
def test_only_a_plot_is_replaced(tmp_path):
    for name, content in {
        "a.svg": "<?xml version='1.0'?><svg/>",  # of someone else
        "b.png": "twellctl",
        "c.pdf": "",
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(TwellError, match="exists and is no plot of twellctl"):
            check_plot(tmp_path / name)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(TwellError, match="is a folder"):
        check_plot(tmp_path / "folder.svg")
    with pytest.raises(TwellError, match="is not a folder you may write to"):
        check_plot(tmp_path / "nowhere" / "a.svg")
    (tmp_path / "a.svg").write_text("<?xml version='1.0'?><svg>twellctl</svg>")
    check_plot(tmp_path / "a.svg")


@pytest.mark.usefixtures("with_matplotlib")
def test_a_link_to_itself_is_refused(refusal, relu_llama, text_file, tmp_path):
    (tmp_path / "made.svg").symlink_to("made.svg")
    said = refusal("profile", relu_llama, "--data", text_file, "--plot", tmp_path / "made.svg")
    assert "leads to itself" in said


@pytest.mark.usefixtures("with_matplotlib")
@pytest.mark.parametrize("shown", [True, False])
def test_the_json_is_written_though_nothing_is_drawn(shown, tmp_path):
    def screen(found) -> None:
        if not shown:
            raise BrokenPipeError

    def to_chart() -> None:
        raise TwellError("nothing to draw")

    found = SimpleNamespace(to_json=lambda: {}, to_chart=to_chart)
    write_result = result_writer(tmp_path / "made.json", "ours", "bench", tmp_path / "made.svg")
    with pytest.raises(TwellError, match="nothing to draw"):
        write_result(found, screen)
    assert (tmp_path / "made.json").read_text() == "{}\n"
    assert not (tmp_path / "made.svg").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval m --data a --plot a.svg", "give --tasks"),
        ("convert m out --plot a.svg", "give --data, and no --dry-run"),
        ("convert m out --data a --dry-run --plot a.svg", "give --data, and no --dry-run"),
        ("finetune m out --data a --dry-run --plot a.svg", "without --dry-run"),
    ],
)
def test_what_leaves_nothing_to_plot_is_refused(words, said, refusal, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(*words.split(), code=2)


# ---- points ----


def test_what_is_kept_and_its_error():
    alone = kept_of([([1.0] * 30 + [0.0] * 10, [1.0] * 40)])  # a share of 40 questions
    assert alone == pytest.approx((0.75, (0.75 * 0.25 / 39) ** 0.5))
    assert kept_of([([1.0, 0.0], [1.0, 0.0])]) == (1.0, 0.0)
    one, other = ([1.0, 0.0, 1.0], [1.0, 1.0, 0.0]), ([0.0], [1.0])
    both = kept_of([([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])])
    assert kept_of([one, other]) == both
    assert both.share == pytest.approx(2 / 3)
    assert kept_of([([1.0], [0.0])]) is None
    assert kept_of([]) is None


def test_an_evaluation_is_a_point(tmp_path):
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(EVALUATION))
    (point,), (named,) = read_points(str(file)), read_points(f"15%={file}")
    assert (point.label, named.label, point.original) == ("relu", "15%", "model")
    assert (point.bytes_read, point.kept) == pytest.approx((0.25, 2 / 3))
    assert point.stderr == pytest.approx(
        kept_of([(EVALUATION["tasks"][1]["right"], [1, 1, 0, 1])])[1]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": []}, "has no task that a reference solves in its own words"),
        ({"bytes_read": None}, "does not say how many bytes both models read"),
        ({"tasks": [{"right": [1.0], "reference_right": [1.0, 0.0]}]}, "not a complete evaluation"),
        ({"tasks": 7}, "not a complete evaluation"),
        ({"reference": None}, "not a complete evaluation"),
        ({"bytes_read": "a"}, "not a complete evaluation"),
    ],
)
def test_an_evaluation_that_is_no_point_is_refused(tmp_path, changes, said):
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(EVALUATION | changes))
    with pytest.raises(TwellError, match=said):
        read_points(str(file))


def test_points_have_labels_of_their_own(tmp_path):
    file = tmp_path / "points.json"
    file.write_text(json.dumps({"points": [POINT]}))
    assert [point.label for point in read_points(str(file))] == ["a"]
    with pytest.raises(UsageError, match="have their labels: leave out 15%="):
        read_points(f"15%={file}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"nnz_mean": 1}, "holds neither an evaluation nor points"),
        ({"points": []}, "holds neither an evaluation nor points"),
        ({"points": [7]}, "point 0 must be an object, got 7"),
        ({"points": [POINT, POINT | {"label": 7}]}, "point 1: label must be a text, got 7"),
        ({"points": [POINT | {"kept_percent": True}]}, "kept_percent must be a number, 0 or more"),
        (
            {"points": [POINT | {"stderr_percent": -1}]},
            "stderr_percent must be a number, 0 or more",
        ),
        ({"points": [POINT | {"bytes_percent": 0}]}, "bytes_percent must be above 0"),
        ({"points": [POINT | {"series": None}]}, "series must be a text, got None"),
    ],
)
def test_a_file_without_points_is_refused(tmp_path, content, said):
    file = tmp_path / "points.json"
    file.write_text(json.dumps(content))
    with pytest.raises(TwellError, match=said):
        read_points(str(file))
