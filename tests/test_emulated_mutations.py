"""The emulator finds mistakes: kernels with one each fail, as they are they pass.

With TWELL_TEST_EVERY_CASE in the environment also those that are like another one, or take long;
without it every second one.
"""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass

import emulated_step
import emulated_walk
import pytest
import torch
from compiled import EVERY_CASE
from emulated_head import HeadKernels
from emulated_kernels import EmulatedKernels, needs_emulator
from test_emulated_codes import check_down, check_rows
from test_emulated_few import FewKernels, of_e4m3
from test_emulated_grad import of_down, of_grad
from test_emulated_head import LONG, check_near_ties, check_unknown

from twellctl.bundle.twell_few_walk import plan_few_walk
from twellctl.bundle.twell_plan import Limits
from twellctl.here.resources import kernel_files

pytestmark = needs_emulator


def walk(kernels: EmulatedKernels) -> None:
    """Two tokens, one of which has several batches of pairs."""
    problem = emulated_walk.random_problem(2, 576, 264, 0.0, 1)
    limits = Limits(132, 232448, (9, 0))
    plan = plan_few_walk(2, 264, 576, limits, lambda *asked: 2, "bf16")
    y, _ = emulated_walk.emulate(kernels, plan, problem, 1)
    assert torch.equal(y, problem.y)


def pairs_e4m3(kernels: EmulatedKernels) -> None:
    """The same over e4m3 weights: x differs within a quad, h grows from batch to batch."""
    problem = emulated_walk.random_problem(2, 640, 264, 0.0, 1, "e4m3")
    problem.x.view(2, 10, 2, 32)[:, :, 1] *= 4
    problem.gate[:, 200:] *= 256
    limits = Limits(132, 232448, (9, 0))
    plan = plan_few_walk(2, 264, 640, limits, lambda *asked: 0, "e4m3")  # two blocks
    y, _ = emulated_walk.emulate(kernels, plan, problem, 1)
    assert torch.equal(y, problem.y)


def few(kernels: EmulatedKernels) -> None:
    """Three tokens over e4m3 weights, all neurons."""
    of_e4m3.test_whole_numbers_are_exact(FewKernels(kernels.sources), 3, 1024, 24, 0.0, False)


def lists(kernels: EmulatedKernels) -> None:
    of_grad.test_lists_are_as_short_as_can_be_and_the_same_from_run_to_run(kernels)


def sums(kernels: EmulatedKernels) -> None:
    of_grad.test_sums_are_added_to_if_there_are_heavy_rows(kernels, 5)


def step(kernels: EmulatedKernels, form: str = "sparse", **how) -> None:
    model = emulated_step.Model(1536, 128, 12, 12, 392, 1, 3, gate_mean=-0.5, **how)
    wanted = emulated_step.judge(model)
    done = emulated_step.emulate(kernels, model, 96, form, seeds=(1,))
    assert (done.logits - wanted.logits).abs().max() < 0.05
    assert (done.counts[0] - wanted.counts[0]).abs().max() <= 2


def step_e4m3(kernels: EmulatedKernels) -> None:
    step(kernels, kind="e4m3")


def step_int4(kernels: EmulatedKernels) -> None:
    """With a map, and groups of neurons that begin within a block's."""
    model = emulated_step.Model(
        1536, 128, 12, 12, 2312, 1, 3, gate_mean=-0.5, mapped=520, kind="int4"
    )
    wanted = emulated_step.judge(model)
    done = emulated_step.emulate(kernels, model, 96, "sparse", seeds=(1,))
    assert (done.logits - wanted.logits).abs().max() < 0.05


def head(kernels: EmulatedKernels) -> None:
    """In 8 bits, and what follows it, of near ties."""
    check_near_ties(HeadKernels(kernels.sources), 1536, 1509)


def long_head(kernels: EmulatedKernels) -> None:
    """Of more rows than the ring holds."""
    check_near_ties(HeadKernels(kernels.sources), 1536, LONG)


