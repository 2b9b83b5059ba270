"""The commands in the order of the help, each with its example."""

from typing import Annotated

import typer

from twellctl.cli import bench, make, measure, pipeline, run_report, use
from twellctl.cli.command import CONTEXT, command, show_help
from twellctl.screens import ui
from twellctl.version import __version__

TRY, MAKE, USE = "Try it", "Make a model sparse", "Use it"
app = typer.Typer(
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
    help="Make pretrained language models sparse, and fast because they are sparse.",
)
_OFTEN = (  # options of finetune that its short help has
    "recipe",
    "data",
    "eval_data",
    "density",
    "max_tokens",
    "batch_size",
    "micro_batch_size",
    "learning_rate",
    "lora_rank",
    "gradient_checkpointing",
    "resume",
    "overwrite",
    "dry_run",
    "plot",
)


def _version(wanted: bool) -> None:
    if wanted:
        ui.say(f"twellctl {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    show_help(context)


command(app, "quickstart --out demo", group=TRY)(make.quickstart)
command(app, "doctor exported", group=TRY)(use.doctor)
command(app, "convert owner/model relu --data answers.jsonl", group=MAKE)(make.convert)
command(app, "write owner/model own.jsonl --prompts prompts.jsonl", group=MAKE)(make.write)
command(app, "draft owner/model head --data answers.jsonl", group=MAKE)(make.draft)
command(app, "finetune relu sparse --recipe standard --data train.jsonl", group=MAKE, shown=_OFTEN)(
    make.finetune
)
command(app, "profile sparse --data heldout.jsonl --json profile.json", group=MAKE)(measure.profile)
command(app, "eval exported --reference owner/model --data heldout.jsonl", group=MAKE, name="eval")(
    measure.evaluate
)
command(app, "compare owner/model exported", group=MAKE)(measure.compare)
command(app, "plot 15%=eval-15.json 22%=eval-22.json kept.svg", group=MAKE)(measure.plot)
command(app, "export sparse exported --profile profile.json", group=MAKE)(make.export)
command(app, "run coder.yaml", group=MAKE)(pipeline.run)
command(app, "report coder", group=MAKE)(run_report.report)
command(app, "generate exported 'Once upon a time'", group=USE)(use.generate)
command(app, "chat exported", group=USE)(use.chat)
command(app, "serve-local exported --port 8000", group=USE)(use.serve_local)
app.add_typer(bench.app, name="bench", rich_help_panel=USE)
