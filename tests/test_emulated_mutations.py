"""The emulator finds mistakes: kernels with one each fail, as they are they pass.

With TWELL_TEST_EVERY_CASE in the environment also those that are like another one, or take long.
"""

from collections.abc import Callable
from dataclasses import dataclass

import emulated_step
import emulated_walk
import pytest
import test_heavy_walk
import torch
from compiled import EVERY_CASE
from emulated_few import FewKernels, of_e4m3
from emulated_kernels import EmulatedKernels, needs_emulator
from test_emulated_e4m3 import of_lists, of_many, walked
from test_emulated_grad import of_grad

from twellctl.bundle.twell_few_walk import plan_few_walk
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import E4M3_END
from twellctl.here.resources import kernel_files

pytestmark = needs_emulator


def walk(kernels: EmulatedKernels) -> None:
    """Two tokens, one of which has several batches of pairs."""
    problem = emulated_walk.random_problem(2, 576, 264, 0.0, 1)
    limits = Limits(132, 232448, (9, 0))
    plan = plan_few_walk(2, 264, 576, limits, lambda *asked: 2)
    y, _ = emulated_walk.emulate(kernels, plan, problem, 1)
    assert torch.equal(y, problem.y)


def pairs_e4m3(kernels: EmulatedKernels) -> None:
    """The same over e4m3 weights: x differs within a quad, h grows from batch to batch."""
    problem = emulated_walk.random_problem(2, 640, 264, 0.0, 1, E4M3_END)
    problem.x.view(2, 10, 2, 32)[:, :, 1] *= 4
    problem.gate[:, 200:] *= 256
    limits = Limits(132, 232448, (9, 0))
    plan = plan_few_walk(2, 264, 640, limits, lambda *asked: 0, E4M3_END)  # two blocks
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
    model = emulated_step.Model(1536, 64, 24, 24, 392, 1, 3, gate_mean=-0.5, **how)
    wanted = emulated_step.judge(model)
    done = emulated_step.emulate(kernels, model, 96, form, seeds=(1,))
    assert (done.logits - wanted.logits).abs().max() < 0.05
    assert (done.counts[0] - wanted.counts[0]).abs().max() <= 2


def step_e4m3(kernels: EmulatedKernels) -> None:
    step(kernels, fp8=True)


def screened(kernels: EmulatedKernels) -> None:
    """With a map; a quarter of the neurons that do not fire are candidates."""
    step(kernels, "screened", mapped=40, missed=-0.4)


def e4m3(kernels: EmulatedKernels) -> None:
    """x in e4m3, and each kernel of many tokens: rows in two panels."""
    of_lists.test_rows_are_rounded_as_the_judge_does(kernels, 70, 384, True)
    small = of_lists.CASES[1]
    of_lists.test_up_gives_partial_dot_products(kernels, *small, 1, 1, 2)
    for how in ((3, (7, 3), 0), (2, None, 64)):
        of_lists.test_hidden_fills_the_rounds(kernels, *small, True, *how)
    of_lists.test_down_gives_y(kernels, *small, 1, True)


def hidden_rows(kernels: EmulatedKernels) -> None:
    """h in e4m3, for torch's product: some rows, and rows of more columns than registers hold."""
    for M, N in ((20, 264), (2, 16392)):
        of_lists.test_hidden_rows_are_rounded_as_the_judge_does(kernels, M, N)
        of_lists.test_hidden_rows_of_bare_sums(kernels, M, N, True)


def walk_e4m3(kernels: EmulatedKernels) -> None:
    """Some hundred tokens over e4m3 weights, of pairs in several batches of a way."""
    torch.manual_seed(3)
    problem = of_many.random_problem(3, 2048, 520, mean=-1.4, bias=True, decades=1.0)
    walked(kernels, problem)


def heavy_rows(kernels: EmulatedKernels, end: str = "") -> None:
    """Few heavy rows behind either gate; no tile, some and all are multiplied anew."""
    by_clusters = test_heavy_walk.OnCpu(kernels.sources)
    problem = test_heavy_walk.random_problem(3, 128, 4360, end, seed=1)
    for packed, slots in ((True, 256), (True, 115), (True, 2), (False, 1)):
        y = test_heavy_walk.walked(by_clusters, problem, [2, 0], packed, slots)
        test_heavy_walk.check(problem, y, [2, 0])


def heavy_rows_e4m3(kernels: EmulatedKernels) -> None:
    heavy_rows(kernels, E4M3_END)


@dataclass(frozen=True)
class Mutation:
    run: Callable[[EmulatedKernels], None]
    file: str
    original: str
    mutated: str = ""
    wrong: str | None = "a race"  # None: the results are


