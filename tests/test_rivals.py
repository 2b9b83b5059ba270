"""The report's table of what a user would pick instead: each figure is that of its file."""

import json
from pathlib import Path

import pytest
from small_benches import decode_form
from test_report import evaluation, in_json

from twellctl.bench.decode_results import DecodeBench, DecodeModel, DecodePoint
from twellctl.bench.exact_results import ExactBench, ExactForm, ExactPoint
from twellctl.cli.rivals import UNKNOWN, rivals_of
from twellctl.cli.run_report import PAGE, write_report
from twellctl.decoding.drafted import Drafted
from twellctl.heads.folder import FACTS as HEAD_FILE
from twellctl.models.checkpoint import FIT_FILE
from twellctl.report.page import Table

H200 = {"device": "NVIDIA H200"}
NAMES = [f"original, {bits} bits" for bits in (16, 8, 4)] + ["relu, fast"]
DRAFTED = "original, exact, drafts by relu"


def decoded(weights: str = "bf16", fingerprint: str = "abc", times: float = 1.0) -> dict:
    """bench decode of a model in these weights: 100, 125 and 200 steps a second, `times` more."""
    seconds = {"dense": 0.01, "dense FP8": 0.008, "twell": 0.005}
    sizes = {"dense": 4_000_000_000, "dense FP8": 2_000_000_000, "twell": 4_100_000_000}
    forms = [decode_form(name, seconds[name] / times, weight_bytes=sizes[name]) for name in seconds]
    point = DecodePoint(1, tuple(forms), {})
    four = DecodePoint(4, (decode_form("dense", 1.0), decode_form("twell", 1.0)), {})
    described = {"weights": weights, "fingerprint": fingerprint}
    model = DecodeModel("this model", described, (four, point), None)
    return json.loads(json.dumps(DecodeBench(H200, {}, 1e12, (model,)).to_json()))


def answered(
    differing: int = 0, draft: str = "made/relu", is_head: bool = False, times: float = 1.0
) -> dict:
    """bench exact: 80, 160 and 120 tokens a second, `times` more; a head has no form by itself."""
    forms = [
        ExactForm("original, stable", (70.0 * times,), 0, Drafted(9), 4_000_000_000),
        ExactForm("original", (80.0 * times,), 2, Drafted(9), 4_000_000_000),
        ExactForm("fit alone", (160.0 * times,), 9, Drafted(9), 4_100_000_000),
        ExactForm("exact", (120.0 * times,), differing, Drafted(9), 8_100_000_000),
    ]
    if is_head:
        del forms[2]
    models = {"draft": draft, "original": "owner/original"}
    found = ExactBench(H200, {}, models, is_head, (ExactPoint(1, 12, tuple(forms)),))
    return json.loads(json.dumps(found.to_json()))


def fit_of(folder: Path, name: str, seconds: float, keeps: bool = False, kept: int = 0) -> None:
    (folder / name).mkdir(exist_ok=True)
    content = {"settings": {"keep_activation": keeps}, "seconds": seconds, "kept": kept}
    (folder / name / FIT_FILE).write_text(json.dumps(content))


def head_of(folder: Path, name: str, seconds: float) -> None:
    (folder / name).mkdir()
    (folder / name / HEAD_FILE).write_text(json.dumps({"seconds": seconds, "tokens": 1_899_520}))


def cells(table: Table, column: str) -> list[str]:
    """A column, from the top."""
    return [row[list(table.columns).index(column)] for row in table.rows]


def test_all_that_was_measured_is_in_its_row(tmp_path):
    fit_of(tmp_path, "relu", 200.0)
    fit_of(tmp_path, "silu4", 99.0, keeps=True)
    four = in_json(evaluation("made/silu4", 105))
    found = {"eval.json": in_json(evaluation()), "eval-4.json": four}
    table = rivals_of(tmp_path, found, [decoded(), decoded("int4", times=3.0), answered()])
    assert cells(table, "model") == [*NAMES, DRAFTED]
    assert cells(table, "tokens/s, steps") == [
        *("100 (1.00x)", "125 (1.25x)", "300 (3.00x)", "200 (2.00x)", UNKNOWN),
    ]
    assert cells(table, "tokens/s, answers") == [
        *("80.0 (1.00x)", UNKNOWN, UNKNOWN, "160 (2.00x)", "120 (1.50x)"),
    ]
    assert cells(table, "same answers") == [
        *("yes", UNKNOWN, "no: 9 of 64", "no: 9 of 64", "yes: 12 of 12"),
    ]
    kept = cells(table, "tasks kept")
    assert (kept[0], kept[1], kept[4]) == ("100%", UNKNOWN, "100%")
    assert kept[2].startswith("95.5% ±")
    assert kept[3].startswith("81.8% ±")
    assert cells(table, "set-up") == ["none", UNKNOWN, "1 min 39 s", "3 min 20 s", "3 min 20 s"]
    weights = ["4 GB", "2 GB", "4 GB", "4.1 GB", "8.1 GB"]
    assert cells(table, "weights") == weights
    assert table.note.startswith("One sequence on NVIDIA H200. ")


