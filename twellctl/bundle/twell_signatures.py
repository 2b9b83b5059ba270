"""What kernels take: the names and types of their parameters, as their CUDA source declares them.

A launch gives its arguments by these names. They stand nowhere else, so that a source and its
launches cannot differ unnoticed. Standard library only.
"""

import functools
import itertools
import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    `layout` is that of a buffer of all arguments: pointers, then tensor maps, then numbers.
    `offsets` say where each lies in it, in the order of the parameters.
    """

    def __init__(self, entry: str, names: Sequence[str], types: Sequence[str]):
        self.entry, self.names, self.types = entry, tuple(names), tuple(types)
        places = dict(zip(names, map(_place, types), strict=True))
        pointers = [name for name in names if places[name] == _POINTER]
        maps = [name for name in names if places[name] == _MAP]
        numbers = [name for name in names if places[name] not in (_POINTER, _MAP)]
        laid = [*pointers, *maps, *numbers]
        self.layout = struct.Struct("=" + "".join(places[name] for name in laid))
        sizes = (struct.calcsize("=" + places[name]) for name in laid)
        offsets = dict(zip(laid, itertools.accumulate(sizes, initial=0), strict=False))
        self.offsets = tuple(offsets[name] for name in names)
        self._maps = maps
        self._pointers, self._numbers = _picker(pointers), _picker(numbers)

    def pack_into(self, buffer: Any, args: Mapping[str, Any]) -> None:
        """Write the arguments, by their names, into a buffer of at least `layout.size` bytes.

        For a pointer comes a tensor, or None. `TypeError` where `args` has other names than the
        parameters, `struct.error` where a number is not of its type.
        """
        if len(args) != len(self.names):
            raise self._other_names(args)
        try:
            tensors, numbers = self._pointers(args), self._numbers(args)
            maps = [args[name].tobytes() for name in self._maps]
        except KeyError:
            raise self._other_names(args) from None
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.layout.pack_into(buffer, 0, *pointers, *maps, *numbers)

    def _other_names(self, args: Mapping[str, object]) -> TypeError:
        lacking = ", ".join(name for name in self.names if name not in args)
        unknown = ", ".join(name for name in args if name not in self.names)
        said = [f"needs {lacking}"] * bool(lacking) + [f"takes no {unknown}"] * bool(unknown)
        return TypeError(f"kernel {self.entry} {' and '.join(said)}")


def _place(kind: str) -> str:
    return _POINTER if kind[-1] == "*" else _PLACES[kind]


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """What picks these of arguments; several at once, which is fast."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda args: [args[name] for name in names]


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
        if kind[-1] != "*" and kind not in _PLACES:
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
