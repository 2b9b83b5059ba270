"""Tasks solved through `vllm serve`, with twellctl's plugin or vLLM alone. For developers.

    python .ci/vllm_tasks.py EXPORT HumanEval.jsonl --max-model-len 4096

It needs a GPU, vLLM, and twellctl importable with what its kernels need. It downloads nothing.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from twellctl.evaluation.questions import messages_of, read_tasks, right
from twellctl.text.tokens import Messages

Answer = tuple[str, str, int]  # text, why it ended (or the error), number of tokens
app = typer.Typer(pretty_exceptions_enable=False)
STREAMS = 64


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT")],
    tasks: Annotated[str, typer.Argument(metavar="TASKS")],
    options: Annotated[list[str], typer.Argument(help="options of vllm serve")] = (),
    own: bool = False,
    max_tokens: int = 512,
    out: Path = Path("served.json"),
):
    """Solve TASKS through `vllm serve`, greedily, judged as `twellctl eval --run-code` does.

    --own takes vLLM's own class. Answers go to --out, the server's log to a file next to it.
    """
    (task,) = read_tasks([tasks])
    log = out.with_suffix(".log")
    server, port = _start_server(folder, options, own, log)
    answer = _client(port, str(folder), max_tokens)
    try:
        _wait_for(server, answer, log)
        begin = time.time()
        with ThreadPoolExecutor(STREAMS) as pool:
            answers = list(pool.map(answer, map(messages_of, task.questions)))
        seconds = time.time() - begin
    finally:
        server.terminate()
        server.wait()
    texts, ends, tokens = zip(*answers, strict=True)
    solved = right(task.questions, texts)
    print(f"{sum(solved):.0f} of {len(solved)} of {task.name}, {sum(tokens)} tokens in", end=" ")
    print(f"{seconds:.0f} s, {ends.count('length')} cut", *set(ends) - {"stop", "length"})
    lines = log.read_text().splitlines()
    print(*(line for line in lines if "TwELL, rank" in line), sep="\n")  # how FFNs run
    out.write_text(json.dumps({"ok": solved, "answers": answers}))


def _start_server(
    folder: Path, options: Sequence[str], own: bool, log: Path
) -> tuple[subprocess.Popen, int]:
    """`vllm serve` on a free port, which is returned, too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--port", str(port), "--max-num-seqs", str(STREAMS), *options]
    variables = os.environ | ({"VLLM_PLUGINS": ""} if own else {})
    with log.open("w") as to:
        return subprocess.Popen(command, env=variables, stdout=to, stderr=to), port


def _client(port: int, model: str, max_tokens: int) -> Callable[[Messages], Answer]:
    """A function from a chat's messages to the greedy answer."""
    from openai import OpenAI, OpenAIError  # vLLM brings it

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def answer(messages: Messages) -> Answer:
        try:
            found = client.chat.completions.create(
                model=model,
                messages=messages,
                temperature=0,
                top_p=1,
                max_tokens=max_tokens,
                extra_body={"repetition_penalty": 1},
                timeout=300,
            )
        except OpenAIError as error:
            return "", str(error), 0
        one = found.choices[0]
        return one.message.content or "", one.finish_reason, found.usage.completion_tokens

    return answer


def _wait_for(server: subprocess.Popen, answer: Callable[[Messages], Answer], log: Path) -> None:
    """Return when the server answers; exit if it has ended."""
    while answer([{"role": "user", "content": "Hello"}])[1] == "Connection error.":
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}: {log}")
        time.sleep(1)


if __name__ == "__main__":
    app()
