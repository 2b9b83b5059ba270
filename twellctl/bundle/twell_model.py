"""Twell...ForCausalLM, Twell...Model: a stock transformers model whose gated FFNs run over TwELL.

`TwellLlamaForCausalLM` is `LlamaForCausalLM`, and `TwellLlamaModel` its body `LlamaModel`, with the
same weights under the same names; so it goes for every causal model whose FFN is
`down(relu(gate(x)) * up(x))`, with `gate_proj` and `up_proj` or with both fused in `gate_up_proj`.
The class of a family is made when it is first asked for (`twell_class`).

FFNs run over TwELL in what `from_pretrained` loads. A model that is built from a config alone has
the stock modules: engines that bring layers of their own (vLLM) take them apart by their source.

What it needs beyond the stock config stands under "twell" in config.json: tile and slots by layer.
The files that belong to it (this one too) are listed with their sha256 in twell_manifest.json; a
changed or missing one is refused by name, and `save_pretrained` writes all of them again.
"""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from .twell_bundle import MANIFEST, make_bundle, read_bundle, write_bundle
from .twell_cache import say_once
from .twell_config import (
    check_route,
    check_twell,
    density_with_map,
    is_silu_form,
    requested,
    rounded_kind,
    stays_silu,
)
from .twell_ffn import register_sources, sparse_ffn, train_ffn
from .twell_launch import device_limits
from .twell_measured import Sizes, plan_of_ffn
from .twell_reasons import why_no_kernels, why_no_multiples, why_not_ffn, why_too_old
from .twell_rounded_linear import RoundedLinear, refuse_gradients, weight_of, with_own_layers
from .twell_train import FfnMeter
from .twell_weights import FFN, Weight

_PREFIX, _SUFFIXES = "Twell", ("ForCausalLM", "Model")
_KERNELS = "twell_kernels/"


