"""twellctl bench ...: the commands that measure speed, and their options. No torch here."""

import contextlib
import json as json_text
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from twellctl.cli.command import command, show_help
from twellctl.errors import TwellError, UsageError
from twellctl.screens import ui
from twellctl.screens.bench import benched
from twellctl.screens.bench_decode import decoded, ffn_decoded
from twellctl.screens.bench_train import trained

app = typer.Typer(
    callback=show_help,
    invoke_without_command=True,
    help="Measure TwELL against the dense form, on this GPU.",
)

Route = Annotated[
    list[str] | None,
    typer.Option(
        metavar="auto|twell|portable|fused|dense",
        help="What the TwELL side takes. Repeatable; the first counts. [default: auto]",
    ),
]
Rounds = Annotated[int, typer.Option(help="Samples of each candidate; medians count.")]
Energy = Annotated[
    bool, typer.Option("--energy", help="Energy too, by the GPU's own counter (NVML).")
]
EnergySeconds = Annotated[
    float, typer.Option(help="Seconds a candidate is kept running for its energy.")
]
Seed = Annotated[int, typer.Option(help="Seed of everything drawn.")]
Device = Annotated[
    str | None,
    typer.Option(help="cuda, cuda:1 and so on; cpu only to try the command. [default: cuda]"),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A config.json, or a folder with one: random weights of its shape, with ReLU. Llama, "
        "Mistral, Phi3, Qwen2 or Qwen3. [default: a Llama of 2048 x 5632, 28 layers]",
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(help="Layers of the random model, where its whole does not fit. [default: all]"),
]
Json = Annotated[bool, typer.Option("--json", help="All figures as JSON on stdout, no table.")]


@command(app, "bench ffn --density 0.01 --tokens 2048", name="ffn")
def ffn(
    hidden_size: Annotated[int, typer.Option(help="K, the width of the model.")] = 2048,
    intermediate_size: Annotated[int, typer.Option(help="N, the neurons of the FFN.")] = 5632,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="M, rows at once. Repeatable. [default: 131072, 2048, 256]"),
    ] = None,
    density: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of the neurons that fire; 1 is all. Repeatable. "
            "[default: 0.005, 0.01, 0.02]"
        ),
    ] = None,
    spread: Annotated[
        str, typer.Option(metavar="even|lognormal|heavy", help="How density is spread over tokens.")
    ] = "even",
    heavy_rows: Annotated[
        float | None, typer.Option(help="Of --spread heavy: share of such rows. [default: 0.05]")
    ] = None,
    heavy_density: Annotated[
        float | None, typer.Option(help="Of --spread heavy: their density. [default: 0.5]")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Biases on gate, up and down.")] = False,
    dtype: Annotated[
        str, typer.Option(metavar="bf16|fp16|fp32", help="Of weights and inputs.")
    ] = "bf16",
    route: Route = None,
    slots: Annotated[
        int | None, typer.Option(help="Slots of a tile. [default: as profile would choose them]")
    ] = None,
    rounds: Rounds = 11,
    max_autotune: Annotated[
        bool,
        typer.Option(
            "--max-autotune/--no-max-autotune",
            help="Dense under torch.compile's max-autotune, too; that takes tens of seconds a "
            "token count.",
        ),
    ] = True,
    energy: Energy = False,
    energy_seconds: EnergySeconds = 2.0,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
) -> None:
    """One gated FFN over TwELL against dense ones.

    The dense ones: eager and torch.compile (default and max-autotune), gate and up as two products
    and fused in one. All take turns in one run, and the ratio is over the fastest of them. Inputs
    are synthetic, and no two tokens share more neurons than chance has it. Below 8192 tokens CUDA
    graphs are replayed, else plain calls are timed; max-autotune comes without CUDA graphs of its
    own. Calls go through copies of the weights, so that none lie in the L2 cache.
    """
    if spread != "heavy" and (heavy_rows is not None or heavy_density is not None):
        raise UsageError("heavy-rows and heavy-density are of --spread heavy: give that, too")
    from twellctl.bench.ffn import FfnSettings, bench_ffn
    from twellctl.bench.synthetic import Spread

    heavy = {"heavy_rows": heavy_rows, "heavy_density": heavy_density}
    given = {
        "tokens": tuple(tokens or ()),
        "densities": tuple(density or ()),
        "routes": tuple(route or ()),
    }
    settings = FfnSettings(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        spread=Spread(spread, **{k: v for k, v in heavy.items() if v is not None}),
        bias=bias,
        dtype=dtype,
        slots=slots,
        rounds=rounds,
        max_autotune=max_autotune,
        energy=energy,
        energy_seconds=energy_seconds,
        seed=seed,
        device=device,
        **{name: values for name, values in given.items() if values},
    )
    _show(_measured(bench_ffn, settings), json)


