"""Plots: each is made by its command, has its labels, and holds the numbers of its JSON.

The numbers are read back from the figure that matplotlib draws, not from pixels.
"""

import importlib
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from browser import seen_on
from edits import jsonl
from shapes import TINY_CONFIG
from small_benches import decode_form

from twellctl import compare
from twellctl.bench.decode_results import DecodeBench, DecodeModel, DecodePoint
from twellctl.evaluation.kept import chart_of
from twellctl.models.carried import METRICS_FILE
from twellctl.models.checkpoint import FIT_FILE
from twellctl.plot import plot, read_points
from twellctl.report.charts import Curves, Line, Panel, Point
from twellctl.report.plot_file import write_plot

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws plots")

from twellctl.report import plot_style as style  # noqa: E402
from twellctl.report import plots  # noqa: E402

ROOT = Path(__file__).parents[1]
POINTS, PICTURE = "recipes/kept_against_bytes.json", "twellctl/fitting/kept_against_bytes.svg"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn."""
    made, draw = [], plots.draw
    monkeypatch.setattr(plots, "draw", lambda chart: made.append(draw(chart)) or made[-1])
    return made


def texts_of(svg: Path) -> list[str]:
    """What an SVG says, as text."""
    root = ElementTree.parse(svg).getroot()
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def panels_of(figure) -> dict[str, object]:
    """The axes of a figure, by their titles."""
    return {axes.get_title("left"): axes for axes in figure.axes}


def lines_of(axes) -> list[list[float]]:
    """The values of each line with a label in the legend, or of the only one."""
    return [list(line.get_ydata()) for line in axes.lines]


# ---- of each command ----


def test_a_profile(success, relu_llama, text_file, tmp_path, drawn):
    files = tmp_path / "profile.json", tmp_path / "profile.svg"
    kinds = f"--data=_code={text_file}", f"--data=$x$={text_file}"
    words = "--windows=4", "--seq-len=32", f"--json={files[0]}", f"--plot={files[1]}"
    success("profile", relu_llama, *kinds, *words)
    found, (figure,) = json.loads(files[0].read_text()), drawn
    layers, panels = found["layers"], panels_of(figure)
    fires, dead, positions = panels.values()
    kinds = [kind["layers"] for kind in found["by_kind"]]
    assert lines_of(fires) == [[layer["density"] for layer in layers], *kinds]
    (band,) = fires.collections
    ends = {end for layer in layers for end in (layer["nnz_p10"], layer["nnz_p90"])}
    assert {round(96 * y) for y in band.get_paths()[0].vertices[:, 1]} == ends
    assert lines_of(dead) == [[layer["dead"] / 96 for layer in layers]]
    assert lines_of(positions) == [[part["density"] for part in found["by_position"]]]
    texts = texts_of(files[1])
    assert {*panels, "_code", "$x$", "mean, and 80% of the tokens", "layer"} <= {*texts}
    assert f"model: {found['density']:.2%} of 96 neurons fire" in texts
    assert texts.count("8") == 1  # the positions from 8 on


def test_a_fit(success, silu_llama, text_file, tmp_path, drawn):
    words = "--data", text_file, "--tokens=2048", "--seq-len=32", "--steps=0", "--density=0.3"
    success("convert", silu_llama, tmp_path / "out", *words, "--plot", tmp_path / "fit.svg")
    found = json.loads((tmp_path / "out" / FIT_FILE).read_text())
    (figure,) = drawn
    errors, far, fires, by_map = panels_of(figure).values()

    def by_layer(name: str) -> list[float]:
        return [layer[name] for layer in found["layers"]]

    assert lines_of(errors) == [by_layer("error"), by_layer("error_swapped")]
    assert lines_of(far) == [by_layer("states_differ")]
    assert lines_of(fires) == [by_layer("fires"), [0.3, 0.3]]
    assert lines_of(by_map) == [by_layer("map_share")]
    texts = texts_of(tmp_path / "fit.svg")
    assert {"only the activation changed", "asked for", "Neurons that fire"} <= {*texts}
    assert "out: fitted layer by layer" in texts
    assert any(f"{found['held_out']['kl']:.4f}" in text for text in texts)


def test_a_rounded_model_has_no_panel_of_what_fires(
    success, make_model, text_file, tmp_path, drawn
):
    words = "--data", text_file, "--tokens=2048", "--seq-len=32", "--bits=4", "--keep-activation"
    model, out = make_model("llama", hidden_size=64, intermediate_size=128), tmp_path / "out"
    success("convert", model, out, *words, "--plot", tmp_path / "fit.png")
    found = json.loads((out / FIT_FILE).read_text())
    errors, far = panels_of(drawn[0]).values()
    assert lines_of(errors) == [[layer["error"] for layer in found["layers"]]]
    assert lines_of(far) == [[layer["states_differ"] for layer in found["layers"]]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Of ten questions any answer is right, of three none."""
    row = {"prompt": "Why?", "match": "regex"}
    rows = [row | {"answer": answer} for answer in ["(?s)."] * 10 + ["(?!)"] * 3]
    return jsonl(tmp_path_factory.mktemp("tasks") / "tasks.jsonl", rows)


