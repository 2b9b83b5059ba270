"""What is launched, kept instead of launched, and what the kernels' sources say that they take."""

import re

import numpy as np
from torch import Tensor

from twellctl.bundle.twell_launch import entry_file
from twellctl.here.resources import resource_dir


class Map:
    """Stands for a tensor map."""

    def __init__(self, tensor, box_rows):
        self.tensor, self.box_rows = tensor, box_rows


class Launches:
    """Stands for a KernelSet: keeps what is launched, and which launches overlap."""

    def __init__(self):
        self.made, self.overlaps = [], []

    def clusters_at_once(self, name, cluster, block, smem_bytes):
        return 30  # as on an H200

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        self.made.append((name, grid, block, tuple(args), smem_bytes))
        self.overlaps.append(overlap)


def source(entry: str) -> str:
    """The text of the file where an entry lies, macros in one line."""
    file = resource_dir("kernels") / entry_file(entry)
    return file.read_text().replace("\\\n", "\n")


def parameters(entry: str) -> list[str]:
    """The types of a kernel's parameters, as its source has them."""
    text = source(entry)
    # macros make families of kernels: those of gate_pack.cu by `name`, few_linear_##name and so on
    called = "name" if entry.startswith("gate_pack") else entry
    if not (found := _signatures(text, called)):
        family = re.match(r"few_(?:linear|gated|hidden|down_wide|walk)_", entry)
        found = _signatures(text, rf"{family[0]}##\w+")
    assert len(found) == 1, entry
    kinds = {"TensorMap": "map", "long long": "int64", "float": "float", "int": "int"}
    return [
        "pointer" if "*" in parameter else next(k for name, k in kinds.items() if name in parameter)
        for parameter in found[0].split(",")
    ]


def _signatures(text: str, called: str) -> list[str]:
    return re.findall(rf'extern "C" __global__[^;{{]*?\b{called}\(([^)]*)\)', text)


def kind_of(argument: object) -> str:
    """What an argument is to a kernel."""
    if isinstance(argument, Map):
        return "map"
    if argument is None or isinstance(argument, Tensor):
        return "pointer"
    return {int: "int", float: "float", np.int64: "int64"}[type(argument)]