@command(app, "bench model exported --data heldout.jsonl", name="model")
def model(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A ReLU model folder, like an export; with --data."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text for MODEL: jsonl, txt or parquet files, or folders. Repeatable."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of one prefill. Repeatable. [default: 131072, 256]"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="In place of --tokens: so many times --seq-len.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence, at most.")] = 2048,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A config.json, or a folder with one: random weights of its shape, with ReLU. "
            "Llama, Mistral, Phi3, Qwen2 or Qwen3. [default: a Llama of 2048 x 5632, 38 layers]",
        ),
    ] = None,
    layers: Layers = None,
    density: Annotated[
        float, typer.Option(help="Of the random model: share of the neurons that fire.")
    ] = 0.005,
    route: Route = None,
    rounds: Rounds = 5,
    max_autotune: Annotated[
        bool,
        typer.Option(
            "--max-autotune/--no-max-autotune",
            help="Both sides under torch.compile's max-autotune, too; that takes minutes.",
        ),
    ] = False,
    energy: Energy = False,
    energy_seconds: EnergySeconds = 6.0,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
) -> None:
    """A whole model over TwELL against the dense one.

    The prefill of its body, without the LM head: eager and under torch.compile, all by turns in one
    run. The ratio is that of the fastest form of either side. Without MODEL it is a random one.
    Attention is causal SDPA without a mask on every side. Below 8192 tokens CUDA graphs are
    replayed, else plain calls are timed.
    """
    if batch is not None and tokens:
        raise UsageError("batch is in place of --tokens: give one of them")
    from twellctl.bench.model import ModelSettings, bench_model

    given = {
        "data": tuple(data or ()),
        "tokens": (batch * seq_len,) if batch is not None else tuple(tokens or ()),
        "routes": tuple(route or ()),
    }
    settings = ModelSettings(
        model=model,
        text_column=text_column,
        seq_len=seq_len,
        config=config,
        layers=layers,
        density=density,
        rounds=rounds,
        max_autotune=max_autotune,
        energy=energy,
        energy_seconds=energy_seconds,
        seed=seed,
        device=device,
        **{name: values for name, values in given.items() if values},
    )
    _show(_measured(bench_model, settings), json)


@command(app, "bench decode exported --data heldout.jsonl --batch 1", name="decode")
def decode(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A ReLU model folder, like an export; with --data."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text for MODEL's prompts: jsonl, txt or parquet files, or folders."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows of a step, 1 to 64. Repeatable. [default: 1, 16; with --ffn 1, 4, 16, 64]"
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens after it; the last four fifths of the steps count.")
    ] = 160,
    generate: Annotated[
        bool,
        typer.Option("--generate/--no-generate", help="transformers' generate, too; it is slow."),
    ] = True,
    generate_static: Annotated[
        bool,
        typer.Option(
            "--generate-static",
            help="transformers' generate with a static cache and torch.compile, too; that takes "
            "minutes.",
        ),
    ] = False,
    config: Config = None,
    layers: Layers = None,
    ffn: Annotated[
        bool,
        typer.Option(
            "--ffn", help="One FFN alone, in place of a model; of the above only --batch."
        ),
    ] = False,
    hidden_size: Annotated[
        int | None, typer.Option(help="Of --ffn: K, the width of the model. [default: 2048]")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Of --ffn: N, the neurons of the FFN. [default: 5632]")
    ] = None,
    density: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of the neurons that fire. Repeatable. [default: 0.02; with --ffn 0.005, "
            "0.05]"
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Of --ffn: samples of each form. [default: 11]")
    ] = None,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
) -> None:
    """Token by token: a whole model dense and over TwELL.

    Both in the engine of serve-local, the dense form over kernels of its own for few tokens;
    transformers' generate beside them. All continue the same prompts greedily in one run, and the
    medians of the last steps count. Without MODEL it is a random one, of the shape of --config.
    Beside each figure stands its floor: the bytes that a step must read, at the speed at which this
    device copies.
    """
    of_ffn = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    of_ffn |= {"rounds": rounds}
    of_model = {"model": model, "data": tuple(data or ()) or None, "config": config}
    of_model |= {"layers": layers}
    _refuse_strange(of_model if ffn else of_ffn, "--ffn", given=ffn)
    more = {"batches": tuple(batch or ()) or None, "densities": tuple(density or ()) or None}
    more |= {"seed": seed, "device": device}
    given = {k: v for k, v in (more | (of_ffn if ffn else of_model)).items() if v is not None}
    if ffn:
        from twellctl.bench.decode_ffn import DecodeFfnSettings, bench_decode_ffn

        found = _measured(bench_decode_ffn, DecodeFfnSettings(**given))
        _show(found, json, ffn_decoded)
        return
    from twellctl.bench.decode import DecodeSettings, bench_decode

    settings = DecodeSettings(
        text_column=text_column,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        generate=generate,
        generate_static=generate_static,
        **given,
    )
    _show(_measured(bench_decode, settings), json, decoded)


