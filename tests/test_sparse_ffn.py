"""The operator where no kernel runs: plain torch's result, in any mode, and what it says of it."""

import importlib.util
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ffns import ffn_of
from torch import Tensor

from twellctl.bundle import twell_ffn, twell_nvrtc, twell_reasons, twell_ways
from twellctl.bundle.twell_cache import reasons_said, say_once
from twellctl.bundle.twell_config import ROUTES
from twellctl.bundle.twell_dense import gated_ffn
from twellctl.bundle.twell_few import few_kernels, plan_few, takes_few
from twellctl.bundle.twell_format import keep_fired
from twellctl.bundle.twell_launch import KernelError, LoadError, kernels_for
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_ways import run_by_plan
from twellctl.convert import convert
from twellctl.export import export

H200 = Limits(132, 232448, (9, 0))
SOURCES = twell_ffn.register_sources({"pack.cu": b"no kernel"})


def problem(dtype=torch.bfloat16, biases: bool = False) -> tuple[Tensor | None, ...]:
    torch.manual_seed(0)
    x, w_down = torch.randn(2, 5, 64), torch.randn(64, 96) / 10
    w_gate, w_up = torch.randn(96, 64) / 8, torch.randn(96, 64) / 8
    rest = [torch.randn(n) if biases else None for n in (96, 96, 64)]
    return tuple(t if t is None else t.to(dtype) for t in (x, w_gate, w_up, w_down, *rest))


def equation(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None) -> Tensor:
    gate = keep_fired(F.linear(x, w_gate, b_gate))
    return F.linear(gate * F.linear(x, w_up, b_up), w_down, b_down)


def sparse(x: Tensor, *weights: Tensor | None, operator=twell_ffn.sparse_ffn, **how) -> Tensor:
    return operator(x, ffn_of(*weights), sources=SOURCES, **how)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_on_the_cpu_it_is_the_plain_form(dtype, biases, route, caplog):
    tensors = problem(dtype, biases)
    wanted = equation(*tensors)
    found = sparse(*tensors, slots=3, route=route)
    assert torch.equal(found, wanted)
    assert not caplog.records


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dense_form_has_the_bits_of_the_plain_one(dtype, biases):
    x, *weights = problem(dtype, biases)
    x[0, 0] = torch.nan
    x[0, 1] = torch.inf
    rows = x.reshape(-1, 64)
    found = gated_ffn(rows, ffn_of(*weights))
    wanted = equation(rows, *weights)
    assert torch.equal(found.isnan(), wanted.isnan())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_gradients_are_those_of_the_plain_form():
    tensors = [t.requires_grad_() for t in problem(torch.float32, biases=True)]
    found = sparse(*tensors)
    wanted = equation(*tensors)
    grads = (torch.autograd.grad(y.square().sum(), tensors) for y in (found, wanted))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_autocast_computes_in_its_dtype():
    tensors = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = equation(*tensors), sparse(*tensors)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 64), (2, 0, 64), (2, 3, 4, 64)])
def test_any_leading_shape(shape):
    _, *weights = problem()
    x = torch.randn(shape).bfloat16()
    assert sparse(x, *weights).shape == shape


def test_the_operator_holds_to_torch_rules():
    tensors = problem(torch.float32, biases=True)
    numbers = (256, 64, -1.0, SOURCES, "auto")
    x, w_gate, w_up, w_down, *biases = tensors
    for laid in (w_down, w_down.t().contiguous().t()):
        given = twell_ffn._as_lists(ffn_of(w_gate, w_up, laid, *biases))
        torch.library.opcheck(twell_ffn._gated_ffn_op, (x, *given, *numbers))
    meta = [t.to("meta") for t in tensors]
    given = twell_ffn._as_lists(ffn_of(*meta[1:]))
    assert twell_ffn._gated_ffn_op(meta[0], *given, *numbers).shape == (2, 5, 64)


def test_no_graph_break_in_a_compiled_model(make_model, tmp_path):
    from twellctl.bundle.twell_model import twell_class

    convert(make_model("llama", hidden_size=64), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    model = twell_class("LlamaForCausalLM").from_pretrained(tmp_path / "out")
    ids = (torch.arange(34).view(2, 17) * 37) % 512
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend=keep)
        found = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    (graph,) = graphs
    assert sum("twell.gated_ffn" in str(node.target) for node in graph.nodes) == 2