def unknown(kernels: EmulatedKernels) -> None:
    """Logits of which nothing is known."""
    check_unknown(HeadKernels(kernels.sources))


def screened(kernels: EmulatedKernels) -> None:
    """With a map; a quarter of the neurons that do not fire are candidates."""
    step(kernels, "screened", mapped=40, missed=-0.4)


def expanded(kernels: EmulatedKernels) -> None:
    """Codes of rows and of W_down."""
    check_rows(kernels, 36, 1536, 64, 64)
    check_down(kernels, 256, 64, 64)


def forward(kernels: EmulatedKernels) -> None:
    """`up` and `hidden` of several panels."""
    case = of_down.CASES[7]
    of_down.test_up_gives_partial_dot_products(kernels, *case, 1, 1, 2)
    of_down.test_hidden_fills_the_rounds(kernels, *case, True, 3, (7, 3), 0)


@dataclass(frozen=True)
class Mutation:
    run: Callable[[EmulatedKernels], None]
    file: str
    wrong: str | None  # None: the results are
    original: str
    mutated: str = ""


def of(run: Callable, file: str, wrong: str | None, *rows: tuple[str, ...]) -> dict[str, Mutation]:
    """Mistakes in one file, each (name, original, what stands there instead, if anything)."""
    return {f"{run.__name__}: {name}": Mutation(run, file, wrong, *row) for name, *row in rows}


