"""The host side of the kernels for few tokens agrees with what the kernels are."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import Launches, kind_of, parameters, source
from torch import Tensor

from twellctl.bundle import twell_few
from twellctl.bundle.twell_few import (
    FEW_KERNELS,
    FEW_TOKENS,
    FewPlan,
    Launch,
    few_ffn_kernels,
    few_gated,
    few_gated_kernels,
    few_kernels,
    few_linear,
    few_union,
    plan_few,
    takes_few,
    takes_few_dense,
)
from twellctl.bundle.twell_few_walk import few_walk_kernels
from twellctl.bundle.twell_launch import ENTRY_FILES, Limits
from twellctl.bundle.twell_nvrtc import Nvrtc, find_nvrtc
from twellctl.bundle.twell_weights import FFN
from twellctl.here.resources import kernel_files

H200 = Limits(132, 232448, 60 << 20, (9, 0))
A100 = Limits(108, 166912, 40 << 20, (8, 0))
L4 = Limits(58, 101376, 48 << 20, (8, 9))
DEVICES = {"H200": H200, "A100": A100, "L4": L4}
TOKENS = [1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64]
LENGTHS = [64, 128, 576, 2048, 4096, 14336, 65536]
NEURONS = [8, 16, 24, 520, 5632, 14336, 65536]
SOURCES = kernel_files()


def launches(M: int, K: int, N: int, limits: Limits = H200, *, full=True, **more):
    """What the FFN, few_gated and few_linear launch; `full`: with biases, a residual, counts."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    x, biases = zeros(M, K), [zeros(n) if full else None for n in (N, N, K)]
    ffn = FFN(zeros(N, K), zeros(N, K), zeros(N, K), *biases)
    residual = zeros(M, K) if full else None
    counts = zeros(M, dtype=torch.int32) if full else None
    kernels = Launches()
    y = few_union(kernels, limits, x, ffn, residual=residual, counts=counts, **more)
    hidden = few_gated(kernels, limits, x, ffn, counts=counts, **more)
    linear = few_linear(kernels, limits, x, ffn.w_gate, ffn.b_gate, **more)
    assert [tuple(t.shape) for t in (y, hidden, linear)] == [(M, K), (M, N), (M, N)]
    assert {t.dtype for t in (y, hidden, linear)} == {torch.bfloat16}
    return kernels


# ---- launches ----


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("M", TOKENS)
def test_arguments_are_the_parameters_of_the_kernel(M, full):
    for K in (64, 8192):
        made = launches(M, K, 520, full=full).made
        assert len(made) == 4
        for name, _, _, args, _ in made:
            assert [kind_of(argument) for argument in args] == parameters(name), name


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
        hidden, fired = made["few_hidden"][3][-3:-1]
        assert made["few_down"][3][1] is hidden
        assert made["few_down"][3][2] is fired
        assert hidden.shape == (N, 8 * plan_few(M, N, K, limits).octets)
        assert len(fired) >= -(-N // 16)
        assert fired.dtype == torch.int16


def test_the_dense_form_counts_where_it_is_asked():
    for full in (True, False):
        _, _, gated, _ = launches(3, 2048, 5632, full=full).made
        hidden, counts = gated[3][-2:]
        assert hidden.shape == (3, 5632)
        assert (counts is not None) == full


def test_a_wide_result_goes_where_the_kernel_has_it():
    made = Launches()
    x, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (3, 24))
    y = few_linear(made, H200, x, weight, wide=True)
    assert (tuple(y.shape), y.dtype) == ((3, 24), torch.float32)
    ((name, _, _, args, _),) = made.made
    assert args[-2] is None
    assert args[-1] is y
    assert [kind_of(argument) for argument in args] == parameters(name)


