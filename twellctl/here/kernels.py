"""What the kernels find on this machine: NVRTC, a cache, what steers them; whether they load.

Nothing here may fail for want of what it looks for.
"""

import os
import re
import time
from pathlib import Path

from twellctl.errors import first_line
from twellctl.here.machine import Finding, install_advice

VARIABLES = ("TWELL_CACHE_DIR", "TWELL_ROUTE")
_PROBE = {"probe.cu": b'extern "C" __global__ void probe() {}'}


def find_nvrtc(cuda: str | None, driver_cuda: int) -> Finding:
    """NVRTC, the one that would compile the kernels, tried on an empty one. It needs no GPU."""
    try:
        import torch

        from twellctl.bundle import twell_launch, twell_nvrtc
    except Exception as error:
        return Finding("NVRTC", "none", f"not looked for: {first_line(error)}")
    nvrtc = twell_nvrtc.find_nvrtc()
    if nvrtc is None:
        return Finding("NVRTC", "none", "not installed", install_advice(cuda) if cuda else "")
    version, major = ".".join(map(str, nvrtc.version)), nvrtc.version[0]
    try:
        arch = twell_launch.device_limits(0).arch if torch.cuda.is_available() else "sm_90a"
        nvrtc.compile("probe.cu", _PROBE, arch)
    except Exception as error:  # a part of it is missing, or it does not know the GPU
        return Finding("NVRTC", "bad", f"does not work: {first_line(error)}", install_advice(cuda))
    if 0 < driver_cuda // 1000 < major:
        what = f"{version} makes code for CUDA {major}, which the driver cannot run"
        return Finding("NVRTC", "bad", what, "update the driver, or use torch and CuPy for CUDA 12")
    cuda_of_torch = f"torch is for CUDA {cuda}" if cuda else "torch is a CPU build"
    what = f"{version}, of CUDA {major} ({cuda_of_torch}), compiles for {arch}; {nvrtc.path}"
    return Finding("NVRTC", "ok", what)


def find_kernels(gpu: Finding) -> Finding:
    """Which kernels the GPUs run, compiled and loaded to see whether they do; or why none."""
    if gpu.state != "ok":
        return Finding("kernels", "none", "none: they need an NVIDIA GPU")
    try:
        return _load_kernels()
    except Exception as error:  # whatever a driver may say
        return Finding("kernels", "bad", f"cannot be tried: {first_line(error)}")


def _load_kernels() -> Finding:
    import torch

    from twellctl.bundle.twell_ffn import why_no_kernels
    from twellctl.bundle.twell_launch import device_limits
    from twellctl.bundle.twell_nvrtc import what_is_missing
    from twellctl.here.own_kernels import own_kernels

    sources, start = own_kernels(), time.perf_counter()
    found = []  # (state, what) of each GPU
    for index in range(torch.cuda.device_count()):
        if reason := why_no_kernels(sources, index):
            old = torch.version.cuda is None or device_limits(index).capability < (8, 0)
            state = "none" if old or what_is_missing() else "bad"
            found.append((state, f"none: {reason}"))
        else:
            limits = device_limits(index)
            few = "" if limits.hopper else ", for few tokens"
            found.append(("ok", f"kernels of {limits.arch}{few}"))
    states = [state for state, _ in found]
    shown = list(dict.fromkeys(what for _, what in found))
    if "ok" in states:
        shown.append(f"loaded in {time.perf_counter() - start:.1f} s")
    return Finding("kernels", min(states, key=("bad", "ok", "none").index), ", ".join(shown))


def find_cache() -> Finding:
    """The folder that keeps compiled kernels and measured choices, and what is in it."""
    try:
        from twellctl.bundle.twell_cache import PLANS, cache_dir, kept_json, not_private
    except Exception as error:
        return Finding("cache", "none", f"not looked for: {first_line(error)}")
    folder = cache_dir()
    if not _can_write(folder):
        what = f"{folder} cannot be written: kernels are compiled at every start"
        advice = "set TWELL_CACHE_DIR to a folder that can be written"
        return Finding("cache", "bad", what, advice)
    if (why := not_private()) is not None:
        return Finding("cache", "bad", why, f"chmod 700 {folder}, or another TWELL_CACHE_DIR")
    compiled = len(list(folder.glob("*.cubin")))
    what = f"{folder}: {compiled} compiled kernel files, {len(kept_json(PLANS))} measured plans"
    return Finding("cache", "ok", what)


def find_plans(K: int, N: int, num_layers: int) -> Finding:
    """Which kernels run for how many tokens: plans that were measured here for FFNs of these sizes
    in a model of so many layers."""
    try:
        import torch

        from twellctl.bundle.twell_cache import PLANS, kept_json
        from twellctl.here.own_kernels import own_kernels

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        own = own_kernels()[:12]
    except Exception as error:
        return Finding("plans", "none", f"not looked for: {first_line(error)}")
    named: dict[str, list[str]] = {"steps of the engine": [], "FFNs": []}
    for key, entry in kept_json(PLANS).items():
        text = entry.get("plan") if isinstance(entry, dict) else None
        density = re.search(r" density=(-?\d+) ", key)
        is_like = f"(K={K}, N={N}, " in key and gpu in key
        if not is_like or density is None or not isinstance(text, str):
            continue
        is_step = key.startswith("step ")
        if is_step and f" L={num_layers} sparse {own} " not in key:
            continue
        kind = " in FP8" if "kind='e4m3'" in key else ""
        said = f"{1.3 ** int(density[1]):.1%}{kind}: {text}"
        found = named["steps of the engine" if is_step else "FFNs"]
        found += [said] * (said not in found)
    parts = [f"{what} at {', at '.join(found)}" for what, found in named.items() if found]
    if not parts:
        what = "none measured here yet: that is done when the model is opened on a GPU"
        return Finding("plans", "none", what)
    return Finding("plans", "ok", "; ".join(parts))


def _can_write(folder: Path) -> bool:
    """Whether files can be made in `folder`, or it in the nearest folder above that exists."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def find_variables() -> Finding:
    """The environment variables that are set for the kernels, and those that mean nothing."""
    given = {name: value for name in VARIABLES if (value := os.environ.get(name))}
    what = ", ".join(f"{name}={value}" for name, value in given.items()) or "all at their defaults"
    try:
        from twellctl.bundle.twell_config import requested

        requested("auto")
    except ValueError as error:
        return Finding("variables", "bad", str(error), "unset TWELL_ROUTE")
    except Exception:  # without torch, which the line of the libraries says
        return Finding("variables", "none", what)
    return Finding("variables", "ok" if given else "none", what)
