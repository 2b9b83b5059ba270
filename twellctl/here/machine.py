"""What of libraries, driver, GPU and CuPy is on this machine, and what to do about the rest.

Nothing here may fail for want of what it looks for.
"""

import ctypes
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from twellctl.errors import first_line

CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x")


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is "ok", "none" or "bad", `advice` what to do about it."""

    name: str
    state: str
    what: str
    advice: str = ""


def torch_cuda() -> str | None:
    """The CUDA that torch was built with, like "13.0"; None for a CPU build, or without torch."""
    try:
        import torch
    except Exception:
        return None
    return torch.version.cuda


def find_libraries() -> Finding:
    """Versions of what twellctl depends on, and which do not fit."""
    from packaging.requirements import Requirement

    try:
        requirements = importlib.metadata.requires("twellctl") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("libraries", "bad", "twellctl runs without being installed", "pip install .")
    found, wrong = [], []
    for needed in map(Requirement, requirements):
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        version = version_of(needed.name)
        found.append(f"{needed.name} {version or 'missing'}")
        if version is None or not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"'{needed.name}{needed.specifier}'")
    advice = f"pip install {' '.join(wrong)}" if wrong else ""
    return Finding("libraries", "bad" if wrong else "ok", ", ".join(found), advice)


def find_driver() -> tuple[Finding, int]:
    """NVIDIA's driver, and the newest CUDA it runs as 1000 x major + 10 x minor (0: no driver)."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return Finding("driver", "none", "no NVIDIA driver (libcuda.so.1)"), 0
    if status or not version.value:
        return Finding("driver", "bad", f"the NVIDIA driver answers with error {status}"), 0
    major, minor = version.value // 1000, version.value % 1000 // 10
    return Finding("driver", "ok", f"runs CUDA up to {major}.{minor}"), version.value


def find_gpu(driver: Finding, cuda: str | None) -> Finding:
    """The GPUs that torch can use, or why it can use none."""
    try:
        import torch
    except Exception as error:
        what = f"torch cannot be imported: {first_line(error)}"
        return Finding("GPU", "bad", what, "reinstall torch")
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        shown = (
            f"{g.name} (sm_{g.major}{g.minor}, {g.total_memory / 2**30:.0f} GiB)" for g in gpus
        )
        return Finding("GPU", "ok", ", ".join(shown))
    if driver.state != "ok":
        return Finding("GPU", "none", "none")
    if cuda is None:
        what = f"torch {torch.__version__} is a CPU build"
        return Finding("GPU", "bad", what, "install a CUDA build of torch (see pytorch.org)")
    what = f"torch for CUDA {cuda} finds none, though there is a driver ({driver.what})"
    return Finding("GPU", "bad", what, "update the driver, or install torch for an older CUDA")


def find_cupy(cuda: str | None) -> Finding:
    """CuPy: the wheel for the CUDA of torch, and no other."""
    wheels = [name for name in CUPY_WHEELS if version_of(name)]
    if not wheels and importlib.util.find_spec("cupy") is None:
        return Finding("CuPy", "none", "not installed", install_advice(cuda) if cuda else "")
    try:
        import cupy
    except Exception as error:
        what = f"cannot be imported: {first_line(error)}"
        return Finding("CuPy", "bad", what, install_advice(cuda))
    what = f"{cupy.__version__} ({', '.join(wheels) or 'own build'})"
    unfit = [name for name in wheels if name != f"cupy-{extra(cuda)}"]
    if len(wheels) > 1 or (cuda and unfit):
        advice = f"pip uninstall {' '.join(wheels)}, then {install_advice(cuda)}"
        return Finding("CuPy", "bad", f"{what}, with torch for CUDA {cuda}", advice)
    return Finding("CuPy", "ok", what)


def install_advice(cuda: str | None) -> str:
    """How to install what the kernels need, for the torch that is there.

    pip keeps the twellctl that is installed.
    """
    return f"pip install '{'twellctl' if version_of('twellctl') else '.'}[{extra(cuda)}]'"


def extra(cuda: str | None) -> str:
    """The extra for the CUDA of torch; without one, for the CuPy that is there, else the newest."""
    installed = [name.removeprefix("cupy-") for name in CUPY_WHEELS if version_of(name)]
    if cuda:
        return f"cuda{cuda.split('.')[0]}x"
    return installed[-1] if installed else "cuda13x"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