def test_few_linear_has_stages_for_what_it_does():
    """Of a 1.5B model on an H200: q, k and v; o; the head."""

    def names(M: int, N: int, limits: Limits = H200) -> tuple[str, str]:
        plan = plan_few(M, N, 2048, limits)
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
        for launch in launches_of(plan_few(M, N, K, limits))
    }
    files = {"ffn/few_linear.cu", "decode/few_gated.cu", "ffn/few_hidden.cu", "ffn/few_down.cu"}
    assert planned == {entry for entry, file in ENTRY_FILES.items() if file in files}
    tokens = range(1, FEW_TOKENS + 1)
    ffn = {name for M in tokens for name in few_kernels(M, A100)}
    gated = {name for M in tokens for name in few_gated_kernels(M)}
    assert (planned, ffn & gated) == (ffn | gated, set())
    assert {*FEW_KERNELS} == ffn | set(few_walk_kernels(17, H200))
    own = set(few_walk_kernels(17, H200))
    assert {*few_kernels(17, H200)} - planned == own


@pytest.mark.parametrize("name", DEVICES)
def test_all_that_is_taken_fits_and_is_prepared(name):
    limits, prepared, seen = DEVICES[name], few_ffn_kernels(DEVICES[name]), 0
    for M in range(FEW_TOKENS + 2):
        for N in NEURONS:
            for K in LENGTHS if 1 <= M <= FEW_TOKENS else ():
                plan = plan_few(M, N, K, limits)
                if takes_few(M, N, limits):
                    assert max(plan.hidden.smem_bytes, plan.down.smem_bytes) <= limits.smem_bytes
                    assert {plan.hidden.name, plan.down.name} <= set(prepared)
                    seen += 1
                if takes_few_dense(M, limits):
                    dense = plan.gated, plan.linear, plan.ahead
                    assert max(launch.smem_bytes for launch in dense) <= limits.smem_bytes
                    assert {launch.name for launch in dense} <= {*prepared, *few_gated_kernels(M)}
    assert seen
    assert prepared


def test_what_a_kernel_declares_counts_too():
    N = 65536  # for which few_down asks for the most
    most = plan_few(8, N, 64, H200).down.smem_bytes + twell_few._DOWN_STATIC
    assert takes_few(8, N, replace(H200, smem_bytes=most))
    assert not takes_few(8, N, replace(H200, smem_bytes=most - 1))


@pytest.mark.parametrize("N", [8, 5632, 14336])
def test_the_h200_takes_all(N):
    assert all(takes_few(M, N, H200) and takes_few_dense(M, H200) for M in range(1, FEW_TOKENS + 1))
    assert not any(takes_few(M, N, H200) or takes_few_dense(M, H200) for M in (0, FEW_TOKENS + 1))


# ---- sizes, judged by the compiler ----


def launches_of(plan: FewPlan):
    return plan.linear, plan.ahead, plan.gated, plan.hidden, plan.down


def nvrtc() -> Nvrtc:
    return find_nvrtc() or pytest.skip("no NVRTC: pip install 'twellctl[test]' on Linux")


def template(entry: str, limits: Limits) -> tuple[str, str]:
    """(the template argument of an entry of few_linear, few_gated or few_hidden; octets)."""
    family, name = re.fullmatch(r"(few_[a-z]+)_(\w+)", entry).groups()
    text = re.sub(r" +", " ", source(entry).replace("\n ", " "))
    macro = "TWELL_" + family.upper()
    (names,) = re.findall(rf"#define {macro}\(name, ([^)]*)\)", text)
    assert f"<few::Sizes<{names}>>(" in text, f"{macro} passes on what it is given, in this order"
    kilobytes = twell_few._shared_kb(limits.capability)  # the compiler has the last word
    text = re.sub(
        r"#if TWELL_SHARED_KB >= (\d+)\n(.*?)#else\n(.*?)#endif",
        lambda found: found[2 if kilobytes >= int(found[1]) else 3],
        text,
        flags=re.DOTALL,
    )
    (given,) = re.findall(rf"^{macro}\({name}, ([^)]*)\)", text, re.MULTILINE)
    return f"few::Sizes<{given}>", given.split(",")[0]


