"""The door to the Twell classes, which auto_map in config.json names. They live in twell_model.py.

These files run before their sha256 can be compared (twell_bundle.py). So this one is small: where
another was changed such that it does not even import, the error names it.
"""

import traceback
from pathlib import Path

import transformers

_OLDEST = (5, 17)  # of transformers
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(
        f"this model's own code needs transformers 5.17 or newer, this is "
        f"{transformers.__version__}: pip install -U transformers, or load it without "
        "trust_remote_code"
    )


def _culprit(error: Exception) -> str:
    here = Path(__file__).parent
    for path in sorted(here.glob("*.py")):
        try:
            compile(path.read_bytes(), path, "exec")
        except (SyntaxError, ValueError):
            return path.name
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [getattr(error, "path", None), *reversed(frames)]
    return next(Path(file).name for file in files if file and Path(file).parent == here)


try:
    from .twell_model import __getattr__ as __getattr__
except Exception as error:
    raise ImportError(
        f"bundled file {_culprit(error)} does not import ({error}): "
        "if it was changed, export the model again"
    ) from error
