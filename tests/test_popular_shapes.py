"""Every launch for popular models fits the GPU that it is made for, whichever way is taken.

Tensors are on the meta device; launches are judged by what ptxas says of the kernels, and have the
arguments that those take.
"""

import functools
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attached import attached
from compiled import (
    EVERY_CASE,
    cluster_blocks,
    compiled,
    most_threads,
    specified_alike,
    static_bytes,
)
from ffns import ffn_by_neurons, ffn_of
from launched import Map, assert_taken, signature
from popular_shapes import SHAPES, Shape
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle import (
    twell_launch,
    twell_reasons,
    twell_rounded_linear,
    twell_training,
    twell_ways,
)
from twellctl.bundle.twell_few import few_kernels
from twellctl.bundle.twell_grad_plan import training_tokens
from twellctl.bundle.twell_model import gated_ffns
from twellctl.bundle.twell_plan import Limits, why_unfit
from twellctl.bundle.twell_spec import ENTRY_FILES, KINDS
from twellctl.bundle.twell_training import Wanted, backward, forward
from twellctl.bundle.twell_ways import Problem, run_by_plan, ways_of
from twellctl.bundle.twell_weights import FFN
from twellctl.decoding import kernel_decoder, kernel_fit, kernel_layers
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.screened import Screen
from twellctl.decoding.screening import Screens
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES

DEVICES = {
    "H200": Limits(132, 227 << 10, (9, 0)),
    "A100": Limits(108, 163 << 10, (8, 0)),
    "RTX 4090": Limits(128, 99 << 10, (8, 9)),
    "RTX 3060": Limits(28, 99 << 10, (8, 6)),
}
# Of sm_86, too: the two have the same sizes, and a compiler's time is not little. For the same
# reason what is built for the same sizes on Hopper is compiled for that.
ARCHS = {(8, 6): "sm_89"}
ROWS = (1, 2, 3, 4, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 64)  # between which nothing changes
TOKENS = (*ROWS, 65, 128, 1024, 4096, 16384, 131072)
TRAINED = (4096, 16384, 131072)
PAGES = 64  # of 64 positions: the context of the models
MOST_OF_A_GRID = (2**31 - 1, 65535, 65535)

on_all_devices = pytest.mark.parametrize("device", DEVICES)
of_all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
# the smallest, the largest and some between, for other GPUs: an A100 has more shared memory than an
# RTX 4090, an RTX 3060 fewer multiprocessors
SOME = {"SmolLM2-135M", "Qwen3-4B", "Qwen2.5-7B", "Llama-3.1-70B"}
SOME |= {"Qwen2.5-0.5B", "Phi-3-mini"} if EVERY_CASE else set()
# and those of a step in one kernel, or of other heads
STEPS = SOME | {"Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-1.5B", "Llama-2-7B"}
STEPS |= {"OpenLLaMA-3B", "Falcon3-3B"}
of_steps = pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if EVERY_CASE or shape.name in STEPS],
    ids=lambda shape: shape.name,
)


def on_devices(on_hopper: set[str]):
    """Of an H200 these shapes; of others `SOME`."""
    return pytest.mark.parametrize(
        ("device", "shape"),
        [
            pytest.param(device, shape, id=f"{shape.name}-{device}")
            for device in DEVICES
            for shape in SHAPES
            if shape.name in (on_hopper if device == "H200" else SOME)
        ],
    )


of_shapes_on_devices = on_devices({shape.name for shape in SHAPES} if EVERY_CASE else STEPS)


@functools.cache
def said_of(entry: str, arch: str) -> SimpleNamespace:
    """What ptxas says of an entry."""
    file = ENTRY_FILES[entry]
    arch = "sm_90a" if specified_alike(file, arch, "sm_90a") else arch
    code = compiled(file, arch).code
    return SimpleNamespace(
        static=static_bytes(file, arch)[entry],
        threads=most_threads(code, entry),
        cluster=cluster_blocks(code, entry),
    )


