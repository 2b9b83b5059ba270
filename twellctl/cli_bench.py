"""twellctl bench ...: the two commands that measure speed, and their options. No torch here."""

import json as json_text
from typing import Annotated, Any

import typer

from twellctl import ui, ui_bench
from twellctl.errors import TwellError, UsageError

app = typer.Typer(rich_markup_mode=None, help="Measure TwELL against the dense form, on this GPU.")

Density = Annotated[
    list[float] | None,
    typer.Option(help="Share of the neurons that fire, like 0.005; 1: all. Repeatable."),
]
Route = Annotated[
    list[str] | None,
    typer.Option(
        help="What the TwELL side takes: auto, twell, dense or portable. Repeatable; the first "
        "counts. [default: auto]"
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
Json = Annotated[bool, typer.Option("--json", help="All figures as JSON on stdout, no table.")]


@app.command("ffn")
def ffn(
    hidden_size: Annotated[int, typer.Option(help="K, the width of the model.")] = 2048,
    intermediate_size: Annotated[int, typer.Option(help="N, the neurons of the FFN.")] = 5632,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="M, rows at once. Repeatable. [default: 131072, 2048, 256]"),
    ] = None,
    density: Density = None,
    spread: Annotated[
        str, typer.Option(help="How density is spread over tokens: even, lognormal or heavy.")
    ] = "even",
    heavy_rows: Annotated[
        float | None, typer.Option(help="Of --spread heavy: share of such rows. [default: 0.05]")
    ] = None,
    heavy_density: Annotated[
        float | None, typer.Option(help="Of --spread heavy: their density. [default: 0.5]")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Biases on gate, up and down.")] = False,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
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
    from twellctl.bench_ffn import FfnSettings, bench_ffn
    from twellctl.synthetic import Spread

    heavy = {"heavy_rows": heavy_rows, "heavy_density": heavy_density}
    given = {
        "tokens": tokens and tuple(tokens),
        "densities": density and tuple(density),
        "routes": route and tuple(route),
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
    with ui.progress("samples") as progress:
        found = bench_ffn(settings, note=ui.note, progress=progress)
    _show(found, json)


def _show(found: Any, json: bool) -> None:
    if json:
        print(json_text.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        ui_bench.benched(found)
    if found.wrong:
        raise TwellError("; ".join(found.wrong))
