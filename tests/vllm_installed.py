"""Whether vLLM is there to be tested in."""

import importlib.util

import pytest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: tests/vllm_plugin/environment.sh DIR makes an environment",
)
