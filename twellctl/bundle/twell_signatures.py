"""What kernels take: the names and types of their parameters, as their CUDA source declares them.

A launch gives its arguments by these names. They stand nowhere else, so that a source and its
launches cannot differ unnoticed. Standard library only.
"""

import functools
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# how an argument lies in its place, 8 bytes or more, by its type
_POINTER, _MAP = "Q", "128s"
_PLACES = {"int": "i4x", "float": "f4x", "long long": "q", "TensorMap": _MAP}
_QUALIFIERS = {"const", "__grid_constant__"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# behind the attributes of a kernel: its name, its parameters, and the brace of its body
_KERNEL = re.compile(r'extern "C" __global__ void\b.*?(\w+)\s*\(([^()]*)\)\s*\{', re.DOTALL)
_MADE = "name"  # what macros for TWELL_ENTRIES call the entries that they make


class Signature:
    """The parameters of a kernel in their order: `names`, and `types`, a pointer's with a star.

    `layout` is that of a buffer of the arguments, `offsets` say where each begins.
    """

    def __init__(self, entry: str, names: Sequence[str], types: Sequence[str]):
        self.entry, self.names, self.types = entry, tuple(names), tuple(types)
        places = [_POINTER if kind.endswith("*") else _PLACES[kind] for kind in types]
        self.layout = struct.Struct("=" + "".join(places))
        sizes = (struct.calcsize("=" + place) for place in places[:-1])
        self.offsets = tuple(itertools.accumulate(sizes, initial=0)) if places else ()
        self._pointers = [i for i, place in enumerate(places) if place == _POINTER]
        self._maps = [i for i, place in enumerate(places) if place == _MAP]

    def pack_into(self, buffer: Any, args: Mapping[str, Any]) -> None:
        """Write the arguments, by their names, into a buffer of at least `layout.size` bytes.

        For a pointer comes a tensor, or None. `TypeError` where `args` has other names than the
        parameters, `struct.error` where a number is not of its type.
        """
        try:
            values = [args[name] for name in self.names]
        except KeyError:
            raise self._other_names(args) from None
        if len(args) > len(values):
            raise self._other_names(args)
        for i in self._pointers:
            tensor = values[i]
            values[i] = 0 if tensor is None else tensor.data_ptr()
        for i in self._maps:
            values[i] = values[i].tobytes()
        self.layout.pack_into(buffer, 0, *values)

    def _other_names(self, args: Mapping[str, object]) -> TypeError:
        lacking = ", ".join(name for name in self.names if name not in args)
        unknown = ", ".join(name for name in args if name not in self.names)
        said = [f"needs {lacking}"] * bool(lacking) + [f"takes no {unknown}"] * bool(unknown)
        return TypeError(f"kernel {self.entry} {' and '.join(said)}")


def signature_of(entry: str, texts: Iterable[bytes]) -> Signature:
    """What an entry takes, which its source or a header of that defines; `texts` are these.

    `ValueError` if none defines it, or if a parameter is of a type that no launch knows.
    """
    found: dict[str, str] = {}
    for text in texts:
        found |= _defined(text)
    parameters = found.get(entry, found.get(_MADE))
    if parameters is None:
        raise ValueError(f"kernel {entry} is not defined where it should be")
    pairs = list(_types_and_names(parameters))
    for kind, name in pairs:
        if not kind.endswith("*") and kind not in _PLACES:
            raise ValueError(f"kernel {entry} takes {name} of type {kind}, which no launch knows")
    return Signature(entry, [name for _, name in pairs], [kind for kind, _ in pairs])


@functools.cache
def _defined(text: bytes) -> dict[str, str]:
    """The parameters of each kernel in a text, as they stand there."""
    code = _COMMENT.sub("", text.decode().replace("\\\n", "\n"))
    return {match[1]: match[2] for match in _KERNEL.finditer(code)}


def _types_and_names(parameters: str) -> Iterator[tuple[str, str]]:
    """Of each; types without their qualifiers."""
    for parameter in filter(str.strip, parameters.split(",")):
        *words, name = re.findall(r"[\w:]+|\*", parameter)
        yield " ".join(word for word in words if word not in _QUALIFIERS), name
