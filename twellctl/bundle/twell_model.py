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
from .twell_config import check_twell, is_fp8, is_silu_form, stays_silu
from .twell_ffn import register_sources, sparse_ffn, sparse_fp8_ffn, train_ffn
from .twell_fp8_linear import Fp8Linear, refuse_gradients, with_own_layers
from .twell_launch import device_limits
from .twell_route import check_route, requested
from .twell_train import FfnMeter
from .twell_weights import E4M3_STEP

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


def weights_of_gate_and_up(ffn: nn.Module) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(weight `[N, K]`, bias, scale in FP8) of the gate, then of up: views where both are one."""
    parts = [(p.weight, p.bias, getattr(p, "weight_scale", None)) for p in gate_and_up(ffn)]
    if len(parts) == 1:
        halves = [(None, None) if part is None else part.chunk(2) for part in parts[0]]
        parts = list(zip(*halves, strict=True))
    return parts


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
        setattr(ffn, activation_name(ffn), PartlySilu(silu) if silu else nn.ReLU())


class TwellFFN:
    """Mixed into the class of a gated FFN module: the same submodules, the forward over TwELL."""

    twell_tile: int
    twell_slots: int
    twell_density: float | None = None  # as profiled
    twell_sources: str = ""  # of the kernels, as registered; without them plain torch computes
    twell_route: str = "auto"
    twell_meter: FfnMeter | None = None  # while the model is trained with a penalty

    def __reduce_ex__(self, protocol):
        """For pickle, which knows the stock class by name and makes ours from it again."""
        _, stock = type(self).__bases__
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_over_twell, (stock,), *state

    def forward(self, x: Tensor) -> Tensor:
        projections, activation = gate_and_up(self), activation_of(self)
        linears = (*projections, self.down_proj)
        meter = self.twell_meter
        in_fp8 = all(is_plain(m, Fp8Linear) for m in linears)
        if in_fp8 and is_plain(activation, nn.ReLU):
            return self._in_fp8(x, projections)
        if not (all(is_plain(m, nn.Linear) for m in linears) and is_plain(activation, nn.ReLU)):
            # an adapter, a hook or a quantised layer: reading `.weight` would pass it by
            if self.twell_sources and x.is_cuda and not torch.compiler.is_compiling():
                say_once("an FFN has layers that are not plain ones (adapters, hooks)")
            if meter is None:
                return super().forward(x)
            made = [projection(x) for projection in projections]
            gate, up = made if len(made) > 1 else made[0].chunk(2, -1)
            return self.down_proj(meter.measure(activation(gate), up))
        (w_gate, b_gate, _), (w_up, b_up, _) = weights_of_gate_and_up(self)
        tensors = (x, w_gate, w_up, self.down_proj.weight, b_gate, b_up, self.down_proj.bias)
        how = self._numbers()
        if meter is None:
            return sparse_ffn(*tensors, **how)
        if self.training and torch.is_grad_enabled():
            how["density"] = meter.density
        how["penalty"] = meter.weight(x.numel() // x.shape[-1], w_gate.shape[0])
        y, meter.fired = train_ffn(*tensors, plain=meter.plain, **how)
        return y

    def _in_fp8(self, x: Tensor, projections: tuple[Fp8Linear, ...]) -> Tensor:
        refuse_gradients(x)
        weights = [projection.fp8_weight for projection in projections]
        gate, up = weights if len(weights) > 1 else weights[0].chunk(2)
        down = self.down_proj
        return sparse_fp8_ffn(x, gate, up, down.fp8_weight, down.turned, **self._numbers())

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
    num_mapped = twell.get("map_neurons", 0)
    for ffn, slots, density in zip(ffns, twell["slots"], densities, strict=True):
        ffn.__class__ = _over_twell(type(ffn))
        ffn.twell_tile, ffn.twell_slots, ffn.twell_density = twell["tile"], slots, density
        if density is not None and num_mapped:  # which fire, too
            mapped = num_mapped / ffn.down_proj.weight.shape[1]
            ffn.twell_density = mapped + (1 - mapped) * density


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


def by_rows_of_neurons(w_down: Tensor, *, trained: bool = False) -> Tensor:
    """`w_down` `[K, N]` with strides (1, K), as the kernels read it; itself where none will.

    `trained`: by `train_ffn` under autocast, which reads float32, too.
    """
    return w_down.t().contiguous().t() if _kernels_read(w_down, trained) else w_down


def _kernels_read(weight: Tensor, trained: bool = False) -> bool:
    dtypes = (torch.bfloat16, torch.float32) if trained else (torch.bfloat16,)
    is_sharded = hasattr(weight, "device_mesh")  # a DTensor: FSDP2 wants it contiguous
    return weight.is_cuda and weight.dtype in dtypes and not is_sharded


def _kernels_read_e4m3(weight: Tensor) -> bool:
    if not weight.is_cuda or torch.version.cuda is None or any(n % E4M3_STEP for n in weight.shape):
        return False
    return device_limits(weight.device.index).capability >= (8, 9)


def lay_weights(model: nn.Module, *, trained: bool = False) -> None:
    """Lay the weights of gated FFNs as the kernels read them, where `use_kernels` gave kernels.

    That of each down projection lies by rows of neurons: without this each call would make a copy.
    An FP8 layer keeps both layouts, since dense FP8 products want the other one. Names, shapes and
    values stay, and so does what `save_pretrained` writes. What is not a plain layer, or lies
    elsewhere, stays as it is, and so does what is sharded. `trained` as in `by_rows_of_neurons`.
    """
    for ffn in gated_ffns(model):
        down = ffn.down_proj
        if not getattr(ffn, "twell_sources", ""):
            continue
        if is_plain(down, nn.Linear):
            down.weight.data = by_rows_of_neurons(down.weight.data, trained=trained)
        elif (
            is_plain(down, Fp8Linear)
            and _kernels_read_e4m3(down.weight)
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
        if is_fp8(vars(config)):
            kwargs["config"] = with_own_layers(config)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._twell_bundle = bundle
        put_over_twell(model, model.config.twell)
        use_kernels(model, kernel_sources(bundle), route)
        lay_weights(model)
        return loaded

    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)  # of to(), cuda(), bfloat16()
        lay_weights(self)
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
        in_fp8 = is_fp8(self.config.to_dict())
        write_bundle(folder, make_bundle(files, folder.glob("*.safetensors") if in_fp8 else ()))
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