def gated_ffns(model: nn.Module) -> list[nn.Module]:
    """The gated FFN modules of `model`, in the order of its layers."""
    fused, split = {"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}
    found = ({name for name, _ in m.named_children()} for m in model.modules())
    return [
        module
        for module, children in zip(model.modules(), found, strict=True)
        if fused <= children or split <= children
    ]


def gate_and_up(ffn: nn.Module) -> tuple[nn.Module, ...]:
    """The projections to gate and up of a gated FFN: two, or one to both, gate first."""
    fused = hasattr(ffn, "gate_up_proj")
    return (ffn.gate_up_proj,) if fused else (ffn.gate_proj, ffn.up_proj)


def weights_of_gate_and_up(ffn: nn.Module) -> list[Weight]:
    """The weights of the gate and of up, `[N, K]`: views where both are one."""
    weights = [weight_of(projection) for projection in gate_and_up(ffn)]
    return weights if len(weights) > 1 else weights[0].chunk(2)


def weights_of(ffn: nn.Module) -> FFN:
    """The weights of a gated FFN module, where they lie."""
    down = ffn.down_proj
    gate_up = weights_of_gate_and_up(ffn)
    return FFN(*gate_up, weight_of(down), getattr(down, "turned", None))


def activation_name(ffn: nn.Module) -> str:
    """The attribute under which this family keeps the FFN's activation."""
    for name in ("act_fn", "activation_fn"):
        if hasattr(ffn, name):
            return name
    raise ValueError(f"{type(ffn).__name__} has neither act_fn nor activation_fn")


def activation_of(ffn: nn.Module) -> nn.Module:
    """The FFN's activation."""
    return getattr(ffn, activation_name(ffn))


class PartlySilu(nn.Module):
    """The activation of an FFN some of whose neurons are SiLU, the others ReLU."""

    def __init__(self, silu: Sequence[bool]):
        """`silu`: which neurons are."""
        super().__init__()
        self.register_buffer("silu", torch.tensor(silu), persistent=False)

    def forward(self, gate: Tensor) -> Tensor:
        return torch.where(self.silu, F.silu(gate), F.relu(gate))


def read_as_relu(model: nn.Module, twell: Mapping[str, Any]) -> None:
    """Let the gated FFNs of `model`, in SiLU form, compute what that stands for."""
    for ffn, sharpness in zip(gated_ffns(model), twell["sharpness"], strict=True):
        silu = stays_silu(sharpness)
        activation = PartlySilu(silu) if silu else nn.ReLU()
        setattr(ffn, activation_name(ffn), activation.to(next(ffn.parameters()).device))


class TwellFFN:
    """Mixed into the class of a gated FFN module: the same submodules, the forward over TwELL."""

    twell_tile: int
    twell_slots: int
    twell_density: float | None = None  # as profiled
    twell_sources: str = ""  # of the kernels, as registered; without them plain torch computes
    twell_route: str = "auto"
    twell_plan: str = ""  # as measured where the model was opened; without one a rule tells the way
    twell_meter: FfnMeter | None = None  # while the model is trained with a penalty

    def __reduce_ex__(self, protocol):
        """For pickle, which knows the stock class by name and makes ours from it again."""
        _, stock = type(self).__bases__
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_over_twell, (stock,), *state

    def forward(self, x: Tensor) -> Tensor:
        if not self.twell_is_plain():
            return self._by_modules(x)
        ffn = weights_of(self)
        if ffn.gate.is_rounded:
            refuse_gradients(x)
        elif self.twell_meter is not None:
            return self._trained(x, ffn, self.twell_meter)
        return sparse_ffn(x, ffn, plan=self.twell_plan, **self._numbers())

    def twell_is_plain(self) -> bool:
        """Whether its modules are plain layers around ReLU, so that their weights are all."""
        linears = (*gate_and_up(self), self.down_proj)
        kind = RoundedLinear if isinstance(self.down_proj, RoundedLinear) else nn.Linear
        are_plain = all(is_plain(linear, kind) for linear in linears)
        return are_plain and is_plain(activation_of(self), nn.ReLU)

    def _by_modules(self, x: Tensor) -> Tensor:
        """By the modules themselves: for an adapter or a hook, which `.weight` would pass by."""
        if self.twell_sources and x.is_cuda and not torch.compiler.is_compiling():
            say_once("an FFN has layers that are not plain ones (adapters, hooks)")
        if self.twell_meter is None:
            return super().forward(x)
        made = [projection(x) for projection in gate_and_up(self)]
        gate, up = made if len(made) > 1 else made[0].chunk(2, -1)
        return self.down_proj(self.twell_meter.measure(activation_of(self)(gate), up))

    def _trained(self, x: Tensor, ffn: FFN, meter: FfnMeter) -> Tensor:
        """With the meter's penalty, and what fired measured."""
        how = self._numbers()
        if self.training and torch.is_grad_enabled():
            how["density"] = meter.density
        how["penalty"] = meter.weight(x.numel() // x.shape[-1], ffn.N)
        values = [weight.values for weight in ffn.weights]
        biases = [weight.bias for weight in ffn.weights]
        y, meter.fired = train_ffn(x, *values, *biases, plain=meter.plain, **how)
        return y

    def _numbers(self) -> dict[str, Any]:
        return {
            "tile": self.twell_tile,
            "slots": self.twell_slots,
            "sources": self.twell_sources,
            "route": self.twell_route,
            "density": self.twell_density,
        }


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether `module` is what `kind` says and no more: no subclass, no hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(module, name) for name in hooks)
    if type(module) is not kind or hooked:
        return False
    return "forward" not in module.__dict__ or _is_only_placed(module)


def _is_only_placed(module: nn.Module) -> bool:
    """Whether `forward` is accelerate's of a model on several GPUs, which brings inputs there.

    The inputs of the FFN were brought there, too. Weights that lie elsewhere are not to be read.
    """
    forward, hook = module.forward, getattr(module, "_hf_hook", None)
    return (
        getattr(getattr(forward, "func", None), "__name__", "") == "new_forward"
        and getattr(module._old_forward, "__func__", None) is type(module).forward
        and type(hook).__name__ == "AlignDevicesHook"
        and not hook.offload
    )


def put_over_twell(model: nn.Module, twell: Mapping[str, Any]) -> None:
    """Let the gated FFNs of `model` run over TwELL, with the numbers of a "twell" block."""
    ffns = gated_ffns(model)
    if is_silu_form(twell):
        read_as_relu(model, twell)
    densities = twell.get("densities") or [None] * len(ffns)
    for ffn, slots, density in zip(ffns, twell["slots"], densities, strict=True):
        ffn.__class__ = _over_twell(type(ffn))
        ffn.twell_tile, ffn.twell_slots = twell["tile"], slots
        ffn.twell_density = density_with_map(twell, density, ffn.down_proj.weight.shape[1])


@functools.cache
def _over_twell(stock: type) -> type:
    """One class for all FFNs of a kind: what is compiled for one serves the others."""
    return type(f"Twell{stock.__name__}", (TwellFFN, stock), {"__module__": __name__})


def _new_over_twell(stock: type) -> nn.Module:
    made = _over_twell(stock)
    return made.__new__(made)


def use_kernels(model: nn.Module, sources: str, route: str = "auto") -> None:
    """Give FFNs that `put_over_twell` made their kernels and route, as `sparse_ffn` has them."""
    for ffn in gated_ffns(model):
        ffn.twell_sources, ffn.twell_route = sources, route


@torch.no_grad()
def plan_ways(model: nn.Module) -> None:
    """Measure the ways of FFNs that are open for inference, those of the same sizes together.

    They go by the mean of their densities. FFNs keep to the rule of their route where no profile
    told a density, no kernels run, or memory is short.
    """
    alike: dict[tuple[Sizes, torch.device, str, str], list[TwellFFN]] = {}
    for ffn in gated_ffns(model):
        if not getattr(ffn, "twell_sources", ""):
            continue
        ffn.twell_plan = ""
        route = requested(ffn.twell_route)
        if route != "dense" and ffn.twell_density is not None and _takes_kernels(ffn):
            of = sizes_of(ffn), ffn.down_proj.weight.device, ffn.twell_sources, route
            alike.setdefault(of, []).append(ffn)
    for (sizes, device, sources, route), ffns in alike.items():
        densities = [ffn.twell_density for ffn in ffns if ffn.twell_density is not None]
        density, slots = sum(densities) / len(densities), max(ffn.twell_slots for ffn in ffns)
        with contextlib.suppress(torch.OutOfMemoryError):
            plan = plan_of_ffn(sizes, density, slots, device, sources, route)
            for ffn in ffns:
                ffn.twell_plan = str(plan)


def _takes_kernels(ffn: "TwellFFN") -> bool:
    """Whether the kernels run here and take the weights of `ffn`, with inputs in bf16."""
    weight = ffn.down_proj.weight
    if not weight.is_cuda or not ffn.twell_is_plain():
        return False
    own = weights_of(ffn)
    x = torch.empty(1, own.K, dtype=torch.bfloat16, device=weight.device)
    if why_not_ffn(x, own, ffn.twell_tile) is not None:
        return False
    return why_no_kernels(ffn.twell_sources, weight.device.index, own.kind) is None


def sizes_of(ffn: nn.Module) -> Sizes:
    """What plans tell of an FFN over TwELL."""
    own = weights_of(ffn)
    biases = own.gate.bias is not None, own.down.bias is not None
    return Sizes(own.K, own.N, biases, own.kind)


def by_rows_of_neurons(w_down: Tensor, *, trained: bool = False) -> Tensor:
    """`w_down` `[K, N]` with strides (1, K), as the kernels read it; itself where none will.

    `trained`: by `train_ffn` under autocast, which reads float32, too.
    """
    return w_down.t().contiguous().t() if _kernels_read(w_down, trained) else w_down


def _kernels_read(weight: Tensor, trained: bool = False) -> bool:
    dtypes = (torch.bfloat16, torch.float32) if trained else (torch.bfloat16,)
    is_sharded = hasattr(weight, "device_mesh")  # a DTensor: FSDP2 wants it contiguous
    return weight.is_cuda and weight.dtype in dtypes and not is_sharded


def _kernels_read_rounded(layer: RoundedLinear) -> bool:
    weight = layer.weight
    if not weight.is_cuda or torch.version.cuda is None:
        return False
    if why_too_old(layer.kind, device_limits(weight.device.index)):
        return False
    return why_no_multiples(layer.kind, *weight.shape) is None


def lay_weights(model: nn.Module, *, trained: bool = False) -> None:
    """Lay the weights of gated FFNs as the kernels read them, where `use_kernels` gave kernels.

    That of each down projection lies by rows of neurons: without this each call would make a copy.
    A rounded layer keeps both layouts, since dense products of it want the other one. Names, shapes
    and values stay, and so does what `save_pretrained` writes. What is not a plain layer, or lies
    elsewhere, stays as it is, and so does what is sharded. `trained` as in `by_rows_of_neurons`.
    """
    for ffn in gated_ffns(model):
        down = ffn.down_proj
        if not getattr(ffn, "twell_sources", ""):
            continue
        if is_plain(down, nn.Linear):
            down.weight.data = by_rows_of_neurons(down.weight.data, trained=trained)
        elif (
            is_plain(down, RoundedLinear)
            and _kernels_read_rounded(down)
            and requested(ffn.twell_route) != "dense"
        ):
            down.turn()


class TwellModel:
    """Mixed into a stock class: installs the FFNs, guards and carries the bundle."""

    _twell_bundle: dict[str, bytes] | None = None

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        check_twell(getattr(config, "twell", None), len(gated_ffns(self)))

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: transformers shall load weights and set up buffers as it does for the stock class."""
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As transformers'; `twell_route` ("twell", "dense"...) as in `sparse_ffn`."""
        passed_on = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
        source = {key: kwargs[key] for key in passed_on if kwargs.get(key) is not None}
        route = check_route(kwargs.pop("twell_route", "auto"), "twell_route")
        bundle = read_bundle(pretrained_model_name_or_path, **source)
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            where = config or pretrained_model_name_or_path
            config = cls.config_class.from_pretrained(where, **source)
        if rounded_kind(vars(config)) is not None:
            kwargs["config"] = with_own_layers(config)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._twell_bundle = bundle
        put_over_twell(model, model.config.twell)
        use_kernels(model, kernel_sources(bundle), route)
        lay_weights(model)
        plan_ways(model)
        return loaded

    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)  # of to(), cuda(), bfloat16()
        lay_weights(self)
        plan_ways(self)
        return self

    def save_pretrained(self, save_directory, is_main_process=True, *args, **kwargs):
        if self._twell_bundle is None:
            raise ValueError("this model was not loaded from an export: it has no bundle to save")
        if kwargs.get("push_to_hub"):
            raise ValueError("save_pretrained would push before all is written: use push_to_hub()")
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            self._complete(Path(save_directory))

    def _complete(self, folder: Path) -> None:
        files = {name: text for name, text in self._twell_bundle.items() if name != MANIFEST}
        is_rounded = rounded_kind(self.config.to_dict()) is not None
        weights = folder.glob("*.safetensors") if is_rounded else ()
        write_bundle(folder, make_bundle(files, weights))
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        stock_class = type(self).__name__.removeprefix(_PREFIX)
        config |= config_entries(stock_class, self.config.model_type)
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for weights in folder.glob("*.safetensors"):  # safetensors writes them 0600
            weights.chmod(config_file.stat().st_mode)


