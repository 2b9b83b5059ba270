"""Training over the kernels: gradients against float64, and what autograd does around them."""

import pytest
import torch
from on_gpu import HOPPER
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twellctl.bundle import twell_ffn
from twellctl.bundle.twell_ffn import train_ffn
from twellctl.bundle.twell_model import twell_class
from twellctl.bundle.twell_synthetic import make_rows, make_weights, quantile
from twellctl.bundle.twell_train import plain_train_ffn
from twellctl.convert import convert
from twellctl.export import export

pytestmark = [*HOPPER, pytest.mark.usefixtures("no_fallback")]
NAMES = ("y", "x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
PENALTY = 1e-2


def problem(
    M: int, K: int, N: int, density: float, *, bias: bool = False, spread: str = "even"
) -> list[Tensor | None]:
    """x and the parameters, bf16.

    By `spread` all rows fire alike ("even"), one in a hundred six times as much as the mean
    ("lognormal"), or one in twenty at one half ("heavy").
    """
    generator = torch.Generator("cuda").manual_seed(M + N)
    made = make_weights(K, N, density, bias=bias, dtype=torch.bfloat16, generator=generator)
    x = make_rows(M, K, dtype=torch.bfloat16, generator=generator)
    if spread == "lognormal":
        exponent = torch.randn(M, generator=generator, device=x.device, dtype=torch.float64)
        densities = (density * (exponent - 0.5).exp()).clamp(1e-9, 0.999)
        x[:, 0] = (torch.special.ndtri(densities) / quantile(density)).to(x.dtype)
    if spread == "heavy":
        x[torch.randperm(M, generator=generator, device=x.device)[: round(M / 20)], 0] = 0
    w_gate, w_up, w_down, _, _, b_down = made.split  # the kernels take no biases of gate and up
    made = w_gate, w_up, w_down, None, None, b_down
    return [x, *(None if t is None else t.clone() for t in made)]


def whole_numbers(M: int, K: int, N: int, density: float) -> list[Tensor | None]:
    """The same of whole numbers, with a gate that fires at about this density."""
    generator = torch.Generator("cuda").manual_seed(M + N)

    def numbers(*shape: int) -> Tensor:
        found = torch.randint(-1, 2, shape, generator=generator, device="cuda")
        return found.to(torch.bfloat16)

    x, w_gate = torch.zeros(M, K, device="cuda"), torch.zeros(N, K, device="cuda")
    x[torch.arange(M), torch.arange(M) % K] = 1
    fires = torch.rand(N, K, generator=generator, device="cuda") < density
    w_gate[fires] = 2
    return [x.bfloat16(), w_gate.bfloat16(), numbers(N, K), numbers(K, N), None, None, None]


def run(op, tensors: list[Tensor | None], grad_y: Tensor, dtype, **options) -> dict[str, Tensor]:
    """y and all gradients in `dtype`, how many fired."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    y, fired = op(*leaves, **options)
    y.backward(grad_y.to(y.dtype))
    grads = (None if leaf is None else leaf.grad for leaf in leaves)
    found = dict(zip(NAMES, (y.detach(), *grads), strict=True))
    return found | {"fired": fired}


def plain(*tensors, penalty: Tensor | None = None):
    return plain_train_ffn(*tensors, penalty, counted=True)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


def over_kernels(sources: str, **options):
    def op(*tensors, **more):
        return train_ffn(*tensors, sources=sources, route="twell", **options, **more)

    return op


CASES = [
    (1, 64, 264, 0.3, {}),
    (70, 128, 520, 0.05, {}),
    (257, 192, 1032, 0.1, {"bias": True}),
    (2048, 256, 5632, 0.005, {}),
    (3000, 2048, 5632, 0.01, {"bias": True}),
    (2500, 512, 5632, 0.02, {"spread": "lognormal"}),
    (2500, 512, 5632, 0.01, {"spread": "heavy"}),
    (700, 256, 2816, 1.0, {"bias": True}),
    (300, 256, 14336, 0.02, {}),
    (9000, 128, 6144, 0.01, {}),
]


@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize(("M", "K", "N", "density", "how"), CASES, ids=str)
def test_errors_are_those_of_dense_bf16(sources, M, K, N, density, how, slots):
    tensors = problem(M, K, N, density, **how)
    grad_y = torch.randn(M, K, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    grad_y, penalty = grad_y.bfloat16(), torch.tensor(PENALTY, device="cuda")
    wanted = run(plain, tensors, grad_y, torch.float64, penalty=penalty)
    dense = run(plain, tensors, grad_y, torch.bfloat16, penalty=penalty)
    op = over_kernels(sources, slots=slots)
    found, again = (run(op, tensors, grad_y, torch.bfloat16, penalty=penalty) for _ in range(2))
    for name in NAMES:
        if wanted[name] is None:
            continue
        assert torch.equal(found[name], again[name]), f"{name} differs from run to run"
        limit = 1.3 * relative(dense[name], wanted[name]) + 1e-6
        assert relative(found[name], wanted[name]) <= limit, name
    assert found["fired"].item() == pytest.approx(dense["fired"].item(), rel=1e-3, abs=3)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_whole_numbers_are_exact(sources, density):
    M, K, N = 600, 128, 520
    tensors = whole_numbers(M, K, N, density)
    grad_y = torch.randint(-1, 2, (M, K), device="cuda").bfloat16()
    penalty = torch.tensor(2.0, device="cuda")
    wanted = run(plain, tensors, grad_y, torch.float64, penalty=penalty)
    found = run(over_kernels(sources), tensors, grad_y, torch.bfloat16, penalty=penalty)
    for name in NAMES[:5]:
        assert torch.equal(found[name], wanted[name].bfloat16()), name
    assert found["fired"].item() == wanted["fired"].item()


@pytest.mark.parametrize("fired", [175, 176, 177])
def test_rows_of_as_many_pairs_as_fit_and_one_over(sources, fired):
    M, K, N = 64, 64, 5632  # training_cap(5632) is 176
    tensors = whole_numbers(M, K, N, 0.0)
    tensors[1][:fired] = 1
    grad_y = torch.randint(-1, 2, (M, K), device="cuda").bfloat16()
    wanted = run(plain, tensors, grad_y, torch.float64)
    found = run(over_kernels(sources, slots=256), tensors, grad_y, torch.bfloat16)
    for name in NAMES[:5]:
        assert torch.equal(found[name], wanted[name].bfloat16()), name


@pytest.mark.parametrize("fired", [1408, 1409])
def test_eight_rows_share_their_room(sources, fired):
    M, K, N = 64, 64, 5632  # 8 * training_cap(5632) is 1408
    tensors = whole_numbers(M, K, N, 0.0)
    tensors[0].zero_()
    tensors[0][5::8, 0] = 1
    tensors[1].zero_()
    tensors[1][: 4 * fired : 4, 0] = 1
    grad_y = torch.randint(-1, 2, (M, K), device="cuda").bfloat16()
    wanted = run(plain, tensors, grad_y, torch.float64)
    found = run(over_kernels(sources, slots=256), tensors, grad_y, torch.bfloat16)
    for name in NAMES[:5]:
        assert torch.equal(found[name], wanted[name].bfloat16()), name


def test_what_is_not_finite_reaches_the_gradients(sources):
    tensors = problem(200, 64, 520, 0.05)
    tensors[0][3, 5] = float("nan")
    grad_y = torch.ones(200, 64, device="cuda").bfloat16()
    found = run(over_kernels(sources), tensors, grad_y, torch.bfloat16)
    assert found["y"][3].isnan().all()
    assert found["x"][3].isnan().any()
    assert found["w_gate"].isnan().any()
    assert found["y"][4].isfinite().all()


def test_weights_in_fp32_under_autocast_get_gradients_in_fp32(sources):
    tensors = problem(3000, 256, 2816, 0.01, bias=True)
    grad_y = torch.randn(3000, 256, device="cuda")
    wanted = run(plain, tensors, grad_y.bfloat16(), torch.float64)
    leaves = [None if t is None else t.float().requires_grad_() for t in tensors]
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = over_kernels(sources)(*leaves)
    assert y.dtype == torch.bfloat16
    y.backward(grad_y.bfloat16())
    for name, leaf in zip(NAMES[1:], leaves, strict=True):
        if leaf is None:
            continue
        assert leaf.grad.dtype == torch.float32
        assert relative(leaf.grad, wanted[name]) < 6e-3, name


def test_only_what_is_wanted_gets_a_gradient(sources):
    tensors = problem(300, 64, 520, 0.05)
    grad_y = torch.randn(300, 64, device="cuda").bfloat16()
    whole = run(over_kernels(sources), tensors, grad_y, torch.bfloat16)
    for index, name in enumerate(NAMES[1:5]):
        leaves = [None if t is None else t.detach().requires_grad_(False) for t in tensors]
        leaves[index] = leaves[index].clone().requires_grad_()
        y, _ = over_kernels(sources)(*leaves)
        y.backward(grad_y)
        assert torch.equal(leaves[index].grad, whole[name])


def test_checkpointing_and_accumulation(sources):
    tensors = problem(300, 64, 520, 0.05)
    grad_y = torch.randn(300, 64, device="cuda").bfloat16()
    whole = run(over_kernels(sources), tensors, grad_y, torch.bfloat16)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    for _ in range(2):
        y, _ = checkpoint(over_kernels(sources), *leaves, use_reentrant=False)
        y.backward(grad_y)
    for name, leaf in zip(NAMES[1:5], leaves, strict=False):
        assert torch.equal(leaf.grad, 2 * whole[name]), name


def test_compiles_without_a_graph_break(sources):
    tensors = problem(4096, 64, 520, 0.05)
    grad_y = torch.randn(4096, 64, device="cuda").bfloat16()
    penalty = torch.tensor(PENALTY, device="cuda")
    whole = run(over_kernels(sources), tensors, grad_y, torch.bfloat16, penalty=penalty)
    op = torch.compile(over_kernels(sources), fullgraph=True)
    found = run(op, tensors, grad_y, torch.bfloat16, penalty=penalty)
    for name in NAMES[:5]:
        assert torch.equal(found[name], whole[name]), name


@pytest.mark.parametrize("compiled", [False, True])
def test_an_export_trains(make_model, tmp_path, compiled):
    """Its gradients are as near to those of float32 as dense bf16's."""
    sizes = {"hidden_size": 128, "intermediate_size": 520}
    convert(make_model("llama", **sizes), tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out")
    ids = ((torch.arange(340).view(2, 170) * 37) % 512).to("cuda")

    def gradients(route: str, dtype: torch.dtype, *, compiled: bool = False) -> dict[str, Tensor]:
        model = twell_class("LlamaForCausalLM").from_pretrained(
            tmp_path / "out", dtype=dtype, twell_route=route
        )
        model.to("cuda").requires_grad_(True)
        call = torch.compile(model, fullgraph=True) if compiled else model
        call(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    found = gradients("twell", torch.bfloat16, compiled=compiled)
    dense = gradients("dense", torch.bfloat16)
    for name, exact in gradients("dense", torch.float32).items():
        error, wanted = (relative(some[name], exact.double()) for some in (found, dense))
        assert error <= 1.3 * wanted, name


def test_the_operators_are_sound(sources):
    tensors = problem(300, 64, 520, 0.05)
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    penalty = torch.tensor(PENALTY, device="cuda")
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    args = (*leaves[:4], leaves[6], penalty, 64, sources)
    torch.library.opcheck(twell_ffn._train_ffn_op, args, test_utils=checks)