def test_what_was_not_measured_says_so(tmp_path):
    table = rivals_of(tmp_path, {"eval.json": in_json(evaluation())}, [])
    assert cells(table, "model") == [*NAMES, "original, exact"]
    assert cells(table, "tokens/s") == [UNKNOWN] * 5
    assert cells(table, "weights") == [UNKNOWN] * 5
    assert cells(table, "set-up") == ["none", *[UNKNOWN] * 4]
    assert rivals_of(tmp_path, {}, []) is None
    random = decoded()
    del random["models"][0]["model"]["fingerprint"]  # weights that nobody has
    assert cells(rivals_of(tmp_path, {}, [random]), "tokens/s") == [UNKNOWN] * 5


def test_answers_that_differ_are_not_the_same(tmp_path):
    table = rivals_of(tmp_path, {}, [answered(differing=2)])
    assert table.rows[4][0] == DRAFTED
    assert cells(table, "same answers")[4] == "no: 10 of 12"
    assert cells(table, "tasks kept")[4] == UNKNOWN


def test_a_draft_may_be_the_original_in_4_bits(tmp_path):
    fit_of(tmp_path, "silu4", 99.0, keeps=True)
    fit_of(tmp_path, "relu", 200.0)
    table = rivals_of(tmp_path, {}, [answered(), answered(draft="made/silu4")])
    assert cells(table, "model")[4:] == [
        DRAFTED,
        "original, exact, drafts by silu4 (original in 4 bits)",
    ]
    alone = ["160 (2.00x)"] * 2  # of both drafts, each in its row
    assert cells(table, "tokens/s, answers")[2:] == [*alone, *["120 (1.50x)"] * 2]
    assert cells(table, "set-up")[2:] == ["1 min 39 s", "3 min 20 s", "3 min 20 s", "1 min 39 s"]


def test_answers_are_compared_with_the_original_of_their_own_bench(tmp_path):
    """Here that was twice as fast, and all else with it, when the second draft was timed."""
    fit_of(tmp_path, "relu4", 300.0)
    benches = [answered(), answered(draft="made/relu4", times=2.0)]
    table = rivals_of(tmp_path, {}, benches)
    rates = ["80.0 (1.00x)", UNKNOWN, UNKNOWN, "160 (2.00x)", "120 (1.50x)", "240 (1.50x)"]
    assert cells(table, "tokens/s, answers") == rates


def test_a_draft_head_has_a_row_of_its_own(tmp_path):
    """And none by itself; the fit that is this model keeps its own."""
    fit_of(tmp_path, "relu", 200.0)
    benches = [answered(draft="made/head", is_head=True), answered()]
    table = rivals_of(tmp_path, {}, benches)
    assert cells(table, "model")[4:] == ["original, exact, drafts by head (draft head)", DRAFTED]
    rates = ["80.0 (1.00x)", UNKNOWN, UNKNOWN, "160 (2.00x)", *["120 (1.50x)"] * 2]
    assert cells(table, "tokens/s, answers") == rates
    assert cells(table, "weights")[3:] == ["4.1 GB", "8.1 GB", "8.1 GB"]
    assert cells(table, "same answers")[4] == "yes: 12 of 12"
    assert cells(table, "set-up")[3:] == ["3 min 20 s", UNKNOWN, "3 min 20 s"]
    head_of(tmp_path, "head", 61.0)
    table = rivals_of(tmp_path, {}, benches)
    assert cells(table, "set-up")[3:] == ["3 min 20 s", "1 min 01 s", "3 min 20 s"]
    alone = rivals_of(tmp_path, {}, benches[:1])
    assert cells(alone, "tokens/s, answers")[3] == UNKNOWN