def test_evaluations(success, cli, relu_llama, silu_llama, text_file, tasks, tmp_path, drawn):
    words = "--reference", silu_llama, "--tasks", tasks, "--max-tokens=4"
    text = "--data", text_file, "--windows=2", "--seq-len=32"
    json_file, picture = tmp_path / "eval.json", tmp_path / "eval.svg"
    success("eval", relu_llama, *words, *text, "--json", json_file, "--plot", picture)
    found = json.loads(json_file.read_text())
    share = found["bytes_read"] / found["reference_bytes_read"]
    (axes,) = drawn[0].axes
    ((x, y),) = axes.containers[0].lines[0].get_xydata()
    assert (x, y) == (pytest.approx(share), 1.0)
    assert {"Tasks kept, and bytes read for a token", "model", "the original"} <= {
        *texts_of(picture)
    }
    code, out, err = cli("eval", relu_llama, *words, "--plot", tmp_path / "none.svg")
    assert (code, "tasks" in out) == (1, True)  # what was measured is shown
    assert "does not say how many bytes both models read for a token" in err[-1]
    out, _ = success("plot", f"15 %={json_file}", ROOT / POINTS, tmp_path / "all.pdf")
    count = len(json.loads((ROOT / POINTS).read_text())["points"])
    assert out == f"{tmp_path}/all.pdf: {count + 1} points\n"
    assert (tmp_path / "all.pdf").read_bytes().startswith(b"%PDF")


def test_a_comparison(success, relu_llama, silu_llama, tmp_path, drawn):
    picture = tmp_path / "same.svg"
    words = "--limit=4", "--max-tokens=8", "--plot", picture
    success("compare", silu_llama, relu_llama, *words)
    found = compare(silu_llama, relu_llama, limit=4, max_tokens=8)
    line = drawn[0].axes[0].lines[0]
    assert len(line.get_xdata()) > 1
    for tokens, same in line.get_xydata():
        left = [pair.agrees or pair.tokens > tokens for pair in found.pairs]
        assert same == pytest.approx(sum(left) / len(left))
    assert {"tokens of the answer", "4 answers"} <= {*texts_of(picture)}


def test_a_bench(tmp_path):
    """With a form that was left out at one batch size."""
    dense = decode_form("dense bf16", 0.001), decode_form("dense FP8", 0.00075)
    points = (
        DecodePoint(1, (*dense, decode_form("twell", 0.0007)), {}),
        DecodePoint(16, (dense[0], decode_form("twell", 0.00125)), {"dense FP8": "why"}),
    )
    models = tuple(DecodeModel(what, {}, points, None) for what in ("2 %", "20 %"))
    bench = DecodeBench({"device": "NVIDIA H200", "versions": {}}, {}, 4e12, models)
    figure, found = plots.draw(bench.to_chart()), bench.to_json()
    assert list(panels_of(figure)) == ["2 %", "20 %"]
    for axes, model in zip(figure.axes, found["models"], strict=True):
        drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
        floors = {hline.get_segments()[0][0][1] for hline in axes.collections}
        for name, heights in drawn.items():
            for point, height in zip(model["points"], heights, strict=True):
                form = point["forms"].get(name)
                assert form is None or form["steps_per_second"] == pytest.approx(height)
                assert form is None or form["floor_steps_per_second"] in floors
        numbers = [text.get_text() for text in axes.texts]
        assert numbers == ["1000", "1000", "1333", "1429", "800"]
    write_plot(bench.to_chart(), tmp_path / "bench.svg")
    assert {*"1", "16", "steps/s", "dense FP8", "limit: its bytes at the speed of a copy"} <= {
        *texts_of(tmp_path / "bench.svg")
    }


