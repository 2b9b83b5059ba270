"""bench train on the CPU: what its forms compute, memory by a fake allocator, what it says."""

import json

import pytest
import torch
from shapes import TINY_CONFIG, write_config

from twellctl.bench import train_forms as forms
from twellctl.bench import train_step as step_module
from twellctl.bench.contest import relative_error
from twellctl.bench.peak_memory import MIB, passes_memory, step_memory
from twellctl.bench.random_model import make_model, open_shape
from twellctl.bench.results import DENSE, TWELL, Candidate, Outcome, Point
from twellctl.bench.settings import TrainFfnSettings, TrainStepSettings
from twellctl.bench.synthetic import EVEN, make_rows, make_weights
from twellctl.bench.train_ffn import bench_train_ffn
from twellctl.bench.train_results import TrainBench, train_sentence
from twellctl.bench.train_step import bench_train_step
from twellctl.errors import TwellError, UsageError

TINY = ("--device", "cpu", "--hidden-size", "256", "--intermediate-size", "512", "--rounds", "1")
MODEL = {
    "batch": 2, "seq_len": 128, "config": TINY_CONFIG, "density": 0.02, "rounds": 1,
    "device": "cpu",
}  # fmt: skip
CPU = torch.device("cpu")
GRADIENTS = ["y_error", "grad_x_error", "grad_gate_error", "grad_up_error", "grad_down_error"]


@pytest.fixture(autouse=True)
def _count_less(monkeypatch):
    monkeypatch.setattr(step_module, "COUNTED_TOKENS", 1024)
    monkeypatch.setattr("twellctl.bench.random_model.SET_TOKENS", 1024)
    monkeypatch.setattr("twellctl.bench.timing.SAMPLE_SECONDS", 0.001)


# ---- what the forms compute ----


@pytest.fixture(scope="module")
def problem():
    made = {"dtype": torch.float32, "generator": torch.Generator().manual_seed(0)}
    weights = make_weights(128, 256, 0.1, bias=False, **made)
    x = make_rows(70, 128, 0.1, EVEN, **made)
    return x, weights, torch.randn(x.shape, generator=made["generator"])


def all_forms() -> list[forms.TrainedForm]:
    return [*forms.dense_forms(CPU), forms.twell_form(CPU, 0.1)]


@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["the penalty alone", "both"])
def test_all_forms_give_the_gradients_of_the_reference(problem, factor):
    x, weights, grad_y = problem
    wanted = forms.passes_reference(x, weights, factor * grad_y, 0.5)
    assert (wanted["grad_gate"].any(), wanted["grad_down"].any()) == (True, factor > 0)
    for form in all_forms():
        passed = form.forward(x, form.leaves(weights), torch.full((1,), 0.5))
        found = passed.backward(factor * grad_y)
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            assert relative_error(tensor, wanted[name]) < 1e-5, (form.name, name)


def test_the_reference_hangs_on_no_chunk(problem, monkeypatch):
    x, weights, grad_y = problem
    whole = forms.passes_reference(x, weights, grad_y, 0.5)
    monkeypatch.setattr(forms, "REFERENCE_ROWS", 32)
    for name, tensor in forms.passes_reference(x, weights, grad_y, 0.5).items():
        torch.testing.assert_close(tensor, whole[name])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    file = write_config(tmp_path_factory.mktemp("llama"), num_hidden_layers=2, vocab_size=100)
    shape = open_shape(file, None, context=64)
    model = make_model(shape, 0.1, dtype=torch.float32, generator=generator)
    return model.requires_grad_(True).train()


def test_sides_share_all_weights_but_those_of_down(llama):
    penalty = torch.zeros(1)
    dense = forms.trained_dense(llama, penalty)
    twell = forms.trained_over_twell(llama, penalty, (0.1, 0.1))
    own = {name: parameter for name, parameter in llama.named_parameters()}
    assert {n: id(p) for n, p in dense.named_parameters()} == {n: id(p) for n, p in own.items()}
    for name, parameter in twell.named_parameters():
        assert (parameter is own[name]) == ("down_proj" not in name)
        assert torch.equal(parameter, own[name])
    assert not any(isinstance(module, forms.TrainedFfn) for module in llama.modules())