def test_the_page_says_that_a_head_drafted(tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps(evaluation().to_json()))
    (tmp_path / "exact.json").write_text(json.dumps(answered(draft="made/head", is_head=True)))
    head_of(tmp_path, "head", 61.0)
    write_report(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "with drafts by draft head made/head</p>" in page
    assert "1 min 01 s for 1899520 tokens" in page


def test_a_head_and_the_original_in_4_bits_each_have_a_row(tmp_path):
    """As `.ci/measure.sh` times them."""
    fit_of(tmp_path, "four", 240.0, keeps=True)
    head_of(tmp_path, "head", 61.0)
    benches = [answered(draft="out/head", is_head=True), answered(draft="out/four")]
    table = rivals_of(tmp_path, {"eval.json": in_json(evaluation())}, benches)
    assert cells(table, "model")[4:] == [
        "original, exact, drafts by head (draft head)",
        "original, exact, drafts by four (original in 4 bits)",
    ]
    assert cells(table, "set-up")[2:] == ["4 min 00 s", UNKNOWN, "1 min 01 s", "4 min 00 s"]
    rates = ["160 (2.00x)", UNKNOWN, "120 (1.50x)", "120 (1.50x)"]  # that of 4 bits by themselves
    assert cells(table, "tokens/s, answers")[2:] == rates


def test_figures_of_another_fit_are_not_this_models(tmp_path):
    """But those of an export are."""
    fit_of(tmp_path, "relu", 200.0)
    fit_of(tmp_path, "exported", 200.0)
    fit_of(tmp_path, "relu4", 300.0)
    drafts, found = answered(draft="made/relu4"), {"eval.json": in_json(evaluation())}
    table = rivals_of(tmp_path, found, [drafts, decoded(fingerprint="other")])
    fast = {column: cells(table, column)[3] for column in table.columns}
    assert fast["tokens/s, steps"] == fast["tokens/s, answers"] == UNKNOWN
    assert fast["set-up"] == "3 min 20 s"
    assert cells(table, "tokens/s, steps")[0] == "100 (1.00x)"
    assert cells(table, "set-up")[4] == "5 min 00 s"
    table = rivals_of(tmp_path, found, [drafts, answered(draft="made/exported")])
    assert cells(table, "tokens/s, answers")[3] == "160 (2.00x)"
    table = rivals_of(tmp_path, {}, [drafts, answered()])  # the first draft is this model
    assert cells(table, "set-up")[3] == "5 min 00 s"


def test_a_fit_that_was_interrupted_took_longer(tmp_path):
    fit_of(tmp_path, "relu", 60.0, kept=3)
    table = rivals_of(tmp_path, {}, [answered()])
    assert cells(table, "set-up")[3:] == ["more than 1 min 00 s"] * 2


def test_the_page_has_the_table_and_what_was_measured(tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps(evaluation().to_json()))
    (tmp_path / "exact.json").write_text(json.dumps(answered()))
    write_report(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "What you would pick instead" in page
    assert "the same answers are 1.50x as fast" in page
    assert "with drafts by made/relu</p>" in page


@pytest.mark.parametrize("broken", ["points", "models", "device", "sentences", "is_head"])
def test_a_bench_that_lacks_a_figure_is_named_and_left_out(tmp_path, success, broken):
    """The others stay."""
    (tmp_path / "eval.json").write_text(json.dumps(evaluation().to_json()))
    (tmp_path / "exact.json").write_text(json.dumps(answered()))
    old = answered(draft="made/other")
    del old[broken]
    (tmp_path / "old.json").write_text(json.dumps(old))
    _, err = success("report", tmp_path)
    said = f"not in {PAGE}: {tmp_path}/old.json lacks a figure (KeyError('{broken}')), it is broken"
    assert any(line.startswith(said) for line in err)
    page = (tmp_path / PAGE).read_text()
    assert "with drafts by made/relu</p>" in page
    assert "other" not in page


def test_a_bench_of_an_earlier_version_is_left_out(tmp_path, success):
    """That called the draft `fit`."""
    (tmp_path / "eval.json").write_text(json.dumps(evaluation().to_json()))
    old = answered()
    old["models"] = {"fit": "made/relu", "original": "owner/original"}
    (tmp_path / "exact.json").write_text(json.dumps(old))
    _, err = success("report", tmp_path)
    assert "exact.json lacks a figure (KeyError('draft')), it is broken or of another" in err[-1]
    assert err[-1].endswith("version: repeat 'bench exact --json'")


def test_a_decode_bench_that_lacks_a_figure_is_left_out(tmp_path, success):
    (tmp_path / "eval.json").write_text(json.dumps(evaluation().to_json()))
    old = decoded()
    del old["bandwidth_gb_s"]
    (tmp_path / "decode.json").write_text(json.dumps(old))
    _, err = success("report", tmp_path)
    assert any("decode.json lacks a figure (KeyError('bandwidth_gb_s'))" in line for line in err)
    assert "tokens/s, steps" not in (tmp_path / PAGE).read_text()


def test_a_head_that_does_not_say_how_long_it_took(tmp_path):
    """As heads of earlier versions."""
    (tmp_path / "eval.json").write_text(json.dumps(evaluation().to_json()))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / HEAD_FILE).write_text(json.dumps({"tokens": 5}))
    bench = answered(draft="made/head", is_head=True)
    table = rivals_of(tmp_path, {}, [bench])
    assert cells(table, "set-up")[4] == UNKNOWN
    (tmp_path / "exact.json").write_text(json.dumps(bench))
    write_report(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "(draft head)" in page
    assert ">draft head<" not in page


def test_a_run_that_only_rounded_has_one_row_for_its_model(tmp_path):
    fit_of(tmp_path, "relu", 200.0, keeps=True)
    found = in_json(evaluation(model="made/relu"))
    table = rivals_of(tmp_path, {"eval.json": found}, [answered()])
    names = [row[0] for row in table.rows]
    assert [name for name in names if "fast" in name] == []
    assert len(names) == 4  # 16, 8 and 4 bits, exact
    row = next(row for row in table.rows if "4 bits" in row[0])
    kept = cells(table, "tasks kept")[names.index(row[0])]
    assert kept not in (UNKNOWN, "")
    assert cells(table, "set-up")[names.index(row[0])] == "3 min 20 s"
