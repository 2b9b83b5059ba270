"""Benches on the CPU: a stand-in for the decoder over kernels, numbers to judge."""

import torch
from shapes import TINY_CONFIG

from twellctl.bench.decode_results import DecodeForm
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.bundle.twell_choice import WayPlan
from twellctl.decoding.torch_decoder import TorchDecoder

TINY_STEPS = {
    "batches": (1, 3),
    "prompt_tokens": 16,
    "new_tokens": 15,
    "config": TINY_CONFIG,
    "device": "cpu",
    "densities": (0.02,),
}
NO_FP8 = "FP8 products need an NVIDIA GPU of compute capability 8.9 or newer"


class BothForms(TorchDecoder):
    """Stands in for the decoder over kernels, where there is no GPU."""

    @staticmethod
    def why_not(model):
        return None

    def __init__(self, model, sparse: bool = True, gates: str = "whole"):
        super().__init__(model)
        if sparse:
            self.plan = WayPlan.parse("1 one kernel, 2+ union")


def decode_form(name: str, seconds: float, **more) -> DecodeForm:
    """A form as bench decode measures it."""
    kinds = {"twell": TWELL, "twell FP8": TWELL, "dense FP8": DENSE_FP8}
    facts = {"density": 0.02, "union": 0.1, "shortfall": 0.0, "floor_bytes": 10, "weight_bytes": 20}
    facts |= {"floor_seconds": 0.0005, "kind": kinds.get(name, DENSE)}
    facts |= {"in_fp8": "FP8" in name} | more
    return DecodeForm(name=name, step_seconds=(seconds, seconds, 1.0), **facts)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