class Judge:
    """Stands for a KernelSet: judges what is launched; `launched`: the entries."""

    def __init__(self, limits: Limits):
        self.limits, self.launched, self.prepared = limits, set(), set()
        self.arch = ARCHS.get(limits.capability, limits.arch)

    def kernel(self, entry: str) -> SimpleNamespace:
        return said_of(entry, self.arch)

    def prepare(self, names) -> None:
        self.prepared |= set(names)

    def clusters_at_once(self, name, cluster, block, smem_bytes) -> int:
        kernel = self.kernel(name)
        assert kernel.cluster == cluster
        self.fits(name, (cluster,), block, smem_bytes)
        return 132 // cluster

    def launch(
        self, name, grid, block, args, smem_bytes=0, *, overlap=False, together=False
    ) -> None:
        self.launched.add(name)
        self.fits(name, grid, block, smem_bytes)
        assert_taken(name, args)
        if together:
            assert grid[0] <= self.limits.num_sms, name
        tensors = [t for t in args.values() if isinstance(t, Tensor)]
        # a row's table for each of its tokens need not be there several times
        assert all(t.is_contiguous() or t.stride(0) == 0 for t in tensors), name

    def fits(self, name, grid, block, smem_bytes) -> None:
        kernel = self.kernel(name)
        assert kernel.static + smem_bytes <= self.limits.smem_bytes, name
        assert 0 < block <= kernel.threads, name
        assert block % 32 == 0, name
        sizes = zip(grid, MOST_OF_A_GRID, strict=False)
        assert all(0 < size <= most for size, most in sizes), (name, grid)
        assert grid[0] % kernel.cluster == 0, (name, grid)


@pytest.fixture
def judge(device, monkeypatch) -> Judge:
    """In the place of the kernels of `device`, for the operator and for the engine."""
    made = Judge(DEVICES[device])
    monkeypatch.setattr(twell_launch, "_encode", lambda *sizes: Map(None, 0))
    for module in (twell_ways, kernel_decoder, kernel_fit):
        monkeypatch.setattr(module, "kernels_for", lambda sources, index: made)
        monkeypatch.setattr(module, "device_limits", lambda index: made.limits)
    monkeypatch.setattr(kernel_fit, "takes_hopper_kernels", lambda index: made.limits.hopper)
    monkeypatch.setattr(kernel_fit, "what_is_missing", lambda: None)
    monkeypatch.setattr(kernel_layers, "by_rows_of_neurons", lambda w: w.t().contiguous().t())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def empty(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="meta")


def ffn_of_shape(shape: Shape) -> FFN:
    N, K = shape.N, shape.K
    return ffn_by_neurons(*(empty(N, K) for _ in range(3)))


def plans_of_all_ways(judge: Judge, M: int, shape: Shape, kind: str = "bf16") -> list[str]:
    """A plan by each of the ways that take so many tokens."""
    problem = Problem(M, shape.N, shape.K, judge.limits, kind=kind)
    return [f"1+ {way.name}" for way in ways_of("auto", problem)]


# ---- the operator ----


@of_shapes_on_devices
def test_all_ways_of_the_operator(judge, shape, monkeypatch):
    assert why_unfit(shape.K, shape.N, 256, judge.limits.smem_bytes) is None
    ffn = ffn_of_shape(shape)
    for M in TOKENS:
        for plan in plans_of_all_ways(judge, M, shape):
            y = run_by_plan(empty(M, shape.K), ffn, 64, -1.0, "", plan)
            assert y.shape == (M, shape.K)
    if judge.limits.hopper:
        assert {"gate_pack", "plan_cluster", "up", "hidden", "down"} <= judge.launched
        assert {"heavy_gather", "heavy_hidden", "heavy_down"} <= judge.launched
    else:
        assert all(name.startswith("few_") for name in judge.launched)
    assert any(name.startswith("few_hidden_1") for name in judge.launched)