def test_a_step_leaves_the_weights_and_the_other_side_alone(llama):
    before = {name: parameter.clone() for name, parameter in llama.named_parameters()}
    penalty = torch.full((1,), 1e-3)
    models = [
        forms.trained_dense(llama, penalty),
        forms.trained_over_twell(llama, penalty, (0.1, 0.1)),
    ]
    optimizer = step_module._optimizer(models, CPU)
    sides = [step_module.Trained(model, "eager", autocast=False) for model in models]
    step = step_module.Step(sides[0], optimizer, torch.randint(100, (2, 32)))
    assert all(gradient.any() for gradient in step().values())
    for name, parameter in llama.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert optimizer.state[parameter]["exp_avg"].any()
    of_twell = models[1].model.layers[0].mlp.down_proj.weight
    assert of_twell not in optimizer.state
    # a parameter, two moments, a count of steps
    assert len(list(sides[0].own(optimizer))) == 4 * len(before)
    assert len(list(sides[1].own(optimizer))) == 4 * len(before) - 3 * 2


# ---- memory ----


class FakeAllocator:
    """Counts bytes as torch.cuda does."""

    def __init__(self, there: int):
        self.there = self.most = there * MIB

    def take(self, size: int) -> None:
        self.there += size * MIB
        self.most = max(self.most, self.there)

    def memory_allocated(self) -> int:
        return self.there

    def max_memory_allocated(self) -> int:
        return self.most

    def reset_peak_memory_stats(self) -> None:
        self.most = self.there


def test_memory_of_both_passes_is_what_comes_on_top():
    allocator = FakeAllocator(100)
    allocator.take(900)
    allocator.take(-900)  # a peak before does not count

    def forward() -> str:
        allocator.take(50)
        allocator.take(-20)
        return "between"

    def backward(between: str) -> None:
        assert between == "between"
        allocator.take(40)
        allocator.take(-60)

    assert passes_memory(forward, backward, 8 * MIB, allocator) == {"kept_mib": 22, "peak_mib": 70}


def test_memory_of_a_step_has_its_own_tensors_once():
    allocator = FakeAllocator(1000)

    def step() -> None:
        allocator.take(30)
        allocator.take(-30)

    own = torch.zeros(MIB, dtype=torch.int16)
    assert step_memory(step, [own, own.view(2, -1), own.clone()], allocator) == {"peak_mib": 34}


# ---- what is said ----


def point(density: float = 0.006, **peaks: float) -> Point:
    names = {"dense eager": 3.0, "dense compile": 1.26, "twell eager": 2.0, "twell compile": 1.0}
    candidates = tuple(
        Candidate(
            name,
            DENSE if name.startswith("dense") else TWELL,
            (seconds,),
            {"grad_gate_error": 0.004},
            also={"peak_mib": peaks[name.split()[0]]} if peaks else {},
        )
        for name, seconds in names.items()
    )
    about = {"density": density}
    return Point(8, about, "float32", ("twell eager", "twell compile"), Outcome("", candidates, {}))


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ({"dense": 1000, "twell": 710}, "1.26x faster over TwELL and takes 29 % less memory at"),
        ({"dense": 1000, "twell": 1020}, "1.26x faster over TwELL and takes 2 % more memory at"),
        ({}, "1.26x faster over TwELL at"),
    ],
)
def test_the_sentence(peaks, said):
    found = train_sentence("a training step of this model", point(**peaks))
    assert found == f"on this GPU a training step of this model is {said} 0.6 % density"


@pytest.mark.parametrize(("density", "said"), [(1, "100"), (0.00503, "0.5"), (0.0212, "2.1")])
def test_density_in_percent(density, said):
    assert train_sentence("this", point(density)).endswith(f" at {said} % density")