RACE = "a race"
MUTATIONS = (
    of(
        few,
        "ffn/few_down.cu",
        "another block of the cluster",
        (
            "no barrier of the cluster",
            "        product.add_warps();\n        cluster_sync();",
            "        product.add_warps();",
        ),
    ),
    of(
        few,
        "ffn/few_down.cu",
        "may have ended",
        ("ends while others read", "    if (BLOCKS > 1) cluster_sync();  //", "    //"),
    ),
    of(
        few,
        "tile/few_product.cuh",
        RACE,
        ("no wait for a stage", "wait_for_copies<kStages - 1>();"),
    ),
    of(
        lists,
        "train/grad_lists.cu",
        "trap",
        ("16 bytes less", "(ranks + 16 * words);", "(ranks + 16 * words - 4);"),
    ),
    of(
        pairs_e4m3,
        "ffn/few_walk_numbers.cuh",
        None,
        ("the other pair's h", "g % 2 ? 0x3244 : 0x4432", "g % 2 ? 0x1044 : 0x4410"),
    ),
    of(
        unknown,
        "decode/refine.cu",
        "kernel in front",
        ("no wait for the step", "    wait_for_previous();\n"),
    ),
    of(
        unknown,
        "decode/refine.cu",
        None,
        ("NaN is left", "!(__uint_as_float(own) < known)", "__uint_as_float(own) >= known"),
    ),
    of(
        step,
        "decode/step_layers.cuh",
        "not made visible",
        ("no fence between blocks", "            fence_gpu();\n"),
    ),
    of(
        sums,
        "train/grad_sums.cu",
        RACE,
        (
            "no __syncwarp",
            "        wait_for_copies<0>();\n        __syncwarp();",
            "        wait_for_copies<0>();",
        ),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        RACE,
        (
            "no __syncthreads",
            "store_shared_word(sums + 4 * warp, upto);\n            __syncthreads();",
            "store_shared_word(sums + 4 * warp, upto);",
        ),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        "kernel in front",
        ("no wait for the kernel in front", "    wait_for_previous();\n"),
    ),
    of(
        expanded,
        "decode/expand_codes.cu",
        "assert",
        (
            "the lower half first",
            "24 - 8 * (i / 2) + 4 * (i % 2)",
            "28 - 8 * (i / 2) - 4 * (i % 2)",
        ),
        ("another row's place", "place_of(column, own)", "place_of(column, 0)"),
        ("another group's scale", "own * num_scales + column / group", "own * num_scales"),
        ("another neurons' scales", "scales + row / group *", "scales + 0 *"),
    ),
    of(
        expanded,
        "decode/expand_codes.cu",
        "no such memory",
        ("rows behind the last", "if (row < static_cast<unsigned>(num_rows))", "if (true)"),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        "no such memory",
        (
            "a token too far",
            "Numbers<Weight>::load(x + row + column)",
            "Numbers<Weight>::load(x + row + K + column)",
        ),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        "without a fence",
        ("no fence behind mbarriers' beginning", "barrier_init_fence();"),
    ),
)
# found by the same test as others of their kind, or slowly
MORE = (
    of(
        head,
        "decode/step_head.cuh",
        None,
        ("no error", "args.most[row] = logit + error;", "args.most[row] = logit;"),
    ),
    of(
        forward,
        "ffn/hidden.cu",
        None,
        ("the bias of another neuron", "(from.b_up + first_column + (", "(from.b_up + ("),
    ),
    of(
        forward,
        "ffn/up.cu",
        None,
        ("one half of the weights", "a8.w, weights.z, weights.w);", "a8.w, weights.z, weights.z);"),
    ),
    of(
        pairs_e4m3,
        "ffn/few_walk.cuh",
        None,
        ("no scale of up", "up *= scale;", "up *= 1.f;"),
        ("another column's scale", "of_columns(n)", "of_columns(own)"),
    ),
    of(
        pairs_e4m3,
        "ffn/few_walk_numbers.cuh",
        None,
        ("sums over the power before", "y_[i][j] *= change;", "y_[i][j] *= 1.f;"),
        ("x not taken back", "x.back * (is_odd ? both[3]", "(is_odd ? both[3]"),
    ),
    of(
        screened,
        "decode/step_layers.cuh",
        RACE,
        (
            "no wait for other warps' candidates",
            "        if (FORM != kDenseForm) sync_consumers();\n",
        ),
    ),
    of(
        screened,
        "decode/step_ffn.cuh",
        "assert",
        ("the map's first row for each", "sums + (kQuad + lane) * kWarps", "sums + kQuad * kWarps"),
    ),
    of(
        screened,
        "decode/step_products.cuh",
        "assert",
        (
            "the map of the first block",
            "share.first += first_shared()",
            "share.first = first_shared()",
        ),
    ),
    of(
        screened,
        "decode/step_screen.cuh",
        "assert",
        ("copies as they lie", "kWhole + 128.f * static_cast<float>(sum)", "kWhole"),
    ),
    of(
        step,
        "decode/step_layers.cuh",
        "wait forever",
        ("the last tag", "phase ? tag : (tag - 1) & 0xffff", "tag"),
    ),
    of(
        step,
        "decode/step_fired.cuh",
        "assert",
        ("no tag looked at", "if (!(wrong & 0xff)) return;", "return;"),
    ),
    of(
        step,
        "decode/step_products.cuh",
        "being read",
        ("no wait for the ring", "barrier_wait(empty(asked.to), asked.refill);"),
    ),
    of(
        step,
        "decode/step_products.cuh",
        "wait forever",
        ("no arrive", "if (lane == j && j < num) barrier_arrive(empty(slots[j]));", ";"),
    ),
    of(
        step,
        "decode/step_rows.cuh",
        RACE,
        (
            "no wait for what neurons are worth",
            "        sync_consumers();\n#pragma unroll 1\n        for (int first = 0; first",
            "#pragma unroll 1\n        for (int first = 0; first",
        ),
    ),
    of(
        step,
        "decode/step_rows.cuh",
        "assert",
        ("the other row's chunks", "2 * pair + high, num - 1", "2 * pair, num - 1"),
    ),
    of(
        head,
        "decode/step_head.cuh",
        None,
        ("another row's place", "(warp() ^ row % 2) * 64", "warp() * 64"),
        ("another row's scale", "args.head_scales + 2 * row", "args.head_scales + 2 * thread()"),
        ("rows that are not sure", "fmaxf(least, logit - error)", "fmaxf(least, logit + error)"),
    ),
    of(
        long_head,
        "decode/step_head.cuh",
        "wait forever",
        ("units are never left", "        leave_units(num);\n"),
    ),
    of(
        head,
        "decode/step_head.cuh",
        RACE,
        ("no wait for other warps' sums", "            sync_consumers();\n"),
    ),
    of(
        unknown,
        "decode/refine.cu",
        RACE,
        ("no wait for the list", "threadIdx.x;\n    __syncthreads();", "threadIdx.x;"),
    ),
    of(
        step_int4,
        "decode/step_codes_down.cuh",
        RACE,
        (
            "no wait for other warps' largest",
            "        sync_consumers();\n        most = 0;",
            "        most = 0;",
        ),
        (
            "no wait for what neurons are worth",
            "        sync_consumers();\n        return whole.back * kPerCode;",
            "        return whole.back * kPerCode;",
        ),
    ),
    of(
        step_int4,
        "decode/step_codes.cuh",
        "assert",
        ("another group's scale", "(8 * block + warp()) / (kGroup / 64)", "block"),
    ),
    of(
        step_int4,
        "decode/step_codes_down.cuh",
        "assert",
        ("another neurons' scales", "(group + t % 2) * kDownScaleBytes", "t % 2 * kDownScaleBytes"),
        ("units are never left", "if (is_through) end(i);", ""),
        ("the lower byte alone", "256 * upper + lower", "lower"),
        ("another row's place", "first_block((share.first + t) % 4)", "first_block(t)"),
    ),
    of(
        step_e4m3,
        "decode/step_layers.cuh",
        "assert",
        ("the neighbour's columns of x", "        clear_dealt();\n"),
    ),
    of(
        step_e4m3,
        "decode/step_fired.cuh",
        "assert",
        ("another column's scale", "kQuad * own.first + thread(), bits);", "thread(), bits);"),
    ),
    of(
        step_e4m3,
        "decode/step_products.cuh",
        ".",
        (
            "scales that the barrier does not count",
            "num_bytes + (scales ? kScaleBytes : 0)",
            "unit_bytes",
        ),
    ),
    of(
        step_e4m3,
        "decode/step_products.cuh",
        "assert",
        ("x not taken back", "        if constexpr (Kind::kInF16) sum *= x.back;\n"),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        RACE,
        ("the other parity", "barrier_wait(at.barrier, 0);", "barrier_wait(at.barrier, 1);"),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        "may not have begun",
        ("no wait for the cluster", "    cluster_wait();"),
    ),
    of(
        walk,
        "ffn/few_walk.cuh",
        "no such memory",
        ("a tail of one more", "first + i * threads < end,", "first + i * threads <= end,"),
    ),
)
ALL = dict(ChainMap(*MUTATIONS, *(MORE if EVERY_CASE else ())))
# test_emulated_head and test_emulated_grad run these as they are
RUNS = {mutation.run for mutation in ALL.values()} - {head, long_head, unknown, lists, sums}
if not EVERY_CASE:  # so does test_emulated_step
    RUNS -= {step, screened}


@pytest.mark.parametrize("run", sorted(RUNS, key=lambda run: run.__name__))
def test_without_a_mistake(run):
    run(EmulatedKernels())


def test_each_mistake_can_be_made():
    """Those, too, that are made with TWELL_TEST_EVERY_CASE alone."""
    sources = kernel_files()
    for name, mutation in ChainMap(*MUTATIONS, *MORE).items():
        assert sources[mutation.file].decode().count(mutation.original) == 1, name


@pytest.mark.parametrize("name", sorted(ALL)[:: 1 if EVERY_CASE else 2])
def test_a_mistake(name):
    mutation, sources = ALL[name], kernel_files()
    text = sources[mutation.file].decode()
    mutated = text.replace(mutation.original, mutation.mutated).encode()
    with pytest.raises(AssertionError, match=mutation.wrong):
        mutation.run(EmulatedKernels(sources | {mutation.file: mutated}))