@of_shapes_on_devices
def test_all_ways_over_fp8_weights(judge, shape, monkeypatch):
    N, K = shape.N, shape.K
    step = KINDS["e4m3"].step
    if N % step or K % step:
        pytest.skip(f"sizes of {shape.name} are no multiples of {step}")
    assert why_unfit(K, N, 256, judge.limits.smem_bytes) is None
    # no autocast on meta
    monkeypatch.setattr(twell_ways, "gated_ffn", lambda x, ffn: x)
    gate, up, turned = (empty(N, K).to(torch.float8_e4m3fn) for _ in range(3))
    scales = (empty(size).float() for size in (N, N, K))
    down = empty(K, N).to(gate.dtype)
    ffn = replace(ffn_of(gate, up, down, None, None, None, *scales), turned=turned)
    hopper = judge.limits.capability == (9, 0)
    for M in TOKENS:
        for plan in plans_of_all_ways(judge, M, shape, "e4m3"):
            y = run_by_plan(empty(M, K), ffn, 64, 0.01, "", plan)
            assert y.shape == (M, K)
    assert {"few_down_e4m3", "few_hidden_1_e4m3"} <= judge.launched
    if hopper:
        by_pairs = {name for name in judge.launched if name.startswith("few_walk")}
        assert bool(by_pairs) == (K <= 4096)
    assert judge.launched <= set(few_kernels(judge.limits, "e4m3"))


@pytest.mark.parametrize("device", ["H200"])
@of_all_shapes
def test_training(judge, shape, monkeypatch):
    heavy = torch.empty(3, dtype=torch.int64, device="meta")
    monkeypatch.setattr(twell_training, "sent_to_host", lambda count: count)
    monkeypatch.setattr(twell_training, "listed_rows", lambda *listed: heavy)
    ffn, wanted = ffn_of_shape(shape), Wanted()
    for M in TRAINED:
        most = training_tokens(shape.N, shape.K, 64, judge.limits)
        for rows in {min(M, most), M % most} - {0}:
            x = empty(rows, shape.K)
            _, _, kept = forward(judge, judge.limits, x, ffn, 64)
            backward(judge, judge.limits, x, ffn, x, None, kept, 64, wanted)
    assert set(twell_reasons.GRAD_KERNELS) - judge.launched <= {"add_parts"}


# ---- the engine ----


