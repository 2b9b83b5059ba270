"""A ReLU model in SiLU form: which powers of two, and how they come into weights and out of them.

twell_config.py describes the form. `export` writes it; all other code that reads weights takes it
out, so that twellctl only works on plain ReLU models. Both are exact in bf16 and float32.

The powers are a compromise. The larger the sharpness, the closer SiLU is to ReLU. But the smaller
up and W_down become, the more GGUF's K-quants lose: they keep a scale for 256 weights in fp16, of
which few bits are left for such small numbers.
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_config import FP16, LEAST_SHARPNESS, stays_silu
from twellctl.bundle.twell_model import gated_ffns
from twellctl.firing.profiled import LayerProfile

MOST_SHARPNESS = 64  # relu(g) to within 0.0044
_MOST_DIVIDED = 8  # by this up and W_down are divided at most, if the sharpness is not the least
_ROOM = FP16 / 2  # of text that no profile has read gates may be larger
_NUMBER = re.compile(r"\d+")
_PART = re.compile(r"(.+)\.(gate_proj|up_proj|gate_up_proj|down_proj)\.(weight|bias|weight_scale)")


def choose_form(
    layers: Sequence[LayerProfile], num_layers: int, was: dict | None = None
) -> tuple[dict, float]:
    """The form to write a model in, and the largest gate or hidden value it has then.

    `layers` are those of its profile, or none: then nothing is known of what could overflow. Gates
    times their sharpness, and hidden values times their share, stay within fp16 with room for twice
    as much, down to the least sharpness and no share. Where the share is smaller, so is the
    sharpness: else up alone would be divided. `was`: the form that its folder had, whose
    SiLU neurons stay SiLU; without a profile it stays as it is.
    """
    if was and not layers:
        return was, 0.0
    sharpness, shares, most = [], [], 0.0
    largest = [(one.largest_gate, one.largest_hidden) for one in layers]
    for layer, (gate, hidden) in enumerate(largest or [(0.0, 0.0)] * num_layers):
        k = MOST_SHARPNESS
        while k > LEAST_SHARPNESS and k * gate > _ROOM:
            k //= 2
        share = 1 << (k.bit_length() - 1) // 2  # up has the other half
        while share > 1 and share * hidden > _ROOM:
            share //= 2
        k = max(LEAST_SHARPNESS, min(k, _MOST_DIVIDED * share))
        silu = stays_silu(was["sharpness"][layer]) if was else []
        sharpness.append([1 if stays else k for stays in silu] if silu else k)
        shares.append(share)
        most = max(most, k * gate, share * hidden)
    return {"activation": "relu", "sharpness": sharpness, "down_share": shares}, most


def factors(names: Iterable[str], form: dict, intermediate_size: int) -> dict[str, Tensor]:
    """What each tensor of a gated FFN among `names` is multiplied by in a folder of this form.

    float32, one a row or one for all rows. In quantised layers the scales have factors, and the
    weights have none.
    """
    names = set(names)
    parts = [match for match in map(_PART.fullmatch, names) if match]
    ffns = sorted({part[1] for part in parts}, key=lambda ffn: list(map(int, _NUMBER.findall(ffn))))
    found = {}
    for part in parts:
        ffn, linear, tensor = part.groups()
        layer, has_scales = ffns.index(ffn), f"{ffn}.{linear}.weight_scale" in names
        if (has_scales and tensor == "weight") or (linear, tensor) == ("down_proj", "bias"):
            continue
        share = float(form["down_share"][layer])
        gate = torch.tensor(form["sharpness"][layer], dtype=torch.float32)
        gate = gate.expand(intermediate_size)
        found[part[0]] = {
            "gate_proj": gate,
            "up_proj": share / gate,
            "gate_up_proj": torch.cat((gate, share / gate)),
            "down_proj": torch.tensor([1 / share]),
        }[linear]
    return found


def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times its factor of `factors`."""
    return tensor * factor.to(tensor).view(-1, *[1] * (tensor.dim() - 1))


@torch.no_grad()
def undo(model: nn.Module, form: dict) -> None:
    """Take the form out of the weights of `model`, as loaded from a folder that has it."""
    size = gated_ffns(model)[0].down_proj.in_features
    for name, factor in factors((named := dict(model.named_parameters())), form, size).items():
        named[name].data = scaled(named[name].data, 1 / factor)
        kept = model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and hasattr(kept, "packed_scale"):
            kept.packed_scale = scaled(kept.packed_scale, 1 / factor)
