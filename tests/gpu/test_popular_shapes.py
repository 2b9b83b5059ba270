"""The sizes of popular models on a GPU: two layers of each with random weights, through the
operator and through the engine, as near to float64 as plain bf16 is."""

import copy
import random
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from attached import attached
from ffns import ffn_of
from popular_shapes import SHAPES, Shape
from torch import Tensor, nn
from transformers import PreTrainedModel

from twellctl.bundle import twell_ways
from twellctl.bundle.twell_ffn import sparse_ffn
from twellctl.bundle.twell_launch import device_limits
from twellctl.bundle.twell_model import by_rows_of_neurons, gated_ffns
from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.here.own_kernels import own_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels", "no_fallback")]
DEVICE = "cuda"
VOCABULARY = 4096
DENSITIES = (0.005, 0.02, 0.08)
# in the first columns of all inputs; the gates' weights of them make few neurons fire
CONSTANTS = torch.linspace(1.5, 3, 32).bfloat16()
TOKENS = (1, 2, 3, 4, 8, 16, 17, 32, 33, 64, 65, 256, 2048)
LEAST_ROWS = 16  # over which errors are taken: one rounding among few neurons is a matter of luck
OPERATOR = 1.05  # an error may be so many times that of dense bf16
ROWS, STEPS, PROMPT = (1, 2, 4, 16, 64), 2, 70
ENGINE = 1.5  # so many times that of transformers in bf16, which rounds elsewhere


class Popular:
    """A model of a shape, of whose neurons some share fires; `seed` makes the same again."""

    def __init__(self, shape: Shape):
        self.shape, self.seed = shape, random.SystemRandom().getrandbits(32)
        self.density = random.Random(self.seed).choice(DENSITIES)
        torch.manual_seed(self.seed)
        self.model = shape.model(VOCABULARY, DEVICE)
        fill(self.model, self.density)

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, and what transformers makes of them, in bf16 and in float64.

        To be asked for before a decoder is made, which puts the model over TwELL.
        """
        ids = torch.randint(1, VOCABULARY, (max(ROWS), PROMPT + STEPS), device=DEVICE)
        judge = copy.deepcopy(self.model).double()
        return ids, logits_of(self.model, ids), logits_of(judge, ids)

    def __str__(self) -> str:
        return f"{self.shape.name} at {self.density:.1%}, seed {self.seed}"


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def popular(request):
    made = Popular(request.param)
    print(made)
    yield made
    made.model = None
    torch.cuda.empty_cache()


@torch.no_grad()
def fill(model: PreTrainedModel, density: float) -> None:
    """Random weights. A layer adds less than there was, so that constants stay what they are."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        else:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    put_constants(model.get_input_embeddings().weight.normal_())
    constants, K = CONSTANTS.float().to(DEVICE), model.config.hidden_size
    shift = torch.special.ndtri(torch.tensor(1 - density)).item()
    for layer, ffn in zip(model.model.layers, gated_ffns(model), strict=True):
        layer.self_attn.o_proj.weight.mul_(0.25)
        layer.post_attention_layernorm.weight.fill_(1)
        w_gate, _, w_down = weights_of(ffn)
        w_gate.normal_(0, (K - len(constants)) ** -0.5)
        w_gate[:, : len(constants)] = -shift * constants / constants.square().sum()
        w_down.mul_(0.5 * density**-0.5)


def put_constants(rows: Tensor) -> Tensor:
    rows[:, : len(CONSTANTS)] = CONSTANTS.to(rows.device)
    return rows


