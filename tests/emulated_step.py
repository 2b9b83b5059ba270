"""`step` (kernels/decode/step.cuh) on a CPU, by emulated_kernels.py, and a judge."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from emulated_kernels import EmulatedKernels
from torch import Tensor

from twellctl.bundle.twell_e4m3 import round_weight
from twellctl.bundle.twell_int4 import expand
from twellctl.bundle.twell_spec import step_entry, step_group
from twellctl.decoding.rough_head import Estimate, RoughHead
from twellctl.decoding.screened import screen_copy
from twellctl.decoding.step_int4 import by_quads, down_by_neurons

PAGE, EPS = 64, 1e-5


@dataclass
class Model:
    """Random layers, and a cache that is full of numbers; all bf16.

    The layers' weights are rounded to `kind`. `weights` are what the judge takes, and
    `given` what a kernel does.
    """

    K: int
    D: int
    H: int
    Hkv: int
    N: int
    layers: int
    position: int
    biases: bool = False
    head_norms: bool = False
    window: int = 0
    gate_mean: float = 0.0  # of its bias; 0: has a bias if the rest has
    seed: int = 0
    vocabulary: int = 512
    token: int = 7
    kind: str = "bf16"
    is_silu: bool = False  # the dense form alone
    ffn_size: float = 1.0  # of its inputs; its results are as large as ever
    mapped: int = 0  # of the last neurons, which share a gate
    missed: float = 0.0  # screened: what a gate must be above to be seen; -inf: all are
    weights: list[dict[str, Tensor | None]] = field(init=False)
    given: list[dict[str, Tensor | None]] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
            empty = torch.empty(shape, dtype=torch.bfloat16)
            return empty.normal_(mean, std, generator=generator)

        K, D, N = self.K, self.D, self.N
        Q, std = (self.H + 2 * self.Hkv) * D, K**-0.5
        pages = self.position // PAGE + 2
        self.table = torch.randperm(pages - 1, generator=generator).int() + 1
        self.embeddings, self.head = normal(16, K), normal(self.vocabulary, K, std=std)
        self.last_norm = normal(K, mean=1, std=0.1)
        angles = torch.randn(self.position + 1, D // 2, generator=generator).repeat(1, 2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.weights = []
        has_gate_bias = self.biases or self.gate_mean != 0
        for _ in range(self.layers):
            layer = {
                "input_norm": normal(K, mean=1, std=0.1),
                "qkv": normal(Q, K, std=std),
                "qkv_bias": normal(Q, std=0.1) if self.biases else None,
                "out": normal(K, K, std=std),
                "out_bias": normal(K, std=0.1) if self.biases else None,
                "ffn_norm": normal(K, mean=1, std=0.1) * self.ffn_size,
                "gate": normal(N, K, std=std),
                "up": normal(N, K, std=std),
                "down": normal(N, K, std=0.1) / self.ffn_size**2,
                "gate_bias": normal(N, std=0.1, mean=self.gate_mean) if has_gate_bias else None,
                "up_bias": normal(N, std=0.1) if self.biases else None,
                "down_bias": normal(K, std=0.1) if self.biases else None,
                "keys": normal(pages, self.Hkv, PAGE, D),
                "values": normal(pages, self.Hkv, PAGE, D),
                "q_norm": normal(D, mean=1, std=0.1) if self.head_norms else None,
                "k_norm": normal(D, mean=1, std=0.1) if self.head_norms else None,
            }
            if self.mapped:
                own = N - self.mapped
                layer["gate"][own:] = layer["gate"][own].clone()
                if has_gate_bias:
                    layer["gate_bias"][own:] = 9  # it fires
            self.weights.append(layer)
        rounded = {"bf16": dict, "e4m3": self._in_e4m3, "int4": self._in_int4}[self.kind]
        self.given = [rounded(layer) for layer in self.weights]

    def _in_int4(self, layer: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The layer in int4, the scales of down behind the rest; in `layer` as it is expanded."""
        given, group = dict(layer), step_group(self.K)
        for name in ("qkv", "out", "gate", "up", "down"):
            is_down = name == "down"
            weight = layer[name].t().float() if is_down else layer[name].float()
            groups = F.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
            scales = (groups.abs().amax(-1) / 8).clamp(min=1e-30).bfloat16()
            codes = (groups / scales[..., None].float()).round().clamp(-8, 7).to(torch.int8)
            wide = expand(codes.flatten(1), scales)[:, : weight.shape[1]]
            codes = codes.flatten(1)[:, : weight.shape[1]]
            layer[name] = wide.t() if is_down else wide
            if is_down:
                given[name], given["down_scales"] = down_by_neurons(codes, scales, group)
            else:
                given[name] = by_quads(codes, scales, group)
        return given

    def _in_e4m3(self, layer: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The layer in e4m3, its scales behind the rest; in `layer` what the numbers stand for."""
        given, scales = dict(layer), {}
        for name in ("qkv", "out", "gate", "up", "down"):
            by_rows = layer[name].t() if name == "down" else layer[name]
            values, scale = round_weight(by_rows)
            wide = values.float() * scale  # exact: both have few bits
            scales[f"{name}_scale"] = scale.flatten().contiguous()
            turned = name == "down"
            layer[name] = wide.t() if turned else wide
            given[name] = (values.t() if turned else values).contiguous()
        return given | scales

    def layer_table(self) -> Tensor:
        """The kernel's table of layers: pointers, screen, window, and of e4m3 the scales."""
        rows = []
        for layer in self.given:
            pointers = [0 if t is None else t.data_ptr() for t in layer.values()]
            places = len(pointers) - {"bf16": 0, "e4m3": 5, "int4": 1}[self.kind]
            screen = [0, 0]
            if self.kind == "bf16":
                screen = [t.data_ptr() for t in self.screens[len(rows)]]
            both = (self.N - self.mapped) << 32 | self.window
            row = [*pointers[:places], *screen, both, *pointers[places:]]
            rows.append([*row, *[0] * (len(row) % 2)])
        return torch.tensor(rows, dtype=torch.int64)

    @cached_property
    def screens(self) -> list[tuple[Tensor, Tensor]]:
        """Of each layer the copy of its gate, and limits."""
        own, made = self.N - self.mapped, []
        blocks = -(-own // 16)
        for layer in self.weights:
            limits = torch.full((16 * blocks,), -torch.inf)
            limits[:own] = self.missed
            if layer["gate_bias"] is not None:
                limits[:own] -= layer["gate_bias"][:own].float()
            limits[self.N :] = torch.inf
            made.append((screen_copy(layer["gate"][: 16 * blocks]), limits))
        return made

    @cached_property
    def rough(self) -> RoughHead | None:
        """The head that a step over int4 reads."""
        return RoughHead.of(self.head) if self.kind == "int4" else None

    def memory(self) -> Iterator[Tensor]:
        """What that table points to."""
        yield from (t for layer in self.given for t in layer.values() if t is not None)
        if self.kind == "bf16":
            yield from (t for screen in self.screens for t in screen)


@dataclass(frozen=True)
class Done:
    """What steps gave, one after the other; layers' new keys and values `[Hkv, D]`; the normalised
    state; and of kernels what the last step says of logits."""

    logits: Tensor
    counts: Tensor
    new: list[tuple[Tensor, Tensor]]
    state: Tensor
    estimate: Estimate | None = None


SMEM_BYTES = 227 << 10


def emulate(
    kernels: EmulatedKernels, model: Model, blocks: int, form: str, seeds: tuple[int, ...]
) -> Done:
    """A step after the other of the same token, by `blocks` blocks."""
    K, D = model.K, model.D
    words = torch.zeros(6 * K + blocks * (K + 4 * D), dtype=torch.int32)
    epoch = torch.zeros(1, dtype=torch.int32)
    token, position = (torch.tensor([n], dtype=torch.int32) for n in (model.token, model.position))
    rough, V = model.rough, -(-model.vocabulary // 4) * 4
    made = [Estimate.empty(V, K, blocks, torch.device("cpu")) for _ in seeds]
    counts = torch.full((len(seeds), model.layers), -1, dtype=torch.int32)
    for i, seed in enumerate(seeds):
        kernels.launch(
            step_entry(K, D, form, model.kind),
            (blocks,),
            288,
            {
                "layers": model.layer_table(),
                "num_layers": model.layers,
                "N": model.N,
                "V": V,
                "H": model.H,
                "Hkv": model.Hkv,
                "tokens": token,
                "positions": position,
                "tables": model.table,
                "embeddings": model.embeddings,
                "last_norm": model.last_norm,
                "head": model.head if rough is None else rough.codes,
                "head_scales": None if rough is None else rough.scales,
                "cos": model.cos,
                "sin": model.sin,
                "eps": EPS,
                "scale": D**-0.5,
                "is_silu": int(model.is_silu),
                "words": words,
                "epoch": epoch,
                "counts": counts[i],
                "logits": made[i].logits,
                "most": made[i].most,
                "least": made[i].least,
                "x": made[i].x,
                "stamps": None,
            },
            SMEM_BYTES,
            at_once=blocks,
            seed=seed,
            beside=model.memory(),
        )
    logits = torch.cat([one.logits for one in made])[:, : model.vocabulary]
    return Done(logits, counts, cached(model), made[-1].x[0], made[-1])


def cached(model: Model) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, what lies in the cache for the new token."""
    page, slot = model.table[model.position // PAGE], model.position % PAGE
    return [
        (layer["keys"][page, :, slot], layer["values"][page, :, slot]) for layer in model.weights
    ]


def judge(model: Model) -> Done:
    """The same step in float64, rounded where the kernels round."""

    def product(weight: Tensor, norm: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(_norm(x, norm), weight, bias)

    x, counts, new = model.embeddings[model.token].double(), [], []
    for layer in model.weights:
        qkv = product(layer["qkv"], layer["input_norm"], layer["qkv_bias"])
        heads = qkv.view(-1, model.D).split([model.H, model.Hkv, model.Hkv])
        attended, key, value = _attended(model, layer, *heads)
        new.append((key, value))
        x = _rounded(_linear(attended, layer["out"], layer["out_bias"]) + x)
        gate = product(layer["gate"], layer["ffn_norm"], layer["gate_bias"])
        fired = gate > 0
        counts.append(int(fired.sum()))
        up = product(layer["up"], layer["ffn_norm"], layer["up_bias"])
        act = _rounded(F.silu(gate)) if model.is_silu else gate * fired
        hidden = _rounded(act * up)
        x = _rounded(_linear(hidden, layer["down"].t(), layer["down_bias"]) + x)
    state = _norm(x, model.last_norm)
    logits = state @ model.head.double().t()
    return Done(logits[None], torch.tensor([counts]), new, state)


def _attended(model: Model, layer: dict[str, Tensor | None], q: Tensor, k: Tensor, v: Tensor):
    if model.head_norms:
        q, k = _norm(q, layer["q_norm"]), _norm(k, layer["k_norm"])
    q, k = _turned(model, q), _turned(model, k)

    def cached(pages: Tensor, own: Tensor) -> Tensor:
        rows = pages.double()[model.table.long()].transpose(1, 2).flatten(0, 1)[: model.position]
        first = max(0, model.position + 1 - model.window) if model.window else 0
        return torch.cat([rows, own[None]])[first:].repeat_interleave(model.H // model.Hkv, 1)

    keys, values = cached(layer["keys"], k), cached(layer["values"], v)
    weights = (torch.einsum("hd,phd->hp", q, keys) * model.D**-0.5).softmax(-1)
    return _rounded(torch.einsum("hp,phd->hd", weights, values).flatten()), k, v


def _turned(model: Model, x: Tensor) -> Tensor:
    cos, sin = (table[model.position].double() for table in (model.cos, model.sin))
    low, high = x.chunk(2, -1)
    return _rounded(_rounded(x * cos) + _rounded(torch.cat([-high, low], -1) * sin))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return _rounded(_rounded(x * root) * weight.double())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _rounded(x @ weight.double().t() + (0 if bias is None else bias.double()))


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()
