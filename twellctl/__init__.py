"""twellctl makes pretrained language models sparse, and fast because they are sparse.

The pipeline as functions: `from twellctl import convert, write, draft, finetune, profile,
export, evaluate, compare, generate`. Each does what the command of the same name does (`evaluate`:
eval), and is imported at first use. `load` loads a model once for several prompts.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from twellctl.version import __version__ as __version__

__all__ = [
    "compare",
    "convert",
    "draft",
    "evaluate",
    "export",
    "finetune",
    "generate",
    "load",
    "profile",
    "write",
]
_IN = {"load": "generate"}  # the module of a function, where it has another name

if TYPE_CHECKING:
    from twellctl.compare import compare
    from twellctl.convert import convert
    from twellctl.draft import draft
    from twellctl.evaluate import evaluate
    from twellctl.export import export
    from twellctl.finetune import finetune
    from twellctl.generate import generate, load
    from twellctl.profile import profile
    from twellctl.write import write


class _Function:
    """A function of this package, from the module of the same name.

    Python sets an attribute when a submodule is imported; here that would replace the function by
    its module, so setting does nothing.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, package: types.ModuleType | None, kind: type) -> Any:
        module = importlib.import_module(f"{__name__}.{_IN.get(self.name, self.name)}")
        return getattr(module, self.name)

    def __set__(self, package: types.ModuleType, module: types.ModuleType) -> None:
        pass


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# descriptors work on a class, and a module may change its own
sys.modules[__name__].__class__ = type(
    "Package", (types.ModuleType,), {name: _Function(name) for name in __all__}
)