def test_a_loss_is_no_speed_up():
    slow = point()
    candidates = tuple(c for c in slow.candidates if c.name != "twell compile")
    slow = Point(8, slow.about, "float32", ("twell eager",), Outcome("", candidates, {}))
    assert train_sentence("this", slow, "CPU").startswith("on this CPU this is 0.63x as fast over")


def test_each_gradient_is_judged():
    wrong = point()
    twell = wrong.candidates[-1]
    spoilt = Candidate(**vars(twell) | {"errors": {"grad_gate_error": 0.5}})
    outcome = Outcome("", (*wrong.candidates[:-1], spoilt), {})
    found = Point(8, wrong.about, "float32", ("twell eager",), outcome)
    bench = TrainBench("bench train", {"device": "CPU"}, {}, (("this", (found,)),))
    assert bench.wrong == [
        "twell compile has a relative grad gate error of 0.5 at 8 tokens, where dense eager has "
        "0.004"
    ]


# ---- the command ----


def test_one_ffn_as_json(cli):
    words = ("--tokens=300", "--tokens=40", "--density=0.02", "--density=1", "--json=-")
    code, out, err = cli("bench", "train", *TINY, *words)
    assert code == 0, err
    found = json.loads(out)
    assert (found["command"], found["device"]) == ("bench train", "CPU")
    sizes = [(point["tokens"], point["density_asked"]) for point in found["points"]]
    assert sizes == [(300, 0.02), (300, 1), (40, 0.02), (40, 1)]
    for point in found["points"]:
        assert list(point["candidates"]) == ["dense eager", "dense eager, fused", "twell plain"]
        assert point["density"] == pytest.approx(point["density_asked"], rel=0.25)
        assert point["slots"] == 64
        assert point["union"]["fired"] > 0.95 * point["union"]["expected"]
        assert point["gradients_mib"] == pytest.approx(2 * 256 * (point["tokens"] + 3 * 512) / MIB)
        for candidate in point["candidates"].values():
            assert all(0 < candidate[name] < 0.01 for name in GRADIENTS)
            assert candidate["forward_ms"] > 0
            assert "peak_mib" not in candidate
    assert len(found["sentences"]) == 4
    assert any("40 tokens, density 1: twell plain" in line for line in err)


def test_the_screen_of_one_ffn(cli):
    words = ("--tokens", "300", "--density", "0.02", "--spread", "heavy")
    code, out, _ = cli("bench", "train", *TINY, *words)
    assert code == 0
    assert "dense eager, fused" in out
    assert "relative errors against float64" in out
    assert "union of fired neurons over 128 consecutive tokens" in out
    assert out.splitlines()[-1].startswith(
        "on this CPU training this FFN of 256 x 512 (300 tokens, 5.0% of the rows at 50%) is "
    )


def test_steps_of_a_model():
    found = bench_train_step(TrainStepSettings(**MODEL))
    assert found.wrong == []
    saved = found.to_json()
    json.dumps(saved, allow_nan=False)
    assert saved["model"]["layers"] == 2
    assert [point["checkpointing"] for point in saved["points"]] == [False, True]
    for point in saved["points"]:
        assert list(point["candidates"]) == ["dense eager", "twell plain eager"]
        assert (point["batch"], point["seq_len"], point["tokens"]) == (2, 128, 256)
        assert point["density_first_layer"] == pytest.approx(0.02, rel=0.1)
        assert all(0 < c["grad_up_error"] < 0.1 for c in point["candidates"].values())
    first, second = saved["sentences"]
    assert first.startswith("on this CPU a training step of this model (random, 2 layers) is ")
    assert "(random, 2 layers, activations checkpointed) is " in second


def test_steps_with_float32_weights(cli):
    words = ("--config", TINY_CONFIG, "--batch", 2, "--seq-len", 128, "--rounds", 1)
    words += ("--density", 0.02, "--checkpointing", "off", "--param-dtype", "float32")
    code, out, err = cli("bench", "train", "--model", *words, "--device", "cpu")
    assert code == 0, err
    assert "relative errors against float32" in out
    assert ", checkpointing off; wall clock" in " ".join(out.split())
    assert out.splitlines()[-1].endswith(" density")


