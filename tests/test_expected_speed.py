"""The speed to expect: which random models are measured, what is made of the figures, and how
failures are told. Benches are stand-ins, or run tiny models on the CPU."""

import pytest
import torch
from shapes import TINY_CONFIG, write_config
from small_benches import BothForms, count_less

from twellctl.bench import expected_speed as module
from twellctl.bench.decode_results import DecodeBench, DecodeForm, DecodeModel, DecodePoint
from twellctl.bench.expected_speed import Speedup, expected_speed
from twellctl.bench.random_model import open_shape
from twellctl.bench.results import DENSE, TWELL, Bench, Candidate, Outcome, Point
from twellctl.bench.settings import DecodeSettings, ModelSettings
from twellctl.errors import TwellError

DECODED = [Speedup("1 row", 2.0), Speedup("16 rows", 1.25)]
PREFILLED = Speedup("a prefill of 2048 tokens", 1.5)
MILLISECONDS = {1: (4.0, 2.0), 16: (5.0, 4.0)}  # dense, over TwELL


class Benches:
    """Stand-ins for both, which know what they were told."""

    def __init__(self, **wrong):
        self.decoded: list[DecodeSettings] = []
        self.prefilled: list[ModelSettings] = []
        self.shortfall = wrong.get("shortfall", 0.0)
        self.without_twell = wrong.get("without_twell")
        self.error = wrong.get("error", 1e-3)
        self.without_kernels = wrong.get("without_kernels")

    def decode(self, settings: DecodeSettings) -> DecodeBench:
        settings.check()
        self.decoded.append(settings)

        def form(name: str, kind: str, ms: float, shortfall: float) -> DecodeForm:
            return DecodeForm(name, kind, (ms / 1000,) * 3, 0.05, 0.3, shortfall, 1, 1.0)

        points = [
            DecodePoint(
                batch,
                tuple(
                    [form("dense", DENSE, dense, 0.0)]
                    + [form("twell", TWELL, twell, self.shortfall)] * (not self.without_twell)
                ),
                {},
            )
            for batch, (dense, twell) in MILLISECONDS.items()
        ]
        model = DecodeModel("this model", {}, tuple(points), self.without_twell)
        return DecodeBench({"device": "a GPU"}, {}, 1.0, (model,))

    def prefill(self, settings: ModelSettings) -> Bench:
        settings.check()
        self.prefilled.append(settings)
        times = {"dense eager": (DENSE, 9e-3), "dense compile": (DENSE, 3e-3)}
        times |= {"twell eager": (TWELL, 4e-3), "twell compile": (TWELL, 2e-3)}
        candidates = tuple(
            Candidate(name, kind, (t,) * 3, {"error": 1e-3 if kind == DENSE else self.error})
            for name, (kind, t) in times.items()
        )
        names = ("twell eager", "twell compile")
        outcome = Outcome("graphs", candidates, {})
        about = {"without_kernels": self.without_kernels}
        point = Point(settings.tokens[0], about, "float32", names, outcome)
        return Bench("bench model", {"device": "a GPU"}, {}, (("this model", (point,)),))

    def measured(self, config: str = TINY_CONFIG, density: float = 0.05):
        return expected_speed(
            config, density, decode=self.decode, prefill=self.prefill, device="cpu"
        )


def test_ratios_are_those_of_the_benches():
    found = Benches().measured()
    assert list(found.speedups) == [*DECODED, PREFILLED]
    assert found.missing == ()


def test_a_random_model_of_the_shape_is_measured_at_the_target():
    benches, told = Benches(), []
    found = expected_speed(
        TINY_CONFIG, 0.03, told.append, decode=benches.decode, prefill=benches.prefill, device="cpu"
    )
    assert len(found.speedups) == 3
    (decoded,), (prefilled,) = benches.decoded, benches.prefilled
    assert (decoded.config, decoded.densities, decoded.batches) == (TINY_CONFIG, (0.03,), (1, 16))
    assert (decoded.layers, decoded.generate) == (2, False)
    assert (prefilled.config, prefilled.density, prefilled.layers) == (TINY_CONFIG, 0.03, 2)
    assert (prefilled.tokens, prefilled.seq_len) == ((2048,), 2048)
    assert not decoded.dense_fp8
    assert not prefilled.dense_fp8
    assert [text.startswith("measuring ") for text in told] == [True, True]


