"""twellctl bench ...: the commands that measure speed. No torch here."""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.bench.settings import DecodeSettings, ExactSettings, ModelSettings
from twellctl.cli.command import JsonFile, command, plot_option, result_writer, show_help
from twellctl.cli.make import Prompts
from twellctl.errors import TwellError
from twellctl.screens import ui
from twellctl.screens.bench import benched, decoded, drafted

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


@command(app, "bench exact relu --original Qwen/Qwen2.5-1.5B --prompts prompts.jsonl", name="exact")
def exact(
    *,
    draft: Annotated[
        str,
        typer.Argument(metavar="DRAFT", help="A draft head, or a fit as convert --data makes it."),
    ],
    prompts: Prompts,
    original: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model that DRAFT was made for. [default: the one in its folder, or what it "
            "names as source]",
        ),
    ] = None,
    flags: Annotated[dict, ExactSettings],
    json: JsonFile = None,
) -> None:
    """Time the same answers with --exact and without, and compare their tokens.

    The prompts are answered by the original in its fastest and in its stable form, by a fit alone,
    and with --exact: with as many drafts as pay, with 1, 3, 5 and 7 in each round, and with drafts
    from the text itself alone. Each form answers all prompts twice, and the second time
    counts. If --exact gives other tokens than the original with --stable, the command fails.
    """
    from twellctl.bench.exact import bench_exact

    _run(partial(bench_exact, draft, prompts, original), ExactSettings(**flags), json, drafted)


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
