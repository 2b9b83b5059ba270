"""Exports of tiny random models, and vLLM in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twellctl.convert import convert
from twellctl.export import export
from twellctl.profile import profile

HERE = Path(__file__).parent
SIZES = {  # heads of 32, which vLLM's attention has on CPUs, too
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="session")
def sizes() -> dict:
    """Of a tiny model that vLLM takes."""
    return SIZES


@pytest.fixture(scope="session")
def make_export(make_model, text_file, tmp_path_factory):
    """`make_export(family, profiled=True, quantize=None, **config)`: a random model, exported."""

    def make(family: str, *, profiled: bool = True, quantize: str | None = None, **changes) -> Path:
        model = make_model(family, seed=5, **SIZES | changes)
        folder = tmp_path_factory.mktemp(f"vllm-{family}")
        convert(model, folder / "relu")
        found = profile(folder / "relu", [text_file], windows=2, seq_len=32) if profiled else None
        export(folder / "relu", folder / family, profile=found, quantize=quantize)
        return folder / family

    return make


@pytest.fixture(scope="session")
def vllm_environment(tmp_path_factory) -> dict[str, str]:
    """Variables for vLLM on a CPU, with caches of its own."""
    home = str(tmp_path_factory.mktemp("vllm-home"))
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": f"{home}/modules",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": home,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="session")
def ask_vllm(vllm_environment, tmp_path_factory):
    """`ask_vllm(*folders, prompts=..., **settings)`: the answers of ask.py, and vLLM's log.

    `fails`: that it must fail; `variables`: more of the environment.
    """

    def ask(*folders: Path, fails=False, variables=(), new_tokens=8, **request) -> tuple[list, str]:
        request |= {"folders": list(map(str, folders)), "new_tokens": new_tokens}
        alone = request.get("tensor_parallel_size", 1) == 1
        environment = vllm_environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not alone))}
        if not alone:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        folder = tmp_path_factory.mktemp("answer")
        done = subprocess.run(
            [sys.executable, HERE / "ask.py", json.dumps(request), folder / "answers.json"],
            env=environment | dict(variables),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )
        assert (done.returncode != 0) == fails, done.stdout[-5000:]
        return [] if fails else json.loads((folder / "answers.json").read_text()), done.stdout

    return ask