def test_the_command_of_a_bench(success, tmp_path, drawn, count_less):
    small = "--prompt-tokens=16", "--new-tokens=15", "--batch=1", "--density=0.1"
    words = "--config", TINY_CONFIG, "--device=cpu", *small
    files = tmp_path / "bench.json", tmp_path / "bench.svg"
    success("bench", "decode", *words, "--json", files[0], "--plot", files[1])
    form = json.loads(files[0].read_text())["models"][0]["points"][0]["forms"]["dense"]
    (bar,) = drawn[0].axes[0].containers[0]
    assert bar.get_height() == pytest.approx(form["steps_per_second"])


def test_a_run(success, uninterrupted, relu_llama, text_file, tmp_path, drawn, monkeypatch):
    module = importlib.import_module("twellctl.finetune")
    monkeypatch.setattr(module, "finetune", lambda *words, **settings: uninterrupted)
    picture = tmp_path / "run.svg"
    success("finetune", relu_llama, tmp_path / "out", "--data", text_file, "--plot", picture)
    rows = [json.loads(row) for row in (uninterrupted.out / METRICS_FILE).read_text().splitlines()]
    panels = panels_of(drawn[0])
    keys = {
        "Cross-entropy, nats a token": ["loss", "held_out"],
        "KL to the teacher, nats a token": ["teacher_kl", "held_out_kl"],
        "Neurons that fire": ["density", "held_out_density"],
        "Price of a neuron that fires": ["price"],
    }
    assert {*panels} <= {*keys}
    assert len(panels) >= 3
    for title, axes in panels.items():
        drawn = [key for key in keys[title] if any(row.get(key) is not None for row in rows)]
        assert len(axes.lines) >= len(drawn) >= 1  # a target is a line, too
        for key, line in zip(drawn, axes.lines, strict=False):
            known = [[row["step"], row[key]] for row in rows if row.get(key) is not None]
            assert len(known) > 1
            assert line.get_xydata().tolist() == [pytest.approx(pair) for pair in known]
    assert {"step", "this text", "held out"} <= {*texts_of(picture)}


# ---- how all look ----


def contrast(one: str, other: str) -> float:
    """By WCAG: 1 to 21."""
    lights = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("shown", [lambda colour: colour, style.DARK.get], ids=["light", "dark"])
def test_text_and_marks_stand_out(shown):
    ground = shown(style.GROUND)
    assert min(contrast(shown(text), ground) for text in (style.INK, style.FAINT)) >= 4.5
    assert min(contrast(shown(mark), ground) for mark in style.SERIES) >= 3


def some_chart(count: int = 7) -> Curves:
    lines = [
        Line(f"line {number}", [number, number + 1], [0, 1], [9, 9]) for number in range(count)
    ]
    return Curves("Some", [Panel("Of it", "x", [0, 1], lines, wanted=3)], "a note")


def test_an_svg_has_a_dark_colour_for_each_light_one(tmp_path):
    for number, chart in enumerate((some_chart(), chart_of(read_points(str(ROOT / POINTS))))):
        picture = tmp_path / f"{number}.svg"
        write_plot(chart, picture)
        content = picture.read_text()
        used = set(re.findall(r"(?:fill|stroke): (#\w+)[;\"]", content))
        assert {style.GROUND, style.INK, style.FAINT, style.GRID} <= used <= {*style.DARK}
        assert content.count("@media (prefers-color-scheme: dark)") == 1
        ElementTree.fromstring(content)


