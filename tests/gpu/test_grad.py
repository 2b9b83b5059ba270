"""The kernels of the backward pass by themselves, over lists made by NumPy, in float64."""

import numpy as np
import pytest
import torch
from list_builder import Lists, build_lists, from_bf16, to_bf16
from list_reference import Shape

pytestmark = pytest.mark.gpu
DEVICE = "cuda"  # the emulator has another (test_emulated_grad.py)
# kind of gate, shape, K, tiles of tokens in a panel: ragged, one token, several panels, empty, full
CASES = [
    ("usual", Shape(70, 264, 64, 64, 32, 264), 128, 1),
    ("usual", Shape(70, 264, 64, 64, 32, 264), 128, 3),
    ("usual", Shape(1, 5632, 64, 64, 8, 5632), 64, 1),
    ("skewed", Shape(333, 2056, 256, 88, 128, 2056), 64, 2),
    ("skewed", Shape(333, 2056, 256, 88, 128, 520), 64, 3),
    ("skewed", Shape(333, 2056, 256, 24, 128, 2056, most=2056), 64, 2),
    ("none", Shape(9, 256, 64, 64, 8, 256), 128, 2),
    ("some rows", Shape(257, 768, 256, 768, 120, 384), 64, 1),
    ("one class", Shape(120, 2048, 64, 96, 64, 2048), 64, 2),
    ("all", Shape(9, 72, 256, 72, 8, 72), 64, 1),
    ("all", Shape(300, 264, 256, 264, 104, 264), 64, 2),
    ("all", Shape(19, 1032, 256, 1032, 16, 344), 64, 2),
]


