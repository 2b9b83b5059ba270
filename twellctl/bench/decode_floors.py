"""What a step of decoding must read at least, and how fast this device reads."""

import math

import torch
from torch import nn

from twellctl.bench.timing import Timer
from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_model import gated_ffns
from twellctl.decoding.rough_head import ROUGH_BYTES
from twellctl.decoding.screened import COPY_BITS

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
BANDWIDTH_SAMPLES = 5


def ffn_bytes(K: int, N: int, itemsize: float, union: float = 1.0, gate: float = 1.0) -> int:
    """Bytes of weights that must be read: of the gate, and `union` of the rows of up and down.

    `union` is the share of the neurons that fire for some token of the call; dense forms read all.
    `gate` is what is read of W_gate, and of a copy of it, as a share of its bytes.
    """
    return round(K * N * itemsize * (gate + 2 * union))


def screened_gate(candidates: float, density: float, union: float) -> float:
    """What screened gates read, as a share of W_gate's bytes in bf16: the copy, and candidates.

    `candidates` of a token, of whose neurons `density` fires; of several tokens, for which `union`
    does, candidates overlap as what fires.
    """
    if 0 < density < union < 1:  # as so many independent tokens
        candidates = 1 - (1 - candidates) ** (math.log1p(-union) / math.log1p(-density))
    return COPY_BITS / 16 + candidates


def step_bytes(
    model: nn.Module,
    unions: tuple[float, ...] | None,
    rows: int,
    gate: float = 1.0,
    *,
    in_int4: bool = False,
) -> int:
    """Bytes of weights that a step of `rows` rows must read.

    All weights but the embeddings, of which there is a line a row, unless they are the LM head too;
    of up and down those of the neurons that fire (`unions` by layer; None: all), `gate` as in
    `ffn_bytes`. Those of a map (twell_config.py), which `unions` do not count, fire always, and
    have one gate where gates are screened. The cache comes on top. What a step writes or keeps
    between kernels is next to nothing. `in_int4`: codes and scales are read, of layers that keep
    them, and a map's gate once; the head is read in 8 bits, but for a few rows.
    """
    mapped = mapped_neurons(model.config)
    total = sum(parameter.nbytes for parameter in model.parameters())
    if in_int4:
        kept = [m for m in model.modules() if isinstance(m, nn.Linear) and hasattr(m, "packed")]
        total += sum(_int4_bytes(linear) - linear.weight.nbytes for linear in kept)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embeddings is not head:
        total -= (len(embeddings) - rows) * embeddings[0].nbytes
    if in_int4:
        total += head.numel() + ROUGH_BYTES * len(head) - head.nbytes
    ffns = gated_ffns(model)
    for ffn, union in zip(ffns, unions or (1.0,) * len(ffns), strict=True):
        down = ffn.down_proj.weight
        K, N = down.shape
        size = _int4_bytes(ffn.down_proj) / down.numel() if in_int4 else down.itemsize
        total += ffn_bytes(K, N - mapped, size, union, gate) - round(3 * N * K * size)
        total += ffn_bytes(K, mapped, size, gate=float(gate == 1.0 and not in_int4))
    return total


def _int4_bytes(linear: nn.Module) -> int:
    """Of the codes and scales of a layer that keeps them."""
    return linear.packed.nbytes + linear.packed_scale.nbytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that `device` reads and writes while it copies a large tensor: the median."""
    size = COPIED_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timer = Timer(lambda number: target.copy_(source), 1, device, graphed=False)
    seconds = sorted(timer.seconds() for _ in range(BANDWIDTH_SAMPLES))[BANDWIDTH_SAMPLES // 2]
    return 2 * size / seconds
