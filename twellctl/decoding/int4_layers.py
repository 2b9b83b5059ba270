"""A model's layers as codes of 4 bits for the kernel of a whole step, beside weights or alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from twellctl.bundle.twell_model import gate_and_up
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import step_group
from twellctl.bundle.twell_weights import FFN, Weight
from twellctl.decoding.coded_linear import (
    CodedDown,
    CodedLinear,
    coded_down,
    coded_rows,
    group_size,
    linears_of,
    weight_of_rows,
)
from twellctl.decoding.whole_step import DecoderLayer, StepSizes, why_no_whole_step


def takes_int4(modules: Iterable[nn.Module], sizes: StepSizes, limits: Limits) -> bool:
    """Whether the decoder layers `modules` keep codes of groups, and are of sizes (`sizes` of
    int4), that the kernel of a whole step takes."""
    if why_no_whole_step(sizes, limits) is not None:
        return False
    groups = map(group_size, linears_of(modules))
    return all(size is not None and size % step_group(sizes.K) == 0 for size in groups)


def int4_layers(
    modules: Sequence[nn.Module], layers: Sequence[DecoderLayer], sizes: StepSizes, limits: Limits
) -> list[DecoderLayer] | None:
    """`layers` with weights as the kernel of a whole step takes them in int4, of the decoder layers
    `modules`; None where it does not (`takes_int4`), or weights were changed since."""
    if not takes_int4(modules, sizes, limits):
        return None
    made = []
    for module, layer in zip(modules, layers, strict=True):
        if (coded := coded_layer(module, step_group(sizes.K))) is None:
            return None
        made.append(_with_biases(layer, coded))
    return made


@dataclass(frozen=True)
class CodedLayer:
    """The linear layers of a decoder layer as codes: to q, k and v, one or three; to o; to gate and
    up, one or two; and down."""

    qkv: list[CodedLinear]
    out: CodedLinear
    gate_up: list[CodedLinear]
    down: CodedDown

    @property
    def weights(self) -> tuple[Weight, Weight, FFN]:
        """To q, k and v; to o; of the FFN; with the biases."""
        gate, up = weight_of_rows(self.gate_up).chunk(2)
        bias = None if self.down.bias is None else self.down.bias.detach()
        down = Weight("int4", self.down.codes, self.down.scales, bias)
        ffn = FFN(gate, up, down, self.down.codes)
        return weight_of_rows(self.qkv), weight_of_rows([self.out]), ffn

    def put_into(self, module: nn.Module) -> None:
        """In the place of the linear layers of the decoder layer `module`."""
        own, mlp = module.self_attn, module.mlp
        for part, names, linears in (
            (own, names_of_qkv(own), self.qkv),
            (own, ["o_proj"], [self.out]),
            (mlp, names_of_gate_up(mlp), self.gate_up),
            (mlp, ["down_proj"], [self.down]),
        ):
            for name, linear in zip(names, linears, strict=True):
                setattr(part, name, linear)


def coded_layer(module: nn.Module, group: int) -> CodedLayer | None:
    """Of a decoder layer; None where a linear layer keeps no codes, or was changed since."""
    own, mlp = module.self_attn, module.mlp
    qkv = coded_rows([getattr(own, name) for name in names_of_qkv(own)], group)
    out = coded_rows([own.o_proj], group)
    gate_up, down = coded_rows(gate_and_up(mlp), group), coded_down(mlp.down_proj, group)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    return CodedLayer(qkv, out[0], gate_up, down)


def names_of_qkv(own: nn.Module) -> list[str]:
    """Of the linear layers to q, k and v: three, or one to all."""
    return ["qkv_proj"] if hasattr(own, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]


def names_of_gate_up(mlp: nn.Module) -> list[str]:
    """Of the linear layers to gate and up: two, or one to both."""
    return ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]


def _with_biases(layer: DecoderLayer, coded: CodedLayer) -> DecoderLayer:
    """`layer` over codes, with the biases that it has."""
    qkv, out, ffn = coded.weights
    both = zip(ffn.weights, layer.ffn.weights, strict=True)
    gate, up, down = (replace(laid, bias=given.bias) for laid, given in both)
    return replace(
        layer,
        qkv=replace(qkv, bias=layer.qkv.bias),
        out=replace(out, bias=layer.out.bias),
        ffn=FFN(gate, up, down, ffn.turned),
    )