def test_the_gradients_of_float32_steps_are_those_of_the_reference():
    one = MODEL | {"param_dtype": "float32", "checkpointing": ("on",)}
    (point,) = bench_train_step(TrainStepSettings(**one)).points
    for candidate in point.candidates:
        assert max(candidate.errors.values()) < 1e-5, candidate.name


def test_a_wrong_gradient_ends_in_an_error(cli, monkeypatch):
    def without_penalty(x, w_gate, w_up, w_down, penalty, **numbers):
        return forms.split_train(x, w_gate, w_up, w_down, 0 * penalty)

    monkeypatch.setattr(forms, "twell_train", without_penalty)
    code, out, err = cli("bench", "train", *TINY, "--tokens", "100", "--density", "0.02")
    assert code == 1
    assert "on this CPU training this FFN" in out
    assert "twell plain has a relative grad x error of 0." in err[-1]
    wrong = bench_train_step(TrainStepSettings(**MODEL)).wrong
    assert any("grad up error" in words for words in wrong)


def test_tokens_that_are_alike_are_refused(monkeypatch):
    monkeypatch.setattr(
        torch, "randint", lambda high, size, **k: torch.zeros(size, dtype=torch.int64)
    )
    with pytest.raises(TwellError, match="another --seed or --density, or a real model"):
        bench_train_step(TrainStepSettings(**MODEL))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hidden-size", "100"], "hidden-size must be a multiple of 64, got 100"),
        (["--tokens", "0"], "tokens must be >= 1, got 0"),
        (["--density", "1.5"], "density must be > 0 and <= 1, got 1.5"),
        (["--spread", "odd"], "spread must be even, lognormal or heavy, got 'odd'"),
        (["--rounds", "0"], "rounds must be >= 1, got 0"),
        (["--layers", "2"], "--layers does not go with this: give --model, too"),
        (["--param-dtype", "float32"], "--param-dtype does not go with this: give --model"),
        (["--model", "--tokens", "9"], "--tokens does not go with this: leave out --model"),
        (["--model", "--spread", "even"], "--spread does not go with this: leave out --model"),
        (["--model", "--density", "0.1", "--density", "0.2"], "density is given once with --model"),
        (["--model", "--density", "0"], "density must be > 0"),
        (["--model", "--batch", "0"], "batch must be >= 1, got 0"),
        (["--model", "--seq-len", "1"], "seq-len must be >= 2, got 1"),
        (["--model", "--layers", "0"], "layers must be >= 1"),
        (["--model", "--hidden-size", "64"], "--hidden-size does not go with this: leave out"),
        (
            ["--model", "--config", TINY_CONFIG, "--seq-len", "4096"],
            "seq-len must be 2 to 2048, the context of",
        ),
        (["--model", "--checkpointing", "yes"], "checkpointing must be off or on, got 'yes'"),
        (["--model", "--param-dtype", "int8"], "param-dtype must be float32 or bfloat16"),
        (["--model", "--rounds", "0"], "rounds must be >= 1, got 0"),
        (["--device", "tpu"], "device must be cuda, cuda:1 and so on, or cpu, got 'tpu'"),
    ],
)
def test_bad_options_are_refused_in_one_line(cli, words, sentence):
    code, out, err = cli("bench", "train", *words)
    assert (code, out, len(err)) == (2, "", 1)
    assert sentence in err[0]


@pytest.mark.parametrize("words", [(), ("--model",)])
def test_without_a_gpu_only_the_cpu_is_tried(cli, monkeypatch, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = cli("bench", "train", *words)
    assert (code, out, len(err)) == (1, "", 1)
    assert "torch finds none here (see twellctl doctor); --device cpu runs tiny" in err[0]


def test_settings_are_checked_from_python_too():
    with pytest.raises(UsageError, match="rounds must be >= 1"):
        bench_train_ffn(TrainFfnSettings(rounds=0))