def weights_of(ffn: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down."""
    if hasattr(ffn, "gate_up_proj"):
        return (*ffn.gate_up_proj.weight.chunk(2), ffn.down_proj.weight)
    return ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight


def error(found: Tensor, wanted: Tensor) -> float:
    """Of all numbers together, relative."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()


# ---- the operator ----


def plain(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The equation in the dtype of x."""
    gate = F.relu(F.linear(x, w_gate.to(x.dtype)))
    return F.linear(gate * F.linear(x, w_up.to(x.dtype)), w_down.to(x.dtype))


@torch.no_grad()
def test_the_operator(popular):
    """Every way that a plan may take, for all numbers of tokens."""
    limits = device_limits(0)
    for number, ffn in enumerate(gated_ffns(popular.model)):
        w_gate, w_up, w_down = weights_of(ffn)
        w_down = by_rows_of_neurons(w_down)
        weights = ffn_of(w_gate, w_up, w_down)
        rows = put_constants(torch.randn(max(TOKENS), popular.shape.K, device=DEVICE).bfloat16())
        wanted = plain(rows.double(), w_gate, w_up, w_down)
        fired = (F.linear(rows, w_gate) > 0).double().mean().item()
        assert 0.7 < fired / popular.density < 1.4, f"{fired} fire of {popular}"
        for M in TOKENS:
            x = rows[: M * -(-LEAST_ROWS // M)]
            dense = [plain(piece, w_gate, w_up, w_down) for piece in x.split(M)]
            usual = error(torch.cat(dense), wanted[: len(x)])
            problem = twell_ways.Problem(M, popular.shape.N, popular.shape.K, limits)
            plans = [f"1+ {way.name}" for way in twell_ways.ways_of("auto", problem)]
            for plan in ("", *plans):
                how = {"sources": own_kernels(), "density": fired, "plan": plan}
                pieces = [sparse_ffn(piece, weights, **how) for piece in x.split(M)]
                times = error(torch.cat(pieces), wanted[: len(x)]) / usual
                what = f"{plan or 'by rule'}, {M} tokens, layer {number} of {popular}"
                assert times <= OPERATOR, f"{times:.3f} times the error of bf16: {what}"


# ---- the engine ----


@pytest.mark.parametrize("profiled", [False, True], ids=["not profiled", "profiled"])
@torch.inference_mode()
def test_the_engine(popular, profiled, monkeypatch):
    """Steps of several numbers of rows behind a prompt, against transformers in float64."""
    monkeypatch.setenv("TWELL_ROUTE", "twell")
    model, shape = popular.model, popular.shape
    assert KernelDecoder.why_not(model) is None
    ids, usual, wanted = popular.logits
    densities = {"densities": [popular.density] * 2} if profiled else {}
    model.config.twell = {"tile": 256, "slots": [64, 64], **densities}
    for ffn in gated_ffns(model):  # which may be over TwELL already
        ffn.twell_density = popular.density if profiled else None
    decoder, tables = prefilled(model, ids[:, :PROMPT])
    for B in (rows for rows in ROWS if rows <= decoder.max_rows):
        for step in range(STEPS):
            tokens = ids[:B, PROMPT + step].int()[:, None]
            positions = torch.full((B, 1), PROMPT + step, dtype=torch.int32, device=DEVICE)
            logits, counts = decoder.run(tokens, positions, tables[:B])
            times = error(logits[:, 0], wanted[:B, step]) / error(usual[:, step], wanted[:, step])
            what = f"step {step} of {B} rows of {popular}"
            assert times <= ENGINE, f"{times:.2f} times the error of bf16: {what}"
            share = counts.double().mean().item() / shape.N
            assert 0.2 < share / popular.density < 5, f"{share} fire in {what}"


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[rows, STEPS, vocabulary]` behind the last tokens."""
    return model(ids, use_cache=False, logits_to_keep=STEPS).logits.double()


def prefilled(model: PreTrainedModel, prompts: Tensor) -> tuple[KernelDecoder, Tensor]:
    """A decoder that has read `prompts`, and the tables of their rows."""
    rows, length = prompts.shape
    pages = -(-(length + STEPS) // PAGE)
    decoder = attached(KernelDecoder(model), rows * pages + 1)
    tables = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=DEVICE).view(rows, pages)
    positions = torch.arange(length, dtype=torch.int32, device=DEVICE)
    for some in torch.arange(rows, device=DEVICE).split(8):
        places = positions.expand(len(some), -1).contiguous()
        decoder.run(prompts[some].int(), places, tables[some], last=0)
    return decoder, tables