def on_device(array: np.ndarray) -> torch.Tensor:
    """The same bits, signed."""
    return torch.from_numpy(array.view(array.dtype.str.replace("u", "i"))).to(DEVICE)


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Small integers as bf16: all sums of their products are exact."""
    return to_bf16(rng.integers(-4, 5, shape))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Problem:
    """Lists, and of each pair gate, up and the two gradients, by its place."""

    def __init__(self, kind: str, shape: Shape, seed: int):
        self.rng, self.shape = np.random.default_rng(seed), shape
        self.lists: Lists = build_lists(shape, kind, seed)
        places, num = shape.num_tiles * shape.tile_tokens * shape.cap, len(self.lists.place)
        self.gate, self.up = integers(self.rng, num), integers(self.rng, num)
        self.grad_gate, self.grad_up = integers(self.rng, num), integers(self.rng, num)
        self.kept = self.rng.integers(0, 2**32, places, np.uint32)
        self.grads = self.rng.integers(0, 2**32, places, np.uint32)
        self.kept[self.lists.place] = self.gate | self.up.astype(np.uint32) << 16
        self.grads[self.lists.place] = self.grad_gate | self.grad_up.astype(np.uint32) << 16

    def dense(self, values: np.ndarray) -> np.ndarray:
        """float64 [M, N] of a value a pair."""
        whole = np.zeros((self.shape.M, self.shape.N))
        whole[self.lists.token, self.lists.column] = values
        return whole

    @property
    def hidden(self) -> np.ndarray:
        return from_bf16(self.gate) * from_bf16(self.up)

    def made_lists(self, fours: int, panels: int, rounds: int) -> dict[str, torch.Tensor]:
        """Room for lists, of garbage."""
        shapes = {
            "heads": (fours * panels, 2),
            "codes": (rounds, 8),
            "pairs": (rounds, 16),
            "hidden": (rounds, 8),
            "masks": (ceil_div(rounds, 8), 16),
        }
        return {
            name: on_device(self.rng.integers(0, 2**32, size, np.uint32))
            for name, size in shapes.items()
        }


def map_bytes(panel_rows: int) -> int:
    return 96 * ceil_div(panel_rows, 128) * 2 + 6 * 2048


def list_neurons(kernels, problem: Problem, panel_tiles: int) -> dict[str, torch.Tensor]:
    shape, lists = problem.shape, problem.lists
    fours, panels = ceil_div(shape.N, 4), ceil_div(shape.num_tiles, panel_tiles)
    made = problem.made_lists(fours, panels, 8 * fours * panels + len(lists.place) // 16)
    num_listed = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.launch(
        "list_neurons",
        (ceil_div(shape.N, 8), panels),
        128,
        {
            "pair_start": on_device(lists.pair_start),
            "pairs": on_device(lists.pairs),
            "kept": on_device(problem.kept),
            "grads": on_device(problem.grads),
            "N": shape.N,
            "num_tiles": shape.num_tiles,
            "tile_tokens": shape.tile_tokens,
            "cap": shape.cap,
            "panel_tiles": panel_tiles,
            "num_listed": num_listed,
            "heads": made["heads"],
            "codes": made["codes"],
            "values": made["pairs"],
            "hidden": made["hidden"],
            "masks": made["masks"],
        },
        map_bytes(panel_tiles * shape.tile_tokens),
    )
    return made


def list_tokens(kernels, problem: Problem, split: int) -> dict[str, torch.Tensor]:
    shape, lists = problem.shape, problem.lists
    fours, panels = 2 * shape.num_groups, shape.num_panels * split
    made = problem.made_lists(fours, panels, 8 * fours * panels + len(lists.place) // 16)
    num_listed = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.launch(
        "list_tokens",
        (shape.num_groups, panels),
        128,
        {
            "num_rounds": on_device(lists.num_rounds),
            "rounds": on_device(lists.rounds),
            "links": on_device(lists.links),
            "kept": on_device(problem.kept),
            "grads": on_device(problem.grads),
            "M": shape.M,
            "panel_rows": shape.panel_rows // split,
            "split": split,
            "group_rounds": shape.group_rounds,
            "num_listed": num_listed,
            "heads": made["heads"],
            "codes": made["codes"],
            "values": made["pairs"],
            "masks": made["masks"],
        },
        map_bytes(shape.panel_rows // split),
    )
    return made


def buffers(rows: int, K: int, as_bf16: bool, keep: bool) -> tuple[torch.Tensor, ...]:
    """(sums, out): NaN everywhere; None where there is none."""
    nan = float("nan")
    sums = torch.full((rows, K), nan, device=DEVICE) if keep or not as_bf16 else None
    out = torch.full((rows, K), nan, dtype=torch.bfloat16, device=DEVICE) if as_bf16 else None
    return sums, out


def run_sums(kernels, shape: Shape, splits: int, made, num_panels, panel_rows, name, **own) -> None:
    """One of the sums over the lists `made`; `own`: what it takes beside what all take."""
    K = next(iter(own.values())).shape[1]  # of what is summed up
    lists = {of: made[of] for of in ("heads", "codes", "masks")}
    sizes = {"M": shape.M, "N": shape.N, "K": K, "panel_rows": panel_rows, "num_panels": num_panels}
    row_bytes = 64 if name == "grad_x" else 32
    args = lists | sizes | own
    kernels.launch(name, (K // 16, splits), 512, args, panel_rows * row_bytes + 49152)


def run_gate_up(kernels, shape, splits, made, panels, panel_rows, x, heavy_count, gate, up) -> None:
    """grad_gate_up; `gate` and `up`: sums and out of each."""
    run_sums(
        *(kernels, shape, splits, made, panels, panel_rows),
        "grad_gate_up",
        x=x,
        pairs=made["pairs"],
        heavy_count=heavy_count,
        sums_gate=gate[0],
        sums_up=up[0],
        out_gate=gate[1],
        out_up=up[1],
    )


def check(found: torch.Tensor, wanted: np.ndarray, as_bf16: bool):
    wanted = from_bf16(to_bf16(wanted)) if as_bf16 else wanted
    np.testing.assert_array_equal(found.float().cpu().numpy(), wanted)


@pytest.mark.parametrize(("kind", "shape", "K", "panel_tiles"), CASES, ids=str)
@pytest.mark.parametrize(("splits", "as_bf16"), [(1, True), (3, False)])
def test_gradients_of_the_weights(kernels, kind, shape, K, panel_tiles, splits, as_bf16):
    problem = Problem(kind, shape, 3)
    x, grad_y = integers(problem.rng, shape.M, K), integers(problem.rng, shape.M, K)
    panels, panel_rows = ceil_div(shape.num_tiles, panel_tiles), panel_tiles * shape.tile_tokens
    made = list_neurons(kernels, problem, panel_tiles)
    gate, up, down = (buffers(shape.N, K, as_bf16, panels > 1) for _ in range(3))
    given = kernels, shape, splits, made, panels, panel_rows
    run_gate_up(*given, on_device(x), None, gate, up)
    own = {"hidden": made["hidden"], "heavy_count": None, "sums": down[0], "out": down[1]}
    run_sums(*given, "grad_down", grad_y=on_device(grad_y), **own)

    at = 1 if as_bf16 else 0
    x, grad_y = from_bf16(x).astype(float), from_bf16(grad_y).astype(float)
    check(gate[at], problem.dense(from_bf16(problem.grad_gate)).T @ x, as_bf16)
    check(up[at], problem.dense(from_bf16(problem.grad_up)).T @ x, as_bf16)
    check(down[at], problem.dense(problem.hidden).T @ grad_y, as_bf16)


@pytest.mark.parametrize("heavy", [0, 5])
def test_sums_are_added_to_if_there_are_heavy_rows(kernels, heavy):
    shape, K = Shape(70, 264, 64, 64, 32, 264), 64
    problem = Problem("usual", shape, 4)
    made = list_neurons(kernels, problem, 1)
    heavy_count = torch.full((1,), heavy, dtype=torch.int32, device=DEVICE)
    x = integers(problem.rng, shape.M, K)
    sums = [torch.full((shape.N, K), 3.0, device=DEVICE) for _ in range(2)]
    results = [(of_one, None) for of_one in sums]
    run_gate_up(kernels, shape, 1, made, 3, 32, on_device(x), heavy_count, *results)
    wanted = problem.dense(from_bf16(problem.grad_up)).T @ from_bf16(x).astype(float)
    check(sums[1], wanted + (3 if heavy else 0), False)


X_CASES = [
    ("usual", Shape(70, 272, 64, 64, 32, 272), 128, 2, 24),
    ("usual", Shape(1, 5632, 64, 64, 8, 5632), 64, 2, 4),
    ("skewed", Shape(333, 2064, 256, 88, 128, 2064), 64, 1, 333),
    ("skewed", Shape(333, 2056, 256, 88, 128, 528), 64, 2, 128),
    ("none", Shape(9, 256, 64, 64, 8, 256), 128, 4, 8),
    ("some rows", Shape(257, 768, 256, 768, 120, 384), 64, 2, 100),
    ("one class", Shape(120, 2048, 64, 96, 64, 2048), 64, 1, 120),
    ("all", Shape(9, 80, 256, 80, 8, 80), 64, 2, 12),
    ("all", Shape(300, 264, 256, 264, 104, 264), 64, 1, 300),
    ("all", Shape(19, 1032, 256, 1032, 16, 352), 64, 2, 8),
]


@pytest.mark.parametrize(("kind", "shape", "K", "split", "chunk"), X_CASES, ids=str)
@pytest.mark.parametrize("shares", [1, 2])
def test_gradient_of_x(kernels, kind, shape, K, split, chunk, shares):
    problem = Problem(kind, shape, 5)
    weights = [integers(problem.rng, shape.N, K) for _ in range(2)]
    made = list_tokens(kernels, problem, split)
    panels = shape.num_panels * split
    sums, _ = buffers(chunk, K, False, False) if panels > 1 else (None, None)
    _, out = buffers(shape.M, K, True, False)
    run_sums(
        *(kernels, shape, shares, made, panels, shape.panel_rows // split),
        "grad_x",
        w_gate=on_device(weights[0]),
        w_up=on_device(weights[1]),
        pairs=made["pairs"],
        chunk=chunk,
        sums=sums,
        out=out,
    )
    pairs = problem.grad_gate, problem.grad_up
    wanted = sum(
        problem.dense(from_bf16(value)) @ from_bf16(w).astype(float)
        for value, w in zip(pairs, weights, strict=True)
    )
    check(out, wanted, True)


def test_lists_are_as_short_as_can_be_and_the_same_from_run_to_run(kernels):
    problem = Problem("skewed", Shape(333, 2056, 256, 88, 128, 2056), 6)
    made, again = (list_neurons(kernels, problem, 2) for _ in range(2))
    heads, others = (m["heads"].cpu().numpy() for m in (made, again))
    dense = problem.dense(np.ones(len(problem.lists.place)))
    panels = [dense[first : first + 256] for first in (0, 256)]
    num = np.stack([p.reshape(len(p), -1, 4).sum((0, 2)) for p in panels], 1).reshape(-1)
    np.testing.assert_array_equal(heads[:, 1], np.ceil(num / 16))
    assert (heads[:, 0] % 8 == 0).all()
    for q, (first, count) in enumerate(heads):
        second = others[q, 0]
        for name in ("codes", "pairs", "hidden"):
            one, two = made[name][first : first + count], again[name][second : second + count]
            assert torch.equal(one, two), f"{name} of list {q}"


@pytest.mark.parametrize("penalty", [None, 0.5])
@pytest.mark.parametrize("ranges", [1, 3])
def test_gradients_of_the_pairs(kernels, ranges, penalty):
    shape = Shape(70, 264, 64, 64, 32, 264)
    problem = Problem("usual", shape, 7)
    lists = problem.lists
    places = shape.num_tiles * shape.tile_tokens * shape.cap
    partial = (problem.rng.integers(-8, 9, (ranges, places))).astype(np.float32)
    grads = torch.zeros(places, dtype=torch.int32, device=DEVICE)
    weight = None if penalty is None else torch.full((1,), penalty, device=DEVICE)
    kernels.launch(
        "grad_pairs",
        (shape.num_tiles, 2),
        256,
        {
            "partial": on_device(partial),
            "partial_stride": places,
            "num_ranges": ranges,
            "pair_start": on_device(lists.pair_start),
            "kept": on_device(problem.kept),
            "penalty_at": weight,
            "N": shape.N,
            "tile_tokens": shape.tile_tokens,
            "cap": shape.cap,
            "grads": grads,
        },
    )
    found = grads.cpu().numpy().view(np.uint32)[lists.place]
    grad_h = partial[:, lists.place].sum(0) + (penalty or 0) * np.sign(problem.hidden)
    np.testing.assert_array_equal(found & 0xFFFF, to_bf16(grad_h * from_bf16(problem.up)))
    np.testing.assert_array_equal(found >> 16, to_bf16(grad_h * from_bf16(problem.gate)))
