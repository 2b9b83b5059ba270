"""twellctl bench ...: the commands that measure speed. No torch here."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.bench.settings import DecodeSettings, ModelSettings
from twellctl.cli.command import JsonFile, command, plot_option, result_writer, show_help
from twellctl.errors import TwellError
from twellctl.screens import ui
from twellctl.screens.bench import benched, decoded

app = typer.Typer(
    callback=show_help,
    invoke_without_command=True,
    help="Compare the speed of TwELL with the dense form, on this GPU.",
)


@command(app, "bench model exported --data heldout.jsonl", name="model")
def model(*, flags: Annotated[dict, ModelSettings], json: JsonFile = None) -> None:
    """Time a prefill of a whole model, with TwELL and dense.

    It times the model in bf16, without its LM head, eager and under torch.compile. All forms take
    turns in one run, and the ratios compare the fastest ones. Without MODEL, the model is random.
    All forms use causal SDPA without a mask. Below 8192 tokens CUDA graphs are replayed; above,
    plain calls are timed.
    """
    from twellctl.bench.model import bench_model

    _run(bench_model, ModelSettings(**flags), json, benched)


@command(app, "bench decode exported --data heldout.jsonl --batch 1", name="decode")
def decode(
    *,
    flags: Annotated[dict, DecodeSettings],
    json: JsonFile = None,
    plot: Annotated[Path | None, plot_option("steps per second and their floors")] = None,
) -> None:
    """Time decoding token by token of a whole model, with TwELL and dense.

    All forms run in the engine of serve-local. The dense form has its own kernels for few tokens,
    in bf16 and in FP8. All continue the same prompts greedily in one run, and the medians of the
    last steps count. Without MODEL, the model is random, with the shape of --config. Next to each
    time is a lower bound: the bytes that a step must read, at the speed at which the GPU copies.
    """
    from twellctl.bench.decode import bench_decode

    _run(bench_decode, DecodeSettings(**flags), json, decoded, plot)


def _run(
    bench: Callable[..., Any],
    settings: Any,
    json: Path | None,
    screen: Callable[[Any], None],
    plot: Path | None = None,
) -> None:
    write_result = result_writer(json, "command", "bench", plot)
    # what a compiler prints is no result
    with contextlib.redirect_stdout(sys.stderr), ui.progress("samples") as progress:
        found = bench(settings, note=ui.note, progress=progress)
    write_result(found, screen)
    if found.wrong:
        raise TwellError("; ".join(found.wrong))