FEW, FEW_DOWN = "tile/few_product.cuh", "ffn/few_down.cu"
NUMBERS = "few_walk_numbers.cuh"
WALK, LISTS, SUMS = "ffn/few_walk.cuh", "train/grad_lists.cu", "train/grad_sums.cu"
STEP, PRODUCTS, FFN, ROWS, SCREEN = (
    f"decode/step{part}.cuh" for part in ("", "_products", "_ffn", "_rows", "_screen")
)
MUTATIONS = {
    "no fence between blocks": Mutation(
        step, STEP, "            fence_gpu();\n", wrong="not made visible"
    ),
    "no fence behind mbarriers' beginning": Mutation(
        walk, WALK, "barrier_init_fence();", wrong="without a fence"
    ),
    "waits swapped": Mutation(
        sums,
        SUMS,
        "    wait_for_copies<0>();\n    __syncthreads();\n",
        "    __syncthreads();\n    wait_for_copies<0>();\n",
    ),
    "16 bytes less": Mutation(
        lists, LISTS, "(ranks + 16 * words);", "(ranks + 16 * words - 4);", "trap"
    ),
    "a tail of one more": Mutation(
        walk, WALK, "first + i * threads < end,", "first + i * threads <= end,", "no such memory"
    ),
    "no tag looked at": Mutation(step, FFN, "if (!(wrong & 0xff)) return;", "return;", "assert"),
    "the other parity": Mutation(
        walk, WALK, "barrier_wait(at.barrier, 0);", "barrier_wait(at.barrier, 1);"
    ),
    "no __syncthreads": Mutation(
        walk,
        WALK,
        "store_shared_word(sums + 4 * warp, upto);\n            __syncthreads();",
        "store_shared_word(sums + 4 * warp, upto);",
    ),
    "no __syncwarp": Mutation(
        sums,
        SUMS,
        "        wait_for_copies<0>();\n        __syncwarp();",
        "        wait_for_copies<0>();",
    ),
    "no wait for the kernel in front": Mutation(
        walk, WALK, "    wait_for_previous();\n", wrong="kernel in front"
    ),
    "a token too far": Mutation(
        walk,
        WALK,
        "Numbers::load(x + row + column)",
        "Numbers::load(x + row + K + column)",
        "no such memory",
    ),
    "no wait for the ring": Mutation(
        step, PRODUCTS, "barrier_wait(empty(to), refill);", wrong="being read"
    ),
    "scales that the barrier does not count": Mutation(
        step_e4m3, PRODUCTS, "unit_bytes + (scales ? kScaleBytes : 0)", "unit_bytes", "."
    ),
    "no wait for what neurons are worth": Mutation(
        step,
        ROWS,
        "        sync_consumers();\n#pragma unroll 1\n        for (int first = 0; first",
        "#pragma unroll 1\n        for (int first = 0; first",
    ),
    "no wait for other warps' candidates": Mutation(
        screened, STEP, "                if (FORM != kDenseForm) sync_consumers();\n"
    ),
    "copies as they lie": Mutation(
        screened, SCREEN, "kWhole + 8.f * static_cast<float>(sum)", "kWhole", "assert"
    ),
    "the neighbour's columns of x": Mutation(
        step_e4m3, STEP, "        clear_dealt();\n", wrong="assert"
    ),
    "no barrier of the cluster": Mutation(
        few,
        FEW_DOWN,
        "        product.add_warps();\n        cluster_sync();",
        "        product.add_warps();",
        "another block of the cluster",
    ),
    "ends while others read": Mutation(
        few, FEW_DOWN, "    if (BLOCKS > 1) cluster_sync();  //", "    //", "may have ended"
    ),
    "no wait for a stage": Mutation(few, FEW, "wait_for_copies<kStages - 1>();"),
}
MUTATIONS |= {
    f"e4m3: {name}": Mutation(e4m3, f"ffn/{file}", original, mutated, None)
    for name, file, original, mutated in (
        ("rows of zeros", "quantise.cuh", "scale < kSmallestScale ?", "scale < 0.f ?"),
        ("columns side by side", "down.cuh", "permute_bytes(octet1, 0, 0x3120)", "octet1"),
        (
            "powers of the group before",
            "down.cuh",
            "group += stride;\n        load_powers(t);",
            "group += stride;",
        ),
        (
            "sums of the other plane",
            "down.cuh",
            "kept[32 * plane] = make",
            "kept[32 - 32 * plane] = make",
        ),
        (
            "another token's power",
            "hidden.cuh",
            "hidden(gate, up, code >> COLUMN_BITS)",
            "hidden(gate, up, 0)",
        ),
        (
            "no scale of staged parts",
            "hidden.cuh",
            "if (4 * to + i < num) sum[i] = scales",
            "if (i < 3) sum[i] = scales",
        ),
        ("one half of the weights", "up.cuh", "a.w, a8.w, b.z, b.w);", "a.w, a8.w, b.z, b.z);"),
    )
}
MUTATIONS |= {
    f"h in e4m3: {name}": Mutation(hidden_rows, f"ffn/{file}", original, mutated, None)
    for name, file, original, mutated in (
        ("what does not fire", "quantise_hidden.cu", "gates & fires_pair(gates)", "gates"),
        (
            "-0 as 0",
            "quantise.cuh",
            "(quotient, scale, -x), -one_over",
            "(-quotient, scale, x), one_over",
        ),
        (
            "columns behind the registers",
            "quantise_hidden.cu",
            "load_constant(up + at)",
            "load_constant(up)",
        ),
        ("fired in one half", "quantise_hidden.cu", "& 0x10001", "& 1"),
        ("scales of the first columns", "quantise_hidden.cu", "scales + at, bias", "scales, bias"),
        ("no bias", "quantise_hidden.cu", "if (bias) add(", "if (false) add("),
    )
}
MUTATIONS |= {
    f"walk over e4m3: {name}": Mutation(walk_e4m3, "ffn/walk.cuh", original, mutated, wrong)
    for name, original, mutated, wrong in (
        ("no scale of the token", "up * tokens[blockIdx.x].x *", "up *", None),
        ("another column's scale", "(columns + first)", "(columns)", None),
        (
            "one half of a row",
            "e4m3_as_f16(bytes.z, bytes.w)",
            "e4m3_as_f16(bytes.x, bytes.y)",
            None,
        ),
        (
            "no wait for up",
            "        __syncthreads();\n        find_hidden();",
            "find_hidden();",
            "a race",
        ),
        (
            "one way of all",
            "for (int i = 0; i < ways; ++i) {",
            "for (int i = 0; i < 1; ++i) {",
            None,
        ),
    )
}
MUTATIONS |= {
    f"pairs over e4m3: {name}": Mutation(pairs_e4m3, f"ffn/{file}", original, mutated, None)
    for name, file, original, mutated in (
        ("no scale of up", "few_walk.cuh", "up *= scale;", "up *= 1.f;"),
        ("the batch before's scale", "few_walk.cuh", "load_scale(base + step)", "load_scale(base)"),
        ("another column's scale", "few_walk.cuh", "column_scales(n)", "column_scales(own)"),
        ("sums over the power before", NUMBERS, "y_[i][j] *= change;", "y_[i][j] *= 1.f;"),
        ("the other pair's h", NUMBERS, "g % 2 ? 0x3244 : 0x4432", "g % 2 ? 0x1044 : 0x4410"),
        ("columns exchanged", NUMBERS, "(next, a.z, a.w, b.z, b.w,", "(next, a.w, a.z, b.w, b.z,"),
        ("x not taken back", NUMBERS, "x.back * (is_odd ? both[3]", "(is_odd ? both[3]"),
        ("a power for two lanes", NUMBERS, "most = max(most, __shfl_xor_sync(~0u, most, 2));", ""),
        ("half of x", NUMBERS, "load_written(from + 8)", "load_written(from)"),
    )
}
MUTATIONS |= {
    f"few heavy rows: {name}": Mutation(run, "ffn/heavy_walk.cuh", original, mutated, wrong)
    for name, run, original, mutated, wrong in (
        ("written while read", heavy_rows, "            __syncwarp();\n", "", "being read"),
        ("the neighbour's tile", heavy_rows, "(cell + SIZE * i) *", "(cell + i) *", None),
        ("too many slots taken as whole", heavy_rows, "count <= num_slots;", "count >= 0;", None),
        ("without the rest", heavy_rows, "min(TILE, sizes.N - first)", "TILE", "no such memory"),
        ("no wait for the list", heavy_rows, "        wait_for_previous();\n", "", "in front"),
        (
            "no wait for the cluster",
            heavy_rows,
            "        cluster_wait();  // all blocks are there, and their barriers\n",
            "",
            "may not have begun",
        ),
        ("no scale of the token", heavy_rows_e4m3, "x.back *= tokens[token].x;", "", None),
        ("no scale of the gate", heavy_rows_e4m3, "* gate_neurons[neuron] *", "*", None),
    )
}
MORE = {
    "another column's scale": Mutation(
        step_e4m3, FFN, "kQuad * own.first + thread(), bits);", "thread(), bits);", "assert"
    ),
    "no arrive": Mutation(
        step,
        PRODUCTS,
        "if (lane == j && j < num) barrier_arrive(empty(slots[j]));",
        ";",
        "wait forever",
    ),
    "no wait for copies": Mutation(
        sums, SUMS, "        wait_for_copies<0>();\n        __syncwarp();", "        __syncwarp();"
    ),
    "x not taken back": Mutation(
        step_e4m3, PRODUCTS, "        if constexpr (BYTES == 1) sum *= x.back;\n", wrong="assert"
    ),
    "the next row's scale": Mutation(
        step_e4m3, PRODUCTS, "4 * row_of<1>(lane / 4)", "4 * row_of<1>(lane / 4 + 1)", "assert"
    ),
    "the first neuron's scale of up": Mutation(
        step_e4m3,
        FFN,
        "at<float>(kUpScales)[neuron - kQuad * share.first]",
        "at<float>(kUpScales)[0]",
        "assert",
    ),
    "the map of the first block": Mutation(
        screened,
        PRODUCTS,
        "share.first += first_shared()",
        "share.first = first_shared()",
        "assert",
    ),
    "the map's first row for each": Mutation(
        screened, FFN, "sums + (kQuad + lane) * kWarps", "sums + kQuad * kWarps", "assert"
    ),
    "parts of a chunk swapped": Mutation(
        step_e4m3, PRODUCTS, "(from, i) + 16 * part", "(from, i) + 16 * (part ^ 1)", "assert"
    ),
    "a row too far": Mutation(
        walk, WALK, "min(base + i, num - 1)", "min(base + i, num)", "no such memory"
    ),
    "the other row's chunks": Mutation(
        step, ROWS, "2 * pair + high, num - 1", "2 * pair, num - 1", "assert"
    ),
    "a word too few": Mutation(
        step,
        FFN,
        "c < 8; c += 4)\n                store",
        "c < 4; c += 4)\n                store",
        "wait forever",
    ),
    "the last tag": Mutation(step, STEP, "phase ? tag : (tag - 1) & 0xffff", "tag", "wait forever"),
    "no wait for the cluster": Mutation(
        walk, WALK, "    cluster_wait();", wrong="may not have begun"
    ),
}
# found by the same test as others of their kind
LIKE_OTHERS = {
    "copies as they lie",
    "no tag looked at",
    "no wait for what neurons are worth",
    "scales that the barrier does not count",
    "e4m3: another token's power",
    "walk over e4m3: one way of all",
    "pairs over e4m3: sums over the power before",
    "few heavy rows: no wait for the cluster",
    "a tail of one more",
    "the neighbour's columns of x",
    "the other parity",
    "waits swapped",
    "e4m3: no scale of staged parts",
    "e4m3: powers of the group before",
    "h in e4m3: columns behind the registers",
    "h in e4m3: scales of the first columns",
    "walk over e4m3: another column's scale",
    "pairs over e4m3: a power for two lanes",
    "pairs over e4m3: another column's scale",
    "pairs over e4m3: no scale of up",
    "few heavy rows: no scale of the gate",
    "few heavy rows: no wait for the list",
    "few heavy rows: the neighbour's tile",
    "e4m3: columns side by side",
    "e4m3: sums of the other plane",
    "e4m3: one half of the weights",
    "h in e4m3: -0 as 0",
    "h in e4m3: no bias",
    "h in e4m3: fired in one half",
    "walk over e4m3: one half of a row",
    "walk over e4m3: no scale of the token",
    "pairs over e4m3: half of x",
    "pairs over e4m3: columns exchanged",
    "pairs over e4m3: x not taken back",
    "pairs over e4m3: the batch before's scale",
    "few heavy rows: no scale of the token",
    "few heavy rows: without the rest",
    "few heavy rows: too many slots taken as whole",
}
assert MUTATIONS.keys() > LIKE_OTHERS
ALL = MUTATIONS | MORE if EVERY_CASE else MUTATIONS.keys() - LIKE_OTHERS
RUNS = {(MUTATIONS | MORE)[name].run for name in ALL}
if not EVERY_CASE:  # test_emulated_step runs these as they are
    RUNS -= {step, screened}


@pytest.mark.parametrize("run", sorted(RUNS, key=lambda run: run.__name__))
def test_without_a_mistake(run):
    run(EmulatedKernels())


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_mistake(name):
    mutation, sources = (MUTATIONS | MORE)[name], kernel_files()
    text = sources[mutation.file].decode()
    assert text.count(mutation.original) == 1
    mutated = text.replace(mutation.original, mutation.mutated).encode()
    with pytest.raises(AssertionError, match=mutation.wrong):
        mutation.run(EmulatedKernels(sources | {mutation.file: mutated}))
