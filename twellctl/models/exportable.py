"""Whether the FFNs of a model, and nothing else, compute what twellctl takes them for.

The Twell FFN and a fit know `down(act(gate(x)) * up(x))` and no more. A family that scales the
gate, or puts a norm before `down`, would lose that without a word: so its FFN is tried, tiny,
before an export and before a fit; fine-tuning only says so.
"""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from twellctl.bundle.twell_model import activation_name, activation_of, gated_ffns
from twellctl.errors import TwellError
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import skeleton

_K, _N = 8, 24


def refuse_unfittable(checkpoint: Checkpoint, keep_activation: bool = False) -> None:
    """`TwellError` if a fit would change more of the model than the FFNs that it knows.

    It makes all that has their activation ReLU, or keeps that.
    """
    if not keep_activation:
        relu = checkpoint.corrections | {checkpoint.activation_key: "relu"}
        checkpoint = replace(checkpoint, corrections=relu)
    exportable_skeleton(checkpoint, "fitted: take another model")


def exportable_skeleton(checkpoint: Checkpoint, done: str = "exported") -> PreTrainedModel:
    """The stock model on the meta device; `TwellError` if its FFNs cannot run over TwELL."""
    name, kind = checkpoint.name, checkpoint.config["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise TwellError(
            f"{name} is a {kind} model, which transformers {transformers.__version__} does not "
            "know as a causal language model: pip install -U transformers"
        )
    model = skeleton(checkpoint)
    if why := why_unexportable(checkpoint, model, done):
        raise TwellError(why)
    return model


def why_unexportable(
    checkpoint: Checkpoint, model: PreTrainedModel, done: str = "exported"
) -> str | None:
    """Why the ReLU `model` of a checkpoint, on any device, cannot run over TwELL; None: it can."""
    name, ffns = f"{checkpoint.name} ({type(model).__name__})", gated_ffns(model)
    if len(ffns) != checkpoint.ffn.num_layers or not is_plain_ffn(ffns[0]):
        return (
            f"{name} has FFNs that compute more than down(act(gate) * up), which would be left "
            f"out: it cannot be {done}"
        )
    of_ffns = {id(m) for ffn in ffns for m in (ffn, activation_of(ffn))}
    if any(_has_relu(m) and id(m) not in of_ffns for m in model.modules()):
        return (
            f"{name} uses {checkpoint.activation_key} outside of its FFNs, too, where another "
            f"activation would do harm: it cannot be {done}"
        )
    return None


def _has_relu(module: nn.Module) -> bool:
    """Whether it is a ReLU, or has one by name, as the convolutions of linear attention do."""
    return isinstance(module, nn.ReLU) or getattr(module, "activation", None) == "relu"


@torch.no_grad()
def is_plain_ffn(ffn: nn.Module) -> bool:
    """Whether `ffn`, tried with tiny weights in the place of its own, is just the gated FFN."""
    sizes = ((_K, 2 * _N), (_K, _N), (_K, _N), (_N, _K))
    gate_up, gate, up, down = (nn.Linear(*size, bias=False) for size in sizes)
    gate.weight.data, up.weight.data = gate_up.weight.data.chunk(2)
    tiny = {"gate_up_proj": gate_up, "gate_proj": gate, "up_proj": up, "down_proj": down}
    tried = copy.copy(ffn).eval()
    tried._modules = dict(ffn._modules) | {n: m for n, m in tiny.items() if n in ffn._modules}
    x = torch.randn(5, _K)
    try:
        setattr(tried, activation_name(ffn), nn.ReLU())
        return torch.allclose(tried(x), down(F.relu(gate(x)) * up(x)), atol=1e-5)
    except (RuntimeError, TypeError, ValueError):
        return False  # it has more weights, or another activation, or takes more than x
