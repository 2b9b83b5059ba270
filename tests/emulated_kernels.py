"""Kernels of the training pass on a CPU: their sources, compiled by g++ over emulator/sums.h."""

import ctypes
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from emulated_step import EMULATOR, copy_kernels

SOURCES = {
    "train/grad_lists.cu": ("list_neurons", "list_tokens"),
    "train/grad_sums.cu": ("grad_gate_up", "grad_down", "grad_x"),
    "train/grad_biases.cu": ("grad_biases",),
    "ffn/down.cu": ("down",),
}


class EmulatedKernels:
    """As a `KernelSet`, for tensors on the CPU; built in `folder`."""

    def __init__(self, folder: Path):
        self._functions = {}
        copy_kernels(folder)
        for path in (*folder.rglob("*.cuh"), *(folder / name for name in SOURCES)):
            text = path.read_text()
            memory = "reinterpret_cast<uint4*>(emulator::thread->block->memory())"
            text = re.sub(r"extern __shared__ uint4 (\w+)\[\];", rf"uint4* \1 = {memory};", text)
            path.write_text(text.replace('extern "C" __global__', "static"))
        for name, entries in SOURCES.items():
            library = self._build(folder, name, entries)
            self._functions |= {entry: library[f"emulate_{entry}"] for entry in entries}

    def _build(self, folder: Path, name: str, entries: Iterable[str]) -> ctypes.CDLL:
        text = (folder / name).read_text()
        made = f'#include "sums.h"\n#include "{name}"\n'
        for entry in entries:
            parameters = re.search(rf"\b{entry}\((.*?)\)\s*{{", text, re.DOTALL).group(1)
            given = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
            made += f"""
extern "C" int emulate_{entry}(int columns, int rows, int threads, int bytes, {parameters}) {{
    return each_block(columns, rows, threads, bytes, [&](char*) {{ {entry}({given}); }});
}}
"""
        source = folder / f"{name}.cpp"
        source.write_text(made)
        library = source.with_suffix(".so")
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-I", str(folder)]
        subprocess.run([*command, "-I", str(EMULATOR), str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    def launch(
        self, name: str, grid: tuple[int, ...], block: int, args: Iterable, smem_bytes: int = 0
    ) -> None:
        """Run entry `name` to its end."""
        columns, rows = (*grid, 1)[:2]
        given = [_argument(arg) for arg in args]
        assert self._functions[name](columns, rows, block, smem_bytes, *given), f"{name} hangs"


def _argument(arg):
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    return ctypes.c_longlong(int(arg)) if isinstance(arg, np.int64) else ctypes.c_int(int(arg))