def probe(file: str, claims: list[str], arguments: str) -> bytes:
    """A source that compiles if all `claims` hold; `needed` in them is what the kernel asks for.

    What a kernel asks for stands where it traps. Its entries, which come last in the file, are left
    out, and with them the time that they take to compile.
    """
    text = SOURCES[file].decode()
    (needed,) = re.findall(r"if \(dynamic_smem_bytes\(\) < ([^;]*)\)\s*__trap\(\);", text)
    head = text[: text.index("}  // namespace\n")]
    tokens = "constexpr int kTokens = 8 * SIZES::kOctets;" if "SIZES" in arguments else ""
    function = f"constexpr unsigned needed(int M, int N, int K) {{ {tokens} return {needed}; }}"
    claimed = "\n".join(f"static_assert({claim});" for claim in claims)
    return f"{head}\ntemplate <{arguments}>\n{function}\n}}\n{claimed}".encode()


def compile_probe(text: bytes, arch: str) -> None:
    # what sizes a kernel has by its inputs is for the device alone, here for the compiler too
    headers = {
        name: re.sub(
            rb"__device__ static (?!constexpr|__)", b"__device__ static constexpr ", content
        )
        for name, content in SOURCES.items()
    }
    nvrtc().compile("probe.cu", headers | {"probe.cu": text}, arch)


PROBES = {
    "ffn/few_linear.cu": "class SIZES",
    "decode/few_gated.cu": "class SIZES",
    "ffn/few_hidden.cu": "class SIZES",
    "ffn/few_down.cu": "int OCTETS, int TILES, int LISTED",
}


def template_of(launch: Launch, plan: FewPlan, limits: Limits) -> str:
    """The template arguments of what is launched by a plan."""
    if not launch.name.startswith("few_down"):
        given, octets = template(launch.name, limits)
        assert int(octets) == plan.octets
        return given
    if launch.name == "few_down":
        return "1, 1, kFewListed"
    octets = launch.name.removeprefix("few_down_wide_")
    assert int(octets) == plan.octets
    return f"{octets}, kWideTiles, kAllListed"


def claims_of(file: str, limits: Limits) -> list[str]:
    """That each launch planned of a file's kernels has just the shared memory that they ask for."""
    claims = {}
    for M in TOKENS:
        for K in LENGTHS:
            for N in NEURONS:
                plan = plan_few(M, N, K, limits)
                for launch in launches_of(plan):
                    if launch.name.startswith(Path(file).stem):
                        given = template_of(launch, plan, limits)
                        claim = f"needed<{given}>({M}, {N}, {K}) == {launch.smem_bytes}"
                        claims[claim] = None
    return list(claims)


@pytest.mark.parametrize("file", PROBES)
@pytest.mark.parametrize(
    ("limits", "arch"),
    [(H200, "sm_90a"), (A100, "sm_80"), (L4, "sm_89")],
    ids=["H200", "A100", "L4"],
)
def test_shared_memory_is_what_the_kernels_ask_for(file, limits, arch):
    claims = claims_of(file, limits)
    assert len(claims) > 100
    common = [
        f"few::kThreads == {twell_few._BLOCK}",
        f"few::kWarps == {twell_few._WARPS}",
        f"few::kRows == {twell_few._ROWS}",
    ]
    compile_probe(probe(file, claims + common, PROBES[file]), arch)


def test_the_compiler_would_object():
    """To a byte too little."""
    claims = claims_of("ffn/few_linear.cu", H200)
    wrong = re.sub(r"== (\d+)$", lambda found: f"== {int(found[1]) - 1}", claims[7])
    with pytest.raises(Exception, match=r"does not compile probe.cu .*static assertion failed"):
        compile_probe(probe("ffn/few_linear.cu", [wrong], "class SIZES"), "sm_90a")
