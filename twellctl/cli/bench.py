"""twellctl bench ...: the commands that measure speed. No torch here."""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.bench.settings import (
    DecodeFfnSettings,
    DecodeSettings,
    FfnSettings,
    ModelSettings,
    TrainFfnSettings,
    TrainStepSettings,
)
from twellctl.cli.command import command, show_help
from twellctl.cli.flags import made, takes, takes_either
from twellctl.cli.json_file import JsonFile, check_json_file, tell
from twellctl.errors import TwellError, UsageError
from twellctl.files.strict_json import to_json
from twellctl.screens import ui
from twellctl.screens.bench import benched
from twellctl.screens.bench_decode import decoded, ffn_decoded
from twellctl.screens.bench_train import trained

app = typer.Typer(
    callback=show_help,
    invoke_without_command=True,
    help="Measure TwELL against the dense form, on this GPU.",
)


@command(app, "bench ffn --density 0.01 --tokens 2048", name="ffn")
@takes(FfnSettings)
def ffn(*, flags: dict[str, Any], json: JsonFile = None) -> None:
    """One gated FFN over TwELL against dense ones.

    The dense ones: eager and torch.compile (default and max-autotune), gate and up as two products
    and fused in one; in FP8, with scales by row and by tensor, compiled. All take turns in one run,
    and the ratios are over the fastest of them, and over the fastest in FP8. Inputs are synthetic,
    and no two tokens share more neurons than chance has it. Below 8192 tokens CUDA graphs are
    replayed, else plain calls are timed; max-autotune comes without CUDA graphs of its own. Calls
    go through copies of the weights, so that none lie in the L2 cache.
    """
    settings = made(FfnSettings, flags)
    from twellctl.bench.ffn import bench_ffn

    _run(bench_ffn, settings, json, benched)


@command(app, "bench model exported --data heldout.jsonl", name="model")
@takes(ModelSettings)
def model(
    *,
    flags: dict[str, Any],
    batch: Annotated[
        int | None, typer.Option(help="In place of --tokens: so many times --seq-len.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """A whole model over TwELL against the dense one.

    The prefill of its body, without the LM head: eager and under torch.compile, the dense one in
    FP8 too, all by turns in one run. The ratios are those of the fastest forms. Without MODEL it is
    a random one. Attention is causal SDPA without a mask on every side. Below 8192 tokens CUDA
    graphs are replayed, else plain calls are timed.
    """
    if batch is not None:
        if "tokens" in flags:
            raise UsageError("batch is in place of --tokens: give one of them")
        flags["tokens"] = [batch * flags.get("seq-len", ModelSettings.seq_len)]
    settings = made(ModelSettings, flags)
    from twellctl.bench.model import bench_model

    _run(bench_model, settings, json, benched)


@command(app, "bench decode exported --data heldout.jsonl --batch 1", name="decode")
@takes_either("--ffn", DecodeSettings, DecodeFfnSettings, of=("", "--ffn"))
def decode(
    *,
    ffn: Annotated[
        bool,
        typer.Option(
            "--ffn",
            help="One FFN alone, in place of a model: then --batch, --density, --quantize, "
            "--dense-fp8, --seed, --device and what is of --ffn.",
        ),
    ] = False,
    flags: dict[str, Any],
    json: JsonFile = None,
) -> None:
    """Token by token: a whole model dense and over TwELL.

    Both in the engine of serve-local, the dense form over kernels of its own for few tokens, in
    bf16 and in FP8; transformers' generate beside them. All continue the same prompts greedily in
    one run, and the medians of the last steps count. Without MODEL it is a random one, of the shape
    of --config. Beside each figure stands its floor: the bytes that a step must read, at the speed
    at which this device copies.
    """
    settings = made(DecodeFfnSettings if ffn else DecodeSettings, flags, "--ffn", ffn)
    if ffn:
        from twellctl.bench.decode_ffn import bench_decode_ffn

        _run(bench_decode_ffn, settings, json, ffn_decoded)
        return
    from twellctl.bench.decode import bench_decode

    _run(bench_decode, settings, json, decoded)


@command(app, "bench train --model --layers 4", name="train")
@takes_either("--model", TrainFfnSettings, TrainStepSettings, of=("the FFN", "--model"))
def train(
    *,
    model: Annotated[
        bool,
        typer.Option("--model", help="Steps of a whole random model, in place of one FFN."),
    ] = False,
    flags: dict[str, Any],
    json: JsonFile = None,
) -> None:
    """Training over TwELL against dense: time, memory and the gradients' errors.

    Forward and backward of one FFN with the L1 penalty, in bf16: dense, eager and under
    torch.compile, gate and up as two products and fused in one; over TwELL at every density. All
    by turns in one run. With --model: steps with AdamW, eager and compiled on both sides. Memory of
    the FFN is what comes on top of x, the weights and the gradient of y.
    """
    settings = made(TrainStepSettings if model else TrainFfnSettings, flags, "--model", model)
    if model:
        from twellctl.bench.train_step import bench_train_step as bench
    else:
        from twellctl.bench.train_ffn import bench_train_ffn as bench
    _run(bench, settings, json, trained)


def _run(
    bench: Callable[..., Any], settings: Any, json: Path | None, screen: Callable[[Any], None]
) -> None:
    check_json_file(json, "command", "bench")
    # what a compiler prints is no result
    with contextlib.redirect_stdout(sys.stderr), ui.progress("samples") as progress:
        found = bench(settings, note=ui.note, progress=progress)
    tell(json, lambda: to_json(found.to_json(), indent=2) + "\n", partial(screen, found))
    if found.wrong:
        raise TwellError("; ".join(found.wrong))
