"""vLLM's model classes, with the FFNs of an export over TwELL.

Each is a subclass of what vLLM has under the same name, made when it is first asked for. What is no
export it builds and leaves alone.
"""

import functools
import logging
import re
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_world_group
from vllm.model_executor.layers.activation import SiluAndMul

from twellctl.bundle.twell_config import density_with_map
from twellctl.errors import TwellError
from twellctl.here.own_kernels import own_kernels
from twellctl.models.in_vllm import ARCHITECTURES, DENSELY
from twellctl.vllm import stock_models
from twellctl.vllm.ffn import TwellFFN
from twellctl.vllm.fp8_ffn import TwellFp8FFN
from twellctl.vllm.plans import Planned, densely_in_fp8, plan_layers
from twellctl.vllm.refusals import check_densely, check_served, check_version, why_densely

logger = logging.getLogger("vllm.twellctl")  # a name of vLLM's, so that its handlers take it


class _OverTwell:
    """Mixed into a class of vLLM's: builds the stock model, then changes its FFNs for ours."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **more: Any) -> None:
        build = functools.partial(super().__init__, vllm_config=vllm_config, prefix=prefix, **more)
        model_config = vllm_config.model_config
        config = model_config.hf_config
        if not hasattr(config, "twell"):
            build()
            return
        why = why_densely(config)
        if why is None:
            check_version(vllm.__version__)
            check_served(
                model_config.model,
                config,
                quantized=vllm_config.quant_config is not None,
                lora=vllm_config.lora_config is not None,
            )
        else:
            check_densely(model_config.model, config)
        build()
        if why is None:
            put_over_twell(self, config.twell, vllm_config)
        else:
            _say(logging.WARNING, f"{model_config.model} runs densely, by vLLM's own class: {why}")


class _Densely:
    """Mixed into vLLM's transformers backend, which runs whatever transformers does: says so."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **more: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **more)
        model_config = vllm_config.model_config
        if hasattr(model_config.hf_config, "twell"):
            (name, *_) = model_config.hf_config.architectures
            why = f"the plugin has no class for {name}"
            if name in ARCHITECTURES:
                over_twell = f"without {DENSELY} it would run over TwELL"
                why = why_densely(model_config.hf_config) or over_twell
            what = f"{model_config.model} runs densely, through vLLM's transformers backend: {why}"
            _say(logging.WARNING, what)


def put_over_twell(model: nn.Module, twell: dict, vllm_config: VllmConfig) -> None:
    """Change each gated FFN of `model` for one over TwELL."""
    ffns: dict[str, TwellFFN | TwellFp8FFN] = {}
    over_twell = TwellFFN
    if vllm_config.quant_config is not None:
        compiled = bool(vllm_config.compilation_config.mode)
        over_twell = functools.partial(TwellFp8FFN, compiled=compiled)

    @functools.cache
    def begin(device: torch.device) -> Planned:
        return _plan(list(ffns.values()), device, vllm_config)

    N = vllm_config.model_config.hf_config.intermediate_size
    for name, module in gated_ffns(model).items():
        number = int(re.search(r"\.layers\.(\d+)\.", name)[1])
        slots = twell["slots"][number]
        density = density_with_map(twell, twell["densities"][number], N)
        ffns[name] = over_twell(module, twell["tile"], slots, density, begin)
        model.set_submodule(name, ffns[name])
    if any(isinstance(module, SiluAndMul) for module in model.modules()):  # it would run SiLU
        raise TwellError(
            f"{vllm_config.model_config.model}: vLLM {vllm.__version__} has FFNs that the plugin "
            f"does not know: install another vLLM, or serve densely with {DENSELY}"
        )


def gated_ffns(model: nn.Module) -> dict[str, nn.Module]:
    """The gated FFN modules of a model of vLLM's, by name."""
    wanted = {"gate_up_proj", "down_proj"}
    return {
        name: module
        for name, module in model.named_modules()
        if wanted <= {child for child, _ in module.named_children()}
    }


def _plan(
    ffns: list[TwellFFN] | list[TwellFp8FFN], device: torch.device, vllm_config: VllmConfig
) -> Planned:
    """Load kernels and plan ways, while no graph is captured yet; say what runs and why.

    The weights of the first of `ffns` are loaded.
    """
    model_config = vllm_config.model_config
    most = vllm_config.scheduler_config.max_num_batched_tokens
    layers, first = [ffn.layer for ffn in ffns], ffns[0]
    in_fp8 = isinstance(first, TwellFp8FFN)
    dense = first.dense_way if in_fp8 else None
    engine = f"vLLM {vllm.__version__}{' compiled' if first.compiled else ''}" if in_fp8 else ""
    how = (device, model_config.dtype, own_kernels(), dense, engine)
    found = plan_layers(layers, most, *how)
    if in_fp8 and found.plans and (said := first.why_not_read()):
        found = densely_in_fp8(said)
    fired = [layer.density for layer in layers]
    _say(
        logging.INFO if found.plans else logging.WARNING,
        f"{model_config.model}: {len(layers)} FFNs {layers[0].sizes.K} x {layers[0].sizes.N}"
        f"{' in FP8' if in_fp8 else ''}, of which "
        f"{min(fired):.1%} to {max(fired):.1%} fires, run {found.how}",
    )
    return found


def _say(level: int, what: str) -> None:
    world = get_world_group()
    logger.log(level, "TwELL, rank %d of %d: %s", world.rank, world.world_size, what)


@functools.cache
def _class_of(name: str) -> type:
    stock = stock_models[name].load_model_cls()
    mixin = _OverTwell if name in ARCHITECTURES else _Densely
    return type(stock.__name__, (mixin, stock), {"__module__": __name__, "__doc__": stock.__doc__})


def __getattr__(name: str) -> type:
    if name not in stock_models:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class_of(name)