def kernel_sources(bundle: dict[str, bytes]) -> str:
    """Register the kernels of a bundle: what `sparse_ffn` takes as `sources`, "" without any."""
    files = {
        name.removeprefix(_KERNELS): content
        for name, content in bundle.items()
        if name.startswith(_KERNELS) and name.endswith((".cu", ".cuh"))
    }
    return register_sources(files) if files else ""


def config_entries(stock_class: str, model_type: str) -> dict:
    """Of classes config.json says: the stock one for all, ours for those who trust the code."""
    named = {"AutoModel": MODEL_MAPPING_NAMES[model_type]}
    if stock_class != named["AutoModel"]:  # not a body that was saved alone
        named["AutoModelForCausalLM"] = stock_class
    auto_map = {door: f"modeling_twell.{_PREFIX}{name}" for door, name in named.items()}
    return {"architectures": [stock_class], "auto_map": auto_map}


def __getattr__(name: str) -> type:
    if not name.startswith(_PREFIX) or not name.endswith(_SUFFIXES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return twell_class(name.removeprefix(_PREFIX))


@functools.cache
def twell_class(stock_class: str) -> type:
    """`TwellLlamaForCausalLM` for "LlamaForCausalLM", and so for each class and its body."""
    base = getattr(transformers, stock_class)
    described = {
        "__module__": f"{__package__}.modeling_twell",  # where auto_map and pickle look for it
        "__doc__": f"{stock_class} with its gated FFNs over TwELL.",
    }
    return type(_PREFIX + stock_class, (TwellModel, base), described)