def test_a_model_spread_over_devices_runs_over_twell(make_model, tmp_path, monkeypatch):
    from accelerate import cpu_offload, dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    from twellctl.bundle import twell_model

    convert(make_model("llama", hidden_size=64), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    model = twell_model.twell_class("LlamaForCausalLM").from_pretrained(tmp_path / "out")
    ids, calls = (torch.arange(34).view(2, 17) * 37) % 512, []

    def counted(*args, **kwargs):
        calls.append(args)
        return twell_ffn.sparse_ffn(*args, **kwargs)

    monkeypatch.setattr(twell_model, "sparse_ffn", counted)
    with torch.no_grad():
        wanted = model(ids).logits
        assert len(calls) == 2
        dispatch_model(model, {"": "cpu"}, force_hooks=True)  # as for several GPUs
        assert "forward" in model.model.layers[0].mlp.up_proj.__dict__
        assert torch.equal(model(ids).logits, wanted)
        assert len(calls) == 4
        remove_hook_from_submodules(model)
        cpu_offload(model, torch.device("cpu"))  # weights lie elsewhere between calls
        torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-4)
        assert len(calls) == 4


def test_unknown_sources_are_refused():
    with pytest.raises(KernelError, match="no kernel sources are registered under 'nothing'"):
        kernels_for("nothing", 0)
    assert kernels_for(SOURCES, 0) is kernels_for(SOURCES, 0)
    assert twell_ffn.register_sources({"pack.cu": b"no kernel"}) == SOURCES
    assert twell_ffn.register_sources({"pack.cu": b"another"}) != SOURCES


def test_a_reason_is_logged_once_or_collected(caplog):
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            say_once("CuPy is not installed")
            say_once("another reason")
    assert [record.getMessage() for record in caplog.records] == [
        "TwELL kernels are not used, plain PyTorch is: CuPy is not installed",
        "TwELL kernels are not used, plain PyTorch is: another reason",
    ]
    caplog.clear()
    with reasons_said() as said:
        for _ in range(2):
            say_once("another reason")
    assert said == ["TwELL kernels are not used, plain PyTorch is: another reason"]
    assert not caplog.records
    say_once("another reason")
    assert len(caplog.records) == 1


@pytest.fixture
def on_gpu(monkeypatch):
    """`on_gpu(limits)`: as with such a GPU, CuPy and NVRTC; what was loaded before is forgotten."""

    def play(limits: Limits = H200) -> None:
        monkeypatch.setattr(twell_reasons, "device_limits", lambda index: limits)
        monkeypatch.setattr(twell_reasons, "what_is_missing", lambda: None)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        twell_reasons._why_never_loaded.cache_clear()

    yield play
    twell_reasons._why_never_loaded.cache_clear()


def test_without_cupy_nothing_is_compiled(on_gpu, monkeypatch, tmp_path):
    on_gpu()
    monkeypatch.setattr(twell_reasons, "what_is_missing", twell_nvrtc.what_is_missing)
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", None)
    reason = twell_ffn.why_no_kernels(SOURCES, 0)
    assert reason.startswith("CuPy, which launches the kernels, ")
    assert reason.endswith(tuple(twell_nvrtc.PACKAGES.values()))
    assert not list(tmp_path.iterdir())


def test_a_failed_load_is_tried_again_and_no_other_failure(on_gpu, monkeypatch):
    on_gpu()
    failures = [LoadError("out of memory"), KernelError("does not compile"), None]

    class Kernels:
        def prepare(self, names):
            if failure := failures.pop(0):
                raise failure

    monkeypatch.setattr(twell_reasons, "kernels_for", lambda sources, index: Kernels())
    assert twell_ffn.why_no_kernels("a", 0) == "out of memory"
    assert [twell_ffn.why_no_kernels("a", 0) for _ in range(2)] == ["does not compile"] * 2
    assert failures == [None]


@pytest.mark.parametrize("smem_bytes", [232448, 101376], ids=["H200", "little shared memory"])
@pytest.mark.parametrize("hopper", [True, False], ids=["Hopper", "Blackwell"])
def test_what_few_and_many_tokens_need_is_loaded_at_once(on_gpu, monkeypatch, hopper, smem_bytes):
    """A capture may be the first that needs one of them, and nothing can be loaded there."""
    limits, prepared = Limits(132, smem_bytes, (9, 0) if hopper else (10, 0)), []
    on_gpu(limits)
    kernels = type("Kernels", (), {"prepare": staticmethod(prepared.extend)})
    monkeypatch.setattr(twell_reasons, "kernels_for", lambda sources, index: kernels)
    assert twell_ffn.why_no_kernels(SOURCES, 0) is None
    assert twell_reasons.takes_hopper_kernels(0) is hopper
    many = twell_reasons.HOPPER_KERNELS if hopper else ()
    taken = [M for M in range(1, 65) if takes_few(M, 8, limits, "bf16")]
    assert (taken == list(range(1, 65))) or smem_bytes < 232448
    assert set(prepared) == {*many, *few_kernels(limits, "bf16")}
    entries = (
        entry for M in taken for entry in (plan_few(M, 8, K, limits, "bf16") for K in (64, 8192))
    )
    assert {name for e in entries for name in (e.hidden.name, e.down.name)} <= set(prepared)