def test_the_browser_of_someone_who_likes_it_dark(chromium, tmp_path):
    picture = tmp_path / "some.svg"
    write_plot(some_chart(), picture)
    for scheme, colours in (("light", {}), ("dark", style.DARK)):
        with seen_on(chromium, 800, 600, scheme):
            chromium.get(picture.as_uri())
            ground, text = chromium.execute_script(
                "return ['path', 'text'].map(n => getComputedStyle(document.querySelector(n)).fill)"
            )
        for colour, found in ((style.GROUND, ground), (style.FAINT, text)):
            parts = colours.get(colour, colour)
            assert found == f"rgb({', '.join(str(int(parts[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_lines_of_one_panel_differ():
    axes = plots.draw(some_chart(12)).axes[0]
    looks = {
        (line.get_color(), str(line.get_linestyle()), str(line._dash_pattern))
        for line in axes.lines
    }
    assert len(looks) == 13  # with what was asked for


def test_the_users_own_style_changes_nothing():
    first = style.content_of(plots.draw(some_chart()), "svg")
    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "font.size": 30}):
        assert style.content_of(plots.draw(some_chart()), "svg") == first
    assert matplotlib.rcParams["svg.fonttype"] == "path"  # as it was before


@pytest.mark.parametrize(
    "name", ["$\\frac$", "_x", "a\nb\x1b[1m", "x" * 500, "\N{SNOWMAN}", "<b>&"]
)
def test_names_of_others_are_text(name, tmp_path):
    panel = Panel(name, name, [name, "b"], [Line(name, [1, 2]), Line("b", [2, None])])
    picture = tmp_path / "some.svg"
    write_plot(Curves(name, [panel], name), picture)
    shown = name if len(name) < 60 else "x" * 30
    shown = shown.encode("unicode_escape").decode() if not name.isprintable() else shown
    assert sum(shown in text for text in texts_of(picture)) == 6


def test_an_older_plot_is_replaced_and_files_are_the_same_again(tmp_path):
    for kind in ("svg", "png", "pdf"):
        picture = tmp_path / f"some.{kind}"
        write_plot(some_chart(2), picture)
        write_plot(some_chart(), picture)
        first = picture.read_bytes()
        write_plot(some_chart(), picture)
        assert picture.read_bytes() == first


# ---- points ----


def test_the_picture_of_the_guide_is_that_of_its_points(tmp_path):
    """By what it says: where it says it may differ with matplotlib."""
    plot([ROOT / POINTS], tmp_path / "again.svg")
    assert texts_of(ROOT / PICTURE) == texts_of(tmp_path / "again.svg")


def test_points_are_where_their_file_says():
    rows = json.loads((ROOT / POINTS).read_text())["points"]
    figure = plots.draw(chart_of(read_points(str(ROOT / POINTS))))
    found = []
    originals = list(panels_of(figure))
    for original, axes in panels_of(figure).items():
        for mark in axes.containers:
            ((x, y),) = mark.lines[0].get_xydata()
            (bar,) = mark.lines[2][0].get_segments()
            found.append((original, mark.get_label(), x, y, bar[1][1] - y))
    parts = ("bytes_percent", "kept_percent", "stderr_percent")
    wanted = [
        (row["original"], row["label"], *(pytest.approx(row[part] / 100) for part in parts))
        for row in sorted(rows, key=lambda row: originals.index(row["original"]))
    ]
    assert found == wanted


def box_of(label):
    """Of its text, without the line that leads there."""
    label.get_window_extent()
    return matplotlib.text.Text.get_window_extent(label)


@pytest.mark.parametrize("shift", [None, 0.001, 0.004, 0.02])
def test_names_lie_over_no_other(shift):
    """Of the guide's points, or of as many that are so close to each other."""
    if shift is None:
        points = read_points(str(ROOT / POINTS))
    else:
        near = [(n, 0.15 + shift * n, 0.9 - shift * n / 2) for n in range(7)]
        points = [Point(f"number {n}", x, y, 0.03, "m") for n, x, y in near]
    figure = plots.draw(chart_of(points))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [box_of(text) for text in axes.texts]
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
        assert all(axes.bbox.count_contains(box.corners()) == 4 for box in boxes)