@command(app, "bench train --model --layers 4", name="train")
def train(
    model: Annotated[
        bool,
        typer.Option("--model", help="Steps of a whole random model, in place of one FFN."),
    ] = False,
    hidden_size: Annotated[
        int | None, typer.Option(help="Of the FFN: K, the width of the model. [default: 2048]")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Of the FFN: N, its neurons. [default: 5632]")
    ] = None,
    density: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of the neurons that fire; 1 is all. Repeatable. "
            "[default: 0.005, 0.01, 0.02, 1; with --model one, 0.005]"
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Of the FFN: M, rows at once. Repeatable. [default: 16384]"),
    ] = None,
    spread: Annotated[
        str | None,
        typer.Option(
            help="Of the FFN: how density is spread over tokens: even, lognormal or heavy (5% of "
            "the rows at 50%). [default: even]"
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Of --model: sequences of a step. [default: 16]")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Of --model: tokens of a sequence. [default: 2048]")
    ] = None,
    config: Config = None,
    layers: Layers = None,
    checkpointing: Annotated[
        list[str] | None,
        typer.Option(
            help="Of --model: whether activations are computed again, off or on. Repeatable. "
            "[default: off, on]"
        ),
    ] = None,
    param_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of --model: bfloat16, or float32 under bf16 autocast. [default: bfloat16]"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Samples of each candidate; medians count. [default: 11; with --model 5]"
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
) -> None:
    """Training over TwELL against dense: time, memory and the gradients' errors.

    Forward and backward of one FFN with the L1 penalty, in bf16: dense, eager and under
    torch.compile, gate and up as two products and fused in one; over TwELL at every density. All
    by turns in one run. With --model: steps with AdamW, eager and compiled on both sides. Memory of
    the FFN is what comes on top of x, the weights and the gradient of y.
    """
    of_ffn = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    of_ffn |= {"tokens": tokens, "spread": spread}
    of_model = {"batch": batch, "seq_len": seq_len, "config": config, "layers": layers}
    of_model |= {"checkpointing": checkpointing, "param_dtype": param_dtype}
    _refuse_strange(of_ffn if model else of_model, "--model", given=model)
    given = {"rounds": rounds, "seed": seed, "device": device} | (of_model if model else of_ffn)
    given = {name: value for name, value in given.items() if value is not None}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if model:
        if density and len(density) > 1:
            raise UsageError(f"density is given once with --model, got {len(density)}")
        from twellctl.bench.train_step import TrainStepSettings, bench_train_step

        given |= {"density": density[0]} if density else {}
        found = _measured(bench_train_step, TrainStepSettings(**given))
        _show(found, json, trained)
        return
    from twellctl.bench.synthetic import Spread
    from twellctl.bench.train_ffn import TrainFfnSettings, bench_train_ffn

    given |= {"spread": Spread(spread)} if spread else {}
    given |= {"densities": tuple(density)} if density else {}
    found = _measured(bench_train_ffn, TrainFfnSettings(**given))
    _show(found, json, trained)


def _refuse_strange(options: dict[str, Any], flag: str, *, given: bool) -> None:
    """`UsageError` if one of `options` was given, which `flag`, as it was `given`, excludes."""
    strange = [name for name, value in options.items() if value is not None]
    if not strange:
        return
    name = strange[0].replace("_", "-")
    called = "MODEL" if name == "model" else f"--{name}"
    where = f"leave out {flag}" if given else f"give {flag}, too"
    raise UsageError(f"{called} does not go with this: {where}")


def _measured(bench: Callable[..., Any], settings: Any) -> Any:
    # what a compiler prints is no result
    with contextlib.redirect_stdout(sys.stderr), ui.progress("samples") as progress:
        return bench(settings, note=ui.note, progress=progress)


def _show(found: Any, json: bool, screen: Callable[[Any], None] = benched) -> None:
    if json:
        print(json_text.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        screen(found)
    if found.wrong:
        raise TwellError("; ".join(found.wrong))