def test_what_is_not_taken(on_gpu):
    on_gpu()
    x, w_gate, w_up, w_down, *_ = problem()
    rows, ffn = x.view(-1, 64), ffn_of(w_gate, w_up, w_down)
    assert not ffn.by_neurons.is_contiguous()  # of which a copy would be made
    assert twell_reasons.why_not_ffn(rows, ffn, 256) is None
    assert "bf16, not float32" in twell_reasons.why_not_ffn(rows.float(), ffn, 256)
    assert "tiles of 256" in twell_reasons.why_not_ffn(rows, ffn, 128)
    strided = ffn_of(w_gate, w_up.t().contiguous().t(), w_down)
    assert "contiguous weights" in twell_reasons.why_not_ffn(rows, strided, 256)
    turned = ffn_of(w_gate, w_up, w_down.t())
    assert "[K, N]" in twell_reasons.why_not_ffn(rows, turned, 256)
    mixed = ffn_of(w_gate, w_up.float(), w_down)
    assert "dtype and device" in twell_reasons.why_not_ffn(rows, mixed, 256)
    for up, bias in ((w_up[:8], None), (w_up, w_up[0])):
        wrong = ffn_of(w_gate, up, w_down, None, bias)
        assert "[K, N]" in twell_reasons.why_not_ffn(rows, wrong, 256)
    assert "[M, 64], not [10, 32]" in twell_reasons.why_not_ffn(rows[:, :32], ffn, 256)


@pytest.mark.parametrize("M", [1, 64, 65, 4097])
@pytest.mark.parametrize("route", ["twell", "dense"])
def test_w_down_is_copied_only_where_it_lies_otherwise(monkeypatch, route, M):
    monkeypatch.setattr(twell_ways, "device_limits", lambda index: H200)
    monkeypatch.setattr(twell_ways, "kernels_for", lambda sources, index: "kernels")
    found = []

    def way(given):
        def run(kernels, here, rows, ffn, slots):
            assert (kernels, here, rows.shape, slots) == ("kernels", H200, (M, 64), 8)
            found.append(ffn.by_neurons)

        return replace(given, run=run)

    monkeypatch.setattr("twellctl.bundle.twell_ways.WAYS", tuple(map(way, twell_ways.WAYS)))
    _, w_gate, w_up, w_down, *biases = problem()
    x = torch.randn(M, 64).bfloat16()
    shifted = torch.cat([w_down.flatten()[:1], w_down.t().flatten()])[1:].view(96, 64).t()
    for laid in (w_down, shifted, w_down.t().contiguous().t()):
        ffn = ffn_of(w_gate, w_up, laid, *biases)
        run_by_plan(x, ffn, 8, 0.01, SOURCES, route)
        assert torch.equal(found[-1], w_down.t())
        if route == "dense":
            assert found[-1].data_ptr() == laid.data_ptr()
        else:
            assert found[-1].is_contiguous()
            assert found[-1].data_ptr() % 16 == 0
    assert found[-1].data_ptr() == laid.data_ptr()


# ---- copies of the code ----


def imported_copy(folder: Path, package: str):
    """twell_ffn of the files in `folder`, as transformers imports an export's."""
    for name in ("", ".twell_ffn"):
        file = folder / ("__init__.py" if not name else f"{name[1:]}.py")
        spec = importlib.util.spec_from_file_location(
            package + name, file, submodule_search_locations=None if name else [str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[package + name] = module
        spec.loader.exec_module(module)
    return module


def test_copies_of_the_code_share_what_is_equal(tmp_path):
    ours = Path(twell_ffn.__file__).parent
    for name in ("same", "changed"):
        shutil.copytree(ours, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "changed" / "twell_plan.py").open("a") as file:
        file.write("\n# of another version\n")
    tensors = problem()
    wanted = sparse(*tensors)
    same = imported_copy(tmp_path / "same", "copy_of_the_same")
    changed = imported_copy(tmp_path / "changed", "copy_of_another")
    assert same.sparse_ffn is twell_ffn.sparse_ffn
    assert same.register_sources({"x.cu": b""}) == twell_ffn.register_sources({"x.cu": b""})
    assert changed.sparse_ffn is not twell_ffn.sparse_ffn
    assert changed._gated_ffn_op is not twell_ffn._gated_ffn_op
    assert torch.equal(sparse(*tensors, operator=changed.sparse_ffn), wanted)


def test_shapes_alone_are_enough():
    x, *weights = (
        torch.empty(*s, device="meta") for s in ((2, 3, 64), (96, 64), (96, 64), (64, 96))
    )
    with torch.no_grad():
        assert sparse(x, *weights).shape == (2, 3, 64)
