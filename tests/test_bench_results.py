"""What a bench says: ratios over the fastest, the sentences, the JSON."""

import json
from dataclasses import replace

import pytest

from twellctl.bench import results


def point(tokens: int, skipped: dict | None = None, **ms: float):
    """A point whose candidates took so many milliseconds; names with "_" for the blank."""
    names = {
        name.replace("_wise", "-wise").replace("_", " ").replace("fp8", "FP8"): value
        for name, value in ms.items()
    }
    candidates = tuple(
        results.Candidate(
            name=name,
            kind=next(
                kind
                for kind in (results.DENSE_FP8, results.DENSE, results.TWELL)
                if name.startswith(kind)
            ),
            samples=(value / 1000, value / 1000, 1.0),
            errors={"error": 0.003, "worst_row_error": 0.004},
        )
        for name, value in names.items()
    )
    about = {"density": 0.01, "auto_took": {}, "without_kernels": None}
    outcome = results.Outcome("plain calls", candidates, skipped or {})
    return results.Point(tokens, about, "float64", outcome)


def bench(*points: results.Point, device: str = "NVIDIA H200") -> results.Bench:
    return results.Bench({"device": device}, {}, "this model", points)


def test_ratios_are_over_the_fastest_of_all_dense_candidates():
    found = point(100, dense_eager=3, dense_compile=2, twell=1)
    assert found.dense.name == "dense compile"
    assert found.over_dense(found.twell) == 2
    assert found.to_json()["over_fastest_dense"] == 2
    ratios = {n: c["over_fastest_dense"] for n, c in found.to_json()["candidates"].items()}
    assert ratios["dense eager"] == pytest.approx(2 / 3)
    assert ratios["dense compile"] == 1


def test_a_slower_sample_does_not_move_the_median():
    assert point(100, dense_eager=3, twell=1).twell.seconds == 0.001


def test_the_fastest_form_speaks_for_twell():
    found = point(8, dense_eager=4, twell=2, twell_compile=1)
    assert found.twell.name == "twell compile"


EAGER, COMPILED = "dense_eager", "dense_compile"
ROWS, TENSORS = "dense_fp8_row_wise", "dense_fp8_tensor_wise"


@pytest.mark.parametrize(
    ("large", "small", "said"),
    [
        ({EAGER: 2, COMPILED: 1.31}, {EAGER: 3, COMPILED: 0.99},
         "1.31x as fast as compiled bf16 at 131072 tokens, 0.99x at 256"),
        ({EAGER: 2, COMPILED: 1.31}, {EAGER: 0.99, COMPILED: 3},
         "1.31x as fast as the fastest dense bf16 at 131072 tokens, 0.99x at 256"),
        ({EAGER: 1.31}, {EAGER: 0.99},
         "1.31x as fast as eager bf16 at 131072 tokens, 0.99x at 256"),
        ({EAGER: 3, ROWS: 0.7, TENSORS: 0.8}, {EAGER: 1.31, ROWS: 0.4, TENSORS: 0.5},
         "3.00x as fast as eager bf16 and 0.70x as fast as dense FP8 (row-wise) at 131072 tokens, "
         "1.31x and 0.40x at 256"),
        ({EAGER: 3, ROWS: 0.8, TENSORS: 0.7}, {EAGER: 1.31, ROWS: 0.5, TENSORS: 0.4},
         "3.00x as fast as eager bf16 and 0.70x as fast as dense FP8 (tensor-wise) at 131072 "
         "tokens, 1.31x and 0.40x at 256"),
        ({EAGER: 3, ROWS: 0.7, TENSORS: 0.8}, {EAGER: 1.31, ROWS: 0.5, TENSORS: 0.4},
         "3.00x as fast as eager bf16 and 0.70x as fast as dense FP8 at 131072 tokens, 1.31x and "
         "0.40x at 256"),
        ({EAGER: 2, ROWS: 0.5}, {EAGER: 2},
         "2.00x as fast as eager bf16 and 0.50x as fast as dense FP8 (row-wise) at 131072 tokens, "
         "2.00x at 256"),
    ],
)  # fmt: skip
def test_the_sentence_names_what_is_compared(large, small, said):
    points = point(131072, **large, twell=1), point(256, **small, twell=1)
    for place in ("CPU", "GPU"):
        found = bench(*points, device="CPU" if place == "CPU" else "NVIDIA H200").sentences
        assert found == [f"on this {place} this model is {said}"]


def test_the_json_names_the_fastest_of_each_kind():
    told = point(
        8, dense_eager=3, dense_compile=1.5, **{ROWS: 0.8, TENSORS: 0.7}, twell=1
    ).to_json()
    assert (told["fastest_dense"], told["over_fastest_dense"]) == ("dense compile", 1.5)
    assert told["fastest_fp8"] == "dense FP8 tensor-wise"
    assert told["over_fastest_fp8"] == pytest.approx(0.7)
    told = point(8, dense_eager=2, twell=1).to_json()
    assert (told["fastest_fp8"], told["over_fastest_fp8"]) == (None, None)


def test_dense_fp8_is_never_the_fastest_dense_and_its_errors_are_its_own():
    found = point(64, dense_eager=2, dense_fp8=0.5, twell=1)
    eager, fp8, twell = found.candidates
    spoilt = replace(fp8, errors={"error": 0.9, "worst_row_error": 0.9})
    found = replace(found, outcome=results.Outcome("", (eager, spoilt, twell), {}))
    assert (found.dense, found.wrong) == (eager, [])


def test_twell_in_fp8_may_err_as_fp8_rounds():
    right = point(64, dense_eager=2, twell=1)
    eager, twell = right.candidates
    for error, wrong in ((0.2, 0), (0.31, 1), (float("nan"), 1)):
        errors = {"error": error, "worst_row_error": 0.3}
        outcome = results.Outcome("", (eager, replace(twell, errors=errors)), {})
        assert len(replace(right, outcome=outcome, explained=results.FP8_ROUNDING).wrong) == wrong
        assert len(replace(right, outcome=outcome).wrong) == 2
    (said,) = replace(right, outcome=outcome, explained=results.FP8_ROUNDING).wrong
    assert said.endswith("at 64 tokens, where rounding to FP8 explains 0.3")


@pytest.mark.parametrize("name", ["error", "worst_row_error"])
@pytest.mark.parametrize("value", [0.7, float("nan"), float("inf")])
def test_wrong_results_are_told_and_never_break_the_json(name, value):
    right = point(100, dense_eager=3, twell=1)
    assert bench(right).wrong == []
    eager, twell = right.candidates
    spoilt = results.Candidate(**vars(twell) | {"errors": twell.errors | {name: value}})
    found = results.Point(100, right.about, "float64", results.Outcome("", (eager, spoilt), {}))
    assert f"twell has a relative {name.replace('_', ' ')} of" in bench(found).wrong[0]
    json.dumps(bench(found).to_json(), allow_nan=False)
