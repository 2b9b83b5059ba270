"""The host side of the kernels for few tokens agrees with what the kernels are."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled import compile_claims
from launched import Launches, bf16, zero_ffn

from twellctl.bundle import twell_few
from twellctl.bundle.twell_few import (
    FEW_TOKENS,
    FewPlan,
    few_dense_kernels,
    few_gated,
    few_kernels,
    few_linear,
    few_union,
    plan_few,
    takes_few,
    takes_few_dense,
)
from twellctl.bundle.twell_few_walk import few_walk_entries
from twellctl.bundle.twell_nvrtc import KernelError
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import ENTRY_FILES, KINDS, entries_of, entry
from twellctl.bundle.twell_weights import plain_weight

H200 = Limits(132, 232448, (9, 0))
A100 = Limits(108, 166912, (8, 0))
L4 = Limits(58, 101376, (8, 9))
DEVICES = {"H200": H200, "A100": A100, "L4": L4}
TOKENS = [1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64]
LENGTHS = [64, 128, 576, 2048, 4096, 14336, 65536]
NEURONS = [8, 16, 24, 520, 5632, 14336, 65536]


def launches(M: int, K: int, N: int, limits: Limits = H200, *, full=True, kind="bf16", **more):
    """What the FFN, few_gated and few_linear launch; `full`: with biases, a residual, counts."""
    x, ffn = bf16(M, K), zero_ffn(K, N, full, kind)
    residual = bf16(M, K) if full else None
    counts = torch.zeros(M, dtype=torch.int32) if full else None
    kernels = Launches()
    y = few_union(kernels, limits, x, ffn, residual=residual, counts=counts, **more)
    hidden = few_gated(kernels, limits, x, ffn, counts=counts, **more)
    linear = few_linear(kernels, limits, x, ffn.gate, **more)
    assert [tuple(t.shape) for t in (y, hidden, linear)] == [(M, K), (M, N), (M, N)]
    assert {t.dtype for t in (y, hidden, linear)} == {torch.bfloat16}
    return kernels


# ---- launches ----


@pytest.mark.parametrize("limits", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("M", TOKENS)
def test_grids_are_those_of_the_kernels(M, limits):
    for K, N in ((64, 8), (128, 520), (2048, 5632)):
        made = {
            re.sub(r"_\d.*|_wide.*", "", launch[0]): launch
            for launch in launches(M, K, N, limits).made
        }
        blocks = min(-(-N // 16), limits.num_sms)
        grids = {name: grid for name, (_, grid, *_) in made.items()}
        products = dict.fromkeys(("few_hidden", "few_gated", "few_linear"), (blocks,))
        assert grids == {**products, "few_down": (K // 16,)}
        assert {launch[2] for launch in made.values()} == {256}
        hidden, fired = (made["few_hidden"][3][name] for name in ("hidden", "fired"))
        assert made["few_down"][3]["hidden"] is hidden
        assert made["few_down"][3]["fired"] is fired
        assert hidden.shape == (N, 8 * plan_few(M, N, K, limits, "bf16").octets)
        assert len(fired) >= -(-N // 16)
        assert fired.dtype == torch.int16


def test_the_dense_form_counts_where_it_is_asked():
    for full in (True, False):
        _, _, gated, _ = launches(3, 2048, 5632, full=full).made
        assert gated[3]["hidden"].shape == (3, 5632)
        assert (gated[3]["counts"] is not None) == full


def test_a_wide_result_goes_where_the_kernel_has_it():
    made = Launches()
    x, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (3, 24))
    y = few_linear(made, H200, x, plain_weight(weight), wide=True)
    assert (tuple(y.shape), y.dtype) == ((3, 24), torch.float32)
    ((_, _, _, args, _),) = made.made
    assert args["y"] is None
    assert args["y32"] is y


def test_few_linear_has_stages_for_what_it_does():
    """Of a 1.5B model on an H200: q, k and v; o; the head."""

    def names(M: int, N: int, limits: Limits = H200) -> tuple[str, str]:
        plan = plan_few(M, N, 2048, limits, "bf16")
        return plan.linear.name.removeprefix("few_linear_"), plan.ahead.name[11:]

    assert names(1, 6144) == ("1", "1_ahead")
    assert names(8, 2048) == ("1_short", "1")
    assert names(1, 49152) == ("1", "1_ahead")
    assert names(16, 6144) == ("2", "2_ahead")
    assert names(16, 2048) == ("2", "2")
    assert names(17, 6144) == ("4", "4")
    assert names(1, 6144, A100) == ("1", "1")


def test_what_is_launched_may_overlap_or_not():
    assert launches(4, 64, 96).overlaps == [False] * 4
    assert launches(4, 64, 96, overlap=True).overlaps == [True] * 4


def test_every_entry_is_planned_and_has_its_source():
    planned = {
        launch.name
        for limits in DEVICES.values()
        for M in range(1, FEW_TOKENS + 1)
        for N in (520, 65536)
        for K in LENGTHS
        for kind in KINDS
        for launch in launches_of(plan_few(M, N, K, limits, kind))
    }
    files = {"ffn/few_linear.cu", "decode/few_gated.cu", "ffn/few_hidden.cu", "ffn/few_down.cu"}
    files |= {f"{entry(file.removesuffix('.cu'), 'e4m3')}.cu" for file in files}
    assert planned == {entry for entry, file in ENTRY_FILES.items() if file in files}
    own = {entry for kind in KINDS for entry in few_walk_entries(kind)}
    prepared = {entry for kind in KINDS for entry in few_kernels(H200, kind)}
    dense = {entry for kind in KINDS for entry in few_dense_kernels(H200, kind)}
    assert planned | own == prepared | dense
    assert {entry for entry in dense - prepared if not entry.startswith("few_gated")} == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DEVICES)
def test_all_that_is_taken_fits_and_is_prepared(name, kind):
    limits, seen = DEVICES[name], 0
    prepared, of_dense = few_kernels(limits, kind), {*few_dense_kernels(limits, kind)}
    for M in range(FEW_TOKENS + 2):
        for N in NEURONS:
            for K in LENGTHS if 1 <= M <= FEW_TOKENS else ():
                plan = plan_few(M, N, K, limits, kind)
                if takes_few(M, N, limits, kind):
                    assert max(plan.hidden.smem_bytes, plan.down.smem_bytes) <= limits.smem_bytes
                    assert {plan.hidden.name, plan.down.name} <= set(prepared)
                    seen += 1
                if takes_few_dense(M, limits, kind):
                    dense = plan.gated, plan.linear, plan.ahead
                    assert max(launch.smem_bytes for launch in dense) <= limits.smem_bytes
                    assert {launch.name for launch in dense} <= of_dense
    assert seen


def test_what_a_kernel_declares_counts_too():
    N = 65536  # for which few_down asks for the most
    most = plan_few(8, N, 64, H200, "bf16").down.smem_bytes + twell_few._DOWN_STATIC
    assert takes_few(8, N, replace(H200, smem_bytes=most), "bf16")
    assert not takes_few(8, N, replace(H200, smem_bytes=most - 1), "bf16")


@pytest.mark.parametrize("N", [8, 5632, 14336])
def test_the_h200_takes_all(N):
    for kind in KINDS:
        tokens = range(1, FEW_TOKENS + 1)
        assert all(takes_few(M, N, H200, kind) and takes_few_dense(M, H200, kind) for M in tokens)
        for M in (0, FEW_TOKENS + 1):
            assert not takes_few(M, N, H200, kind)
            assert not takes_few_dense(M, H200, kind)


# ---- sizes, judged by the compiler ----


def launches_of(plan: FewPlan):
    return plan.linear, plan.ahead, plan.gated, plan.hidden, plan.down


TEMPLATES = {
    "ffn/few_linear.cu": "few_linear",
    "decode/few_gated.cu": "few_gated",
    "ffn/few_hidden.cu": "few_hidden",
    "ffn/few_down.cu": "few_down",
}


def claims_of(file: str, limits: Limits, kind: str = "bf16") -> list[str]:
    """That each launch planned of a file's kernels has just the shared memory that they ask for."""
    claims = {}
    for M in TOKENS:
        for K in (K for K in LENGTHS if K % KINDS[kind].step == 0):
            for N in NEURONS:
                plan = plan_few(M, N, K, limits, kind)
                for launch in launches_of(plan):
                    if launch.name.startswith(Path(file).stem):
                        entries = entries_of(ENTRY_FILES[launch.name], limits.capability)
                        arguments = entries[launch.name]
                        assert arguments[1] == plan.octets or M <= 2
                        struct, *numbers = arguments
                        given = ", ".join([struct, *(str(int(number)) for number in numbers)])
                        if not launch.name.startswith("few_down"):
                            given = f"few::Sizes<{given}>"
                        claim = f"needed_bytes<{given}>({M}, {N}, {K}) == {launch.smem_bytes}"
                        claims[claim] = None
    return list(claims)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", TEMPLATES)
@pytest.mark.parametrize(
    ("limits", "arch"),
    [(H200, "sm_90a"), (A100, "sm_80"), (L4, "sm_89")],
    ids=["H200", "A100", "L4"],
)
def test_shared_memory_is_what_the_kernels_ask_for(file, limits, arch, kind):
    claims = claims_of(file, limits, kind)
    assert len(claims) > 100
    compile_claims(file, [*claims, f"few::kThreads == {twell_few._BLOCK}"], arch)


def test_kinds_of_weights_are_those_of_the_kernels():
    claims = [
        f"{kind.struct}::{name} == {int(number)}"
        for kind in KINDS.values()
        for name, number in (
            ("kBits", kind.bits),
            ("kInF16", kind.in_f16),
            ("kMultiple", kind.step),
        )
    ]
    compile_claims("tile/weights.cuh", claims, "sm_80")


def test_the_compiler_would_object():
    """To a byte too little."""
    claim, size = claims_of("ffn/few_linear.cu", H200)[7].rsplit(" ", 1)
    with pytest.raises(KernelError, match=r"does not compile claims.cu .*static assertion failed"):
        compile_claims("ffn/few_linear.cu", [f"{claim} {int(size) - 1}"], "sm_90a")
