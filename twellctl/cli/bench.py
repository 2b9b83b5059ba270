"""twellctl bench ...: the commands that measure speed. No torch here."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.bench.settings import DecodeSettings, ModelSettings
from twellctl.cli.command import JsonFile, command, show_help, telling
from twellctl.errors import TwellError
from twellctl.screens import ui
from twellctl.screens.bench import benched, decoded

app = typer.Typer(
    callback=show_help,
    invoke_without_command=True,
    help="Measure TwELL against the dense form, on this GPU.",
)


@command(app, "bench model exported --data heldout.jsonl", name="model")
def model(*, flags: Annotated[dict, ModelSettings], json: JsonFile = None) -> None:
    """A whole model over TwELL against the dense one.

    The prefill of its body, without the LM head: eager and under torch.compile, the dense one in
    FP8 too, all by turns in one run. The ratios are those of the fastest forms. Without MODEL it is
    a random one. Attention is causal SDPA without a mask on every side. Below 8192 tokens CUDA
    graphs are replayed, else plain calls are timed.
    """
    from twellctl.bench.model import bench_model

    _run(bench_model, ModelSettings(**flags), json, benched)


@command(app, "bench decode exported --data heldout.jsonl --batch 1", name="decode")
def decode(*, flags: Annotated[dict, DecodeSettings], json: JsonFile = None) -> None:
    """Token by token: a whole model dense and over TwELL.

    Both in the engine of serve-local, the dense form over kernels of its own for few tokens, in
    bf16 and in FP8. All continue the same prompts greedily in
    one run, and the medians of the last steps count. Without MODEL it is a random one, of the shape
    of --config. Beside each figure stands its floor: the bytes that a step must read, at the speed
    at which this device copies.
    """
    from twellctl.bench.decode import bench_decode

    _run(bench_decode, DecodeSettings(**flags), json, decoded)


def _run(
    bench: Callable[..., Any], settings: Any, json: Path | None, screen: Callable[[Any], None]
) -> None:
    tell = telling(json, "command", "bench")
    # what a compiler prints is no result
    with contextlib.redirect_stdout(sys.stderr), ui.progress("samples") as progress:
        found = bench(settings, note=ui.note, progress=progress)
    tell(found, screen)
    if found.wrong:
        raise TwellError("; ".join(found.wrong))