@pytest.mark.parametrize(("fit", "layers"), [(100, 3), (3.1, 3), (2.9, 2), (0.0, 1)])
def test_as_many_layers_decode_as_fit_in_a_third_of_the_memory(tmp_path, monkeypatch, fit, layers):
    config, benches = write_config(tmp_path), Benches()
    of_layer = 2 * open_shape(config, None, context=2048).layer_weights
    monkeypatch.setattr(module, "free_memory", lambda device: 3 * fit * of_layer)
    benches.measured(config)
    assert benches.decoded[0].layers == layers


def test_no_more_layers_decode_than_are_soon_made(tmp_path, monkeypatch):
    config, benches = write_config(tmp_path), Benches()
    of_layer = 2 * open_shape(config, None, context=2048).layer_weights
    monkeypatch.setattr(module, "LAYER_BYTES", 2 * of_layer)
    found = benches.measured(config)
    assert benches.decoded[0].layers == 2
    works = [speedup.work for speedup in found.speedups]
    assert works == ["1 row, 2 of 3 layers", "16 rows, 2 of 3 layers", PREFILLED.work]


@pytest.mark.parametrize(("context", "tokens", "seq_len"), [(512, 2048, 512), (300, 1800, 300)])
def test_a_short_context_is_read_several_times(tmp_path, context, tokens, seq_len):
    benches = Benches()
    found = benches.measured(write_config(tmp_path, max_position_embeddings=context))
    assert (benches.prefilled[0].tokens, benches.prefilled[0].seq_len) == ((tokens,), seq_len)
    assert found.speedups[-1].work == f"a prefill of {tokens} tokens"


@pytest.mark.parametrize(
    ("wrong", "left", "said"),
    [
        ({"without_twell": "heads of 80"}, [PREFILLED], "heads of 80"),
        ({"without_kernels": "no NVRTC"}, DECODED, "no NVRTC"),
        ({"shortfall": 3.0}, [PREFILLED], "twell chose a token"),
        ({"error": 0.5}, DECODED, "twell eager has a relative error of 0.5"),
    ],
)
def test_what_is_not_measured_or_wrong_is_no_speed(wrong, left, said):
    found = Benches(**wrong).measured()
    assert list(found.speedups) == left
    (missing,) = found.missing
    assert missing.startswith(said)


@pytest.mark.parametrize(
    "error", [TwellError("too little"), torch.OutOfMemoryError("too little\nmuch more")]
)
def test_a_bench_that_fails_leaves_the_other(error):
    class Failing(Benches):
        def decode(self, settings):
            raise error

    found = Failing().measured()
    assert list(found.speedups) == [PREFILLED]
    assert found.missing == ("too little",)


def test_a_family_that_cannot_be_drawn_is_told_once(tmp_path):
    benches = Benches()
    config = write_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nosuch", "hidden_act": "relu"}')
    found = benches.measured(config)
    assert found.speedups == ()
    assert len(found.missing) == 1
    assert "transformers makes no model of it" in found.missing[0]
    assert benches.decoded == benches.prefilled == []


def test_the_benches_themselves_take_what_they_are_told(relu_llama, monkeypatch):
    """Of a converted folder, whose config.json already says how it runs over TwELL."""
    monkeypatch.setattr("twellctl.bench.decode_runs.KernelDecoder", BothForms)
    count_less(monkeypatch)
    monkeypatch.setattr(module, "PREFILL_TOKENS", 256)
    monkeypatch.setattr(module, "PREFILL_LAYERS", 1)
    monkeypatch.setattr(module, "ROWS", (1, 2))
    found = expected_speed(str(relu_llama), 0.1, device="cpu")
    assert found.missing == ()
    works = [speedup.work for speedup in found.speedups]
    assert works == ["1 row", "2 rows", "a prefill of 256 tokens"]
    assert all(0.01 < speedup.over_dense < 100 for speedup in found.speedups)
