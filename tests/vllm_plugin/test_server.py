"""`vllm serve` on an export, and the openai client before it."""

import concurrent.futures
import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers_judge import assert_as_transformers, needs_vllm

pytestmark = needs_vllm
STREAMS = 32
NEW_TOKENS = 12


@contextlib.contextmanager
def serving(folder, environment, log):
    """vLLM's server in a process of its own, which is over when the block is; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["--port", port, "--max-model-len", 256, "--max-num-seqs", STREAMS, "--enforce-eager"]
    command = [Path(sys.executable).with_name("vllm"), "serve", folder, *words]
    with log.open("w") as file:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield process, f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def stream(client, model: str, prompt: list[int]) -> dict:
    """The tokens of one streamed completion and the log-probabilities of the new ones."""
    tokens, logprobs = [], []
    for chunk in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ):
        for choice in chunk.choices:
            tokens += choice.token_ids or []
            logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
    return {"tokens": [*prompt, *tokens], "logprobs": logprobs}


def test_streams_side_by_side(make_export, vllm_environment, tmp_path):
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    folder, log = make_export("llama"), tmp_path / "log"
    prompts = [[(11 * i + 5 * j) % 512 for j in range(4 + i)] for i in range(STREAMS)]
    with serving(folder, vllm_environment, log) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        end = time.monotonic() + 300
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(openai.APIError):
                (model,) = client.models.list().data
                break
            time.sleep(0.5)
        assert process.poll() is None, log.read_text()[-5000:]
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            rows = list(pool.map(lambda prompt: stream(client, model.id, prompt), prompts))
    (line,) = re.findall(r"TwELL, rank 0 of 1: (.*)", log.read_text())
    assert "2 FFNs 128 x 320" in line
    assert "plain PyTorch: the kernels need an NVIDIA GPU" in line
    for row, prompt in zip(rows, prompts, strict=True):
        assert len(row["tokens"]) == len(prompt) + NEW_TOKENS
        assert len(row["logprobs"]) == NEW_TOKENS
    assert_as_transformers(folder, rows)
