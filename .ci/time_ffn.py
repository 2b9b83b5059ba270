"""Times one gated FFN, over TwELL and densely by PyTorch, in bf16 and in FP8. For developers.

    python .ci/time_ffn.py --tokens 131072 --tokens 256 --density 0.01
    python .ci/time_ffn.py --fp8 --hidden-size 4096 --intermediate-size 14336 --tokens 16
    python .ci/time_ffn.py --train --tokens 16384 --density 0.005

Weights and inputs are those of twellctl/bundle/twell_synthetic.py. All candidates take turns in one
run, over copies of the weights that outgrow the L2 cache; below 8192 tokens CUDA graphs are
replayed, but of --train. Errors are against float64, of the gradients the largest.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bench import contest
from twellctl.bench.device import bench_device, device_name, why_no_fp8
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL, Point
from twellctl.bundle.twell_cache import reasons_said
from twellctl.bundle.twell_config import ROUTES, TILE
from twellctl.bundle.twell_dense import gated_ffn, rounded_weight
from twellctl.bundle.twell_ffn import sparse_ffn, train_ffn
from twellctl.bundle.twell_measured import Sizes, plan_of_ffn
from twellctl.bundle.twell_model import by_rows_of_neurons
from twellctl.bundle.twell_synthetic import FfnWeights, make_rows, make_weights
from twellctl.bundle.twell_train import plain_train_ffn
from twellctl.bundle.twell_weights import FFN
from twellctl.firing.counts import LayerCount
from twellctl.here.own_kernels import own_kernels

BF16, JUDGED_ROWS = torch.bfloat16, 512
PENALTY = 0.125  # beside gradients of h of about 1: what goes wrong with it is seen


def main() -> None:
    given = _arguments()
    device = bench_device(given.device)
    sizes = [
        (2 * given.intermediate_size, given.hidden_size),
        (given.hidden_size, given.intermediate_size),
    ]
    no_fp8 = why_no_fp8(device, sizes)
    print(f"{device_name(device)}, {given.hidden_size} x {given.intermediate_size}")
    if no_fp8:
        print(f"no dense FP8: {no_fp8}")
    course = contest.Course(device, given.rounds, lambda text: None, lambda done, total: None)
    for tokens in given.tokens:
        for density in given.density:
            with contest.fresh_compiler(), reasons_said() as reasons:
                _measure(given, course, tokens, density, with_fp8=no_fp8 is None)
            print(*reasons, sep="\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=5632)
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--density", type=float, action="append")
    parser.add_argument("--route", choices=ROUTES, action="append")
    parser.add_argument("--slots", type=int, help="of a tile; else as a profile has them")
    parser.add_argument("--heavy", type=float, default=0.0, help="share of rows at 50 %%")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="TwELL over e4m3 weights")
    parser.add_argument("--train", action="store_true", help="forward and backward, with a penalty")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    given = parser.parse_args()
    given.tokens, given.density = given.tokens or [131072, 256], given.density or [0.01]
    given.route = given.route or ["auto"]
    return given


def _measure(given, course: contest.Course, tokens: int, density: float, *, with_fp8: bool) -> None:
    generator = torch.Generator(course.device).manual_seed(given.seed)
    made = {"dtype": BF16, "generator": generator}
    weights = make_weights(
        given.hidden_size, given.intermediate_size, density, bias=given.bias, **made
    )
    x = make_rows(tokens, given.hidden_size, **made)
    heavy = torch.randperm(tokens, generator=generator, device=x.device)
    x[heavy[: round(tokens * given.heavy)], 0] = 0  # half of the neurons fire
    fired = _firing(x, weights)
    slots, copies = given.slots or fired["slots"], _rotated(weights, course.device)
    if given.train:
        contenders, expected = _trained(x, copies, fired["density"], generator)
        judged: Callable = _largest_error
    else:
        contenders = list(_forward(given, x, copies, slots, fired["density"], with_fp8))
        rows = torch.arange(min(tokens, JUDGED_ROWS), device=course.device)
        wide = (None if w is None else w.double() for w in weights.split)
        expected = split_ffn(x[rows].double(), *wide)
        judged = lambda y, expected: {"error": contest.relative_error(y[rows], expected)}  # noqa: E731
    outcome = contest.hold(
        course,
        contenders,
        partial(judged, expected=expected),
        what=f"{tokens} tokens, density {density:g}",
        tokens=tokens,
        num_inputs=len(copies),
        graphs=not given.train,
    )
    _print(Point(tokens, fired, "float64", outcome))


@torch.no_grad()
def _firing(x: Tensor, weights: FfnWeights) -> dict[str, float]:
    """Of the gate in the dtype of `x`."""
    w_gate, _, _, b_gate, _, _ = weights.split
    count = LayerCount(len(w_gate), TILE, x.device)
    for rows in x.split(8192):
        gate = F.linear(rows, w_gate, b_gate)
        count.add(gate, F.relu(gate))
    layer = count.summary()
    return {"density": layer.density, "slots": layer.slots}


def _rotated(weights: FfnWeights, device: torch.device) -> list[FfnWeights]:
    """`weights` and as many copies as keep a gate from being in the cache when its turn comes."""
    if device.type != "cuda":
        return [weights]
    torch.cuda.empty_cache()
    cache, gate = torch.cuda.get_device_properties(device).L2_cache_size, weights.down.nbytes
    affordable = torch.cuda.mem_get_info(device)[0] // 8 // (3 * gate)
    number = max(1, min(1 - (-3 * cache // gate), affordable, 64))
    copies = (
        FfnWeights(*(None if t is None else t.clone() for t in vars(weights).values()))
        for _ in range(number - 1)
    )
    return [weights, *copies]


def _print(point: Point) -> None:
    about = f"density {point.about['density']:.2%}, {point.about['slots']} slots"
    print(f"\n{point.tokens} tokens, {about}, {point.outcome.timed_by}")
    for c in point.candidates:
        over_fp8 = point.over_fp8(c)
        over = f"{point.over_dense(c):6.2f}x" + (f" {over_fp8:6.2f}x FP8" if over_fp8 else "")
        print(f"  {c.name:28} {1000 * c.seconds:10.4f} ms {over}   error {c.errors['error']:.1e}")
    for name, reason in point.outcome.skipped.items():
        print(f"  {name}: left out, {reason}")


# ---- forward ----


def split_ffn(x, w_gate, w_up, w_down, b_gate, b_up, b_down) -> Tensor:
    """`[M, K]` to `[M, K]`: three products."""
    hidden = F.relu(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)
    return F.linear(hidden, w_down, b_down)


def fused_ffn(x, w_gate_up, w_down, b_gate_up, b_down) -> Tensor:
    """The same with gate and up in one product."""
    gate, up = F.linear(x, w_gate_up, b_gate_up).chunk(2, -1)
    return F.linear(F.relu(gate) * up, w_down, b_down)


def _as_loaded(copies: list[FfnWeights]) -> list[FfnWeights]:
    """As they lie in a model that was loaded; gate and up are shared."""
    return [replace(weights, down=by_rows_of_neurons(weights.down)) for weights in copies]


def _forward(
    given, x: Tensor, copies: list[FfnWeights], slots: int, density: float, with_fp8: bool
) -> Iterator[contest.Contender]:
    modes = contest.dense_modes(x.device)
    for mode in modes:
        split, fused = contest.compiled(split_ffn, mode), contest.compiled(fused_ffn, mode)
        yield contest.Contender(
            f"dense {mode}", DENSE, lambda number, run=split: run(x, *copies[number].split)
        )
        yield contest.Contender(
            f"dense {mode}, fused",
            DENSE,
            lambda number, run=fused: run(x, *vars(copies[number]).values()),
        )
    in_fp8 = [_in_fp8(weights) for weights in copies] if with_fp8 or given.fp8 else []
    if with_fp8:
        densely = contest.compiled(gated_ffn, modes[-1])
        yield contest.Contender(
            f"dense FP8 {modes[-1]}", DENSE_FP8, lambda number: densely(x, in_fp8[number])
        )
    loaded = in_fp8 if given.fp8 else [weights.ffn for weights in _as_loaded(copies)]
    for route in given.route:
        how = {"slots": slots, "density": density, "sources": own_kernels()}
        run = partial(sparse_ffn, **how, route=route, plan=_plan(loaded[0], slots, density, route))
        yield contest.Contender(
            f"twell FP8 {route}" if given.fp8 else f"twell {route}",
            TWELL,
            lambda number, run=run: run(x, loaded[number]),
        )


def _plan(ffn: FFN, slots: int, density: float, route: str) -> str:
    """The plan of a route, measured as where a model is opened; "": without kernels here."""
    device = ffn.gate.values.device
    if device.type != "cuda" or route == "dense":
        return ""
    biases = ffn.gate.bias is not None, ffn.down.bias is not None
    sizes = Sizes(ffn.K, ffn.N, biases, ffn.kind)
    return str(plan_of_ffn(sizes, density, slots, device, own_kernels(), route))


def _in_fp8(weights: FfnWeights) -> FFN:
    """Rounded row by row, with the values of down by rows of neurons, too."""
    gate_up = rounded_weight("e4m3", weights.gate_up, weights.gate_up_bias)
    down = rounded_weight("e4m3", weights.down, weights.down_bias)
    return FFN(*gate_up.chunk(2), down, down.values.t().contiguous())


# ---- forward and backward ----


def _trained(
    x: Tensor, copies: list[FfnWeights], density: float, generator: torch.Generator
) -> tuple[list[contest.Contender], dict[str, Tensor]]:
    """Contenders, and y and the gradients in float64; the penalty is added to those of h."""
    grad_y = torch.randn(x.shape, generator=generator, device=x.device, dtype=BF16)
    penalty = torch.full((1,), PENALTY, device=x.device)

    def dense(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        """y, and how many fired, as `train_ffn` gives them."""
        return plain_train_ffn(*tensors, None, None, None, penalty, True)

    def twell(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        how = {"density": density, "sources": own_kernels(), "route": "twell"}
        return train_ffn(*tensors, penalty=penalty, **how)

    def both(run: Callable, weights: FfnWeights, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights.split[:3])]
        with torch.enable_grad():
            y, _ = run(*leaves)
            gradients = torch.autograd.grad(y, leaves, grad_y.to(dtype))
        return dict(zip(("y", "x", "gate", "up", "down"), (y.detach(), *gradients), strict=True))

    runs = {mode: contest.compiled(dense, mode) for mode in contest.dense_modes(x.device)}
    contenders = [
        contest.Contender(f"dense {mode}", DENSE, lambda number, run=run: both(run, copies[number]))
        for mode, run in runs.items()
    ]
    loaded = _as_loaded(copies)
    contenders.append(contest.Contender("twell", TWELL, lambda number: both(twell, loaded[number])))
    return contenders, both(dense, copies[0], torch.float64)


def _largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {"error": max(contest.relative_error(found[name], expected[name]) for name in expected)}


if __name__ == "__main__":
    main()