@on_devices({shape.name for shape in SHAPES} if EVERY_CASE else STEPS)
def test_all_steps_of_the_engine(judge, shape, monkeypatch):
    model = shape.model(shape.vocabulary, "meta", num_hidden_layers=1)
    assert why_not(model, monkeypatch) is None
    monkeypatch.setattr(kernel_decoder, "open_screens", screens_of)
    for is_sparse in (False, True):
        decoder = KernelDecoder(model, sparse=is_sparse, gates="screened")
        with torch.inference_mode():
            attached(decoder, PAGES + 1)
            most = decoder.max_rows
            for B in {most, *(rows for rows in ROWS if rows <= most)}:
                logits, _ = decoder.run(*inputs(B, PAGES))  # by the first way
                assert logits.shape == (B, 1, shape.vocabulary)
                _, *others = (ways := decoder.ways(B))
                for other in {"dense", "one screened kernel"}.intersection(others):
                    found, _ = ways[other](*inputs(B, PAGES))
                    assert found.shape == (B, shape.vocabulary)
            # narrower tables make other plans of attention, of which more below
            for B in (1, decoder.max_rows):
                for width in decoder.widths(PAGES):
                    logits, _ = decoder.run(*inputs(B, width))
                    assert logits.shape == (B, 1, shape.vocabulary)
            for Q in (2, 5, 16):
                B = max(1, min(3, most // Q))
                logits, _ = decoder.run(*inputs(B, PAGES, Q), last=Q)
                assert logits.shape == (B, Q, shape.vocabulary)
    assert judge.launched <= judge.prepared


@on_devices(SOME)
def test_steps_of_a_silu_model(judge, shape, monkeypatch):
    model = shape.model(shape.vocabulary, "meta", num_hidden_layers=1, hidden_act="silu")
    assert why_not(model, monkeypatch) is None
    decoder = KernelDecoder(model)
    with torch.inference_mode():
        attached(decoder, PAGES + 1)
        assert decoder.max_rows == 256
        for B in (1, 32, 33, 64, 65, 256):
            logits, counts = decoder.run(*inputs(B, PAGES))
            assert (logits.shape, counts.shape) == ((B, 1, shape.vocabulary), (0, B, 1))
    assert judge.launched <= judge.prepared


@pytest.mark.parametrize("device", ["H200"])
@of_steps
def test_one_row_over_fp8_weights_is_one_kernel_where_it_is_in_bf16(judge, shape, monkeypatch):
    """But for heads of 256, which the kernel of a whole step has in bf16 alone."""
    model = shape.model(shape.vocabulary, "meta", num_hidden_layers=1)
    expected = kernel_fit.why_not_one_kernel(model) is None and shape.D != 256
    round_model(model, SCHEMES["fp8"])
    if said := why_not(model, monkeypatch):
        pytest.skip(f"the engine has no kernels for it in FP8: {said}")
    # products of tensors without numbers
    monkeypatch.setattr(
        twell_rounded_linear, "linear", lambda x, weight: x.new_empty(*x.shape[:-1], weight.N)
    )
    for is_sparse in (False, True):
        decoder = KernelDecoder(model, sparse=is_sparse)
        with torch.inference_mode():
            attached(decoder, PAGES + 1)
            ways = decoder.ways(1)
            assert ("one dense kernel" in ways) == expected
            for way in ways.values():
                logits, _ = way(*inputs(1, PAGES))
                assert logits.shape == (1, shape.vocabulary)
    assert judge.launched <= judge.prepared


def screens_of(model: PreTrainedModel) -> Screens:
    """Of tensors without numbers."""
    made = []
    for ffn in gated_ffns(model):
        K, N = ffn.down_proj.weight.shape
        copy = torch.empty(-(-N // 16), K // 64, 576, dtype=torch.uint8, device="meta")
        made.append(Screen(copy, torch.empty(16 * len(copy), device="meta"), N))
    return Screens(made, [0.0] * len(made), 0.1)


def why_not(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """As on a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "device", torch.device("cuda", 0))
        patch.setattr(torch.version, "cuda", "13.0")
        return KernelDecoder.why_not(model)


def inputs(B: int, width: int, Q: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((B, Q), (B, Q), (B, width))
    tokens, positions, tables = (torch.empty(s, dtype=torch.int32, device="meta") for s in sizes)
    return tokens, positions, tables


@on_all_devices
def test_attention_of_long_texts(judge):
    """Up to 128 thousand positions: the plans of all tables that an engine may have."""
    for shape in SHAPES:
        for B in range(1, 65):
            for pages in (16, 64, 128, 512, 2048):
                plan = kernel_decoder.attention.plan_attend(
                    B, shape.H, shape.Hkv, shape.D, 64 * pages, judge.limits.num_sms
                )
                judge.fits(plan.entry, plan.grid, 32 * plan.num_warps, plan.smem_bytes)


# ---- the judge ----


def test_what_is_built_for_the_same_sizes_on_two_architectures():
    assert specified_alike("decode/attend_64.cu", "sm_80", "sm_90a")
    # spec.cuh has other entries; the text itself asks for the architecture
    assert not specified_alike("ffn/few_hidden.cu", "sm_80", "sm_89")
    assert not specified_alike("ffn/few_down.cu", "sm_89", "sm_90a")


def test_the_judge_objects():
    judge, name = Judge(DEVICES["A100"]), "few_down"
    taken = signature(name)
    pairs = zip(taken.names, taken.types, strict=True)
    args = {name: 0 if kind == "int" else None for name, kind in pairs}
    one_less = {name: argument for name, argument in args.items() if name != "M"}
    wrong: dict[str, Callable[[], None]] = {
        "static and dynamic": lambda: judge.launch(name, (8,), 256, args, (163 << 10) - 31),
        "threads": lambda: judge.launch(name, (8,), 288, args, 0),
        "grid": lambda: judge.launch(name, (8, 65536), 256, args, 0),
        "nothing": lambda: judge.launch(name, (0,), 256, args, 0),
        "waiting for each other": lambda: judge.launch(name, (109,), 256, args, together=True),
        "one less": lambda: judge.launch(name, (8,), 256, one_less, 0),
        "another name": lambda: judge.launch(name, (8,), 256, one_less | {"m": 0}, 0),
        "another type": lambda: judge.launch(name, (8,), 256, args | {"M": None}, 0),
        "another dtype": lambda: judge.launch(name, (8,), 256, args | {"fired": empty(8).int()}, 0),
    }
    judge.launch(name, (108, 65535), 256, args, (163 << 10) - 32, together=True)
    for launch in wrong.values():
        with pytest.raises((AssertionError, TypeError, struct.error)):
            launch()
