"""What a cubin tells of its kernels. It is an ELF file of 64 bits, little end first."""

import struct
from dataclasses import dataclass

from .twell_nvrtc import KernelError

_HEADER = struct.Struct("<40xQ10xHHH")  # where section headers lie, their size, how many, names'
_SECTION = struct.Struct("<II16xQQ24x")  # name, kind, where it lies, its size
_NO_BITS = 8  # a kind: a size, and nothing in the file
# From sm_90 on, shared memory of a block begins with so much that is the driver's. A device keeps
# it beside what a block may ask for, but sections count it in.
_DRIVERS, _DRIVERS_SECTION = 1024, ".nv.shared.reserved.0"


@dataclass(frozen=True)
class Section:
    """A part of a cubin. `content` is empty where the file has none."""

    size: int
    content: bytes


def sections(code: bytes) -> dict[str, Section]:
    """The sections of a cubin by name. `KernelError` if it is none."""
    try:
        return _read_sections(code)
    except (struct.error, IndexError, ValueError) as error:
        raise KernelError(f"what the compiler made is no cubin ({error})") from error


def _read_sections(code: bytes) -> dict[str, Section]:
    if code[:6] != b"\x7fELF\2\1":
        raise ValueError("not an ELF file of 64 bits")
    start, size, count, of_names = _HEADER.unpack_from(code)
    found = [_SECTION.unpack_from(code, start + i * size) for i in range(count)]
    names = found[of_names][2]
    return {
        code[names + name : code.index(b"\0", names + name)].decode(): Section(
            length, b"" if kind == _NO_BITS else code[at : at + length]
        )
        for name, kind, at, length in found
    }


def static_shared(code: bytes) -> dict[str, int]:
    """Bytes of shared memory that each kernel of a cubin declares, by entry."""
    found = sections(code)
    drivers = _DRIVERS if _DRIVERS_SECTION in found else 0
    entries = [name.removeprefix(".text.") for name in found if name.startswith(".text.")]
    shared = {entry: found.get(f".nv.shared.{entry}") for entry in entries}
    return {name: part.size - drivers if part else 0 for name, part in shared.items()}
