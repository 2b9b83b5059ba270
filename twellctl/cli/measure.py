"""The commands that measure: profile, eval, compare and plot. Nothing heavy is imported before."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twellctl.cli.command import JsonFile, plot_option, plot_writer, result_writer
from twellctl.cli.use import TemplateArguments
from twellctl.errors import UsageError, counted
from twellctl.evaluation.settings import Comparing, Evaluating, Reading
from twellctl.screens import measure as screen
from twellctl.screens import ui


def profile(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")],
    flags: Annotated[dict, Reading],
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile here, for export; - means stdout."),
    ] = None,
    plot: Annotated[Path | None, plot_option("what fires")] = None,
) -> None:
    """Count which neurons fire.

    The counts are for the text of --data, which is required. They are by token and layer, with the
    neurons that never fire and the slots that a packed gate needs. Then come densities by position
    in the window and, if --data is repeated, by kind of text; --json has these by layer, too.
    """
    from twellctl.firing.profiled import PROFILE_KEY
    from twellctl.models.checkpoint import open_checkpoint

    write_result = result_writer(json, PROFILE_KEY, "profile", plot)
    ui.doing(f"reading the text and {model}")
    from twellctl.profile import profile as run

    with ui.progress("windows") as progress:
        done = run(model, **flags, progress=progress)
    shown = partial(screen.profiled, checkpoint=open_checkpoint(model))
    write_result(done, shown, partial(screen.next_of_profile, saved_as=json))


def evaluate(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A SiLU, GELU or ReLU model: folder or hub id.")
    ],
    flags: Annotated[dict, Evaluating],
    chat_template_kwargs: TemplateArguments = None,
    json: JsonFile = None,
    plot: Annotated[Path | None, plot_option("tasks kept against bytes read for a token")] = None,
) -> None:
    """Measure how good a model is.

    On text, it measures cross-entropy, perplexity and density by layer. With --reference, it also
    measures how far the two models agree on that text and on the reference's answers, and gives a
    verdict on what users will notice.

    On tasks, it measures the share of right answers. For choices, that is by likelihood (acc) and
    by likelihood per character (acc_norm), next to the score of guessing. Other tasks are answered
    greedily, by --reference too (default: the source in config.json). It shows which were lost.
    twellctl plot draws several evaluations together.
    """
    from twellctl.evaluation.results import VERSION_KEY

    if plot and "tasks" not in flags:
        raise UsageError("--plot shows tasks kept: give --tasks")
    write_result = result_writer(json, VERSION_KEY, "evaluation", plot)
    ui.doing("loading PyTorch and transformers")
    from twellctl.evaluate import evaluate as run

    stage = ui.Stage()
    done = run(
        model,
        **flags,
        chat_template_kwargs=chat_template_kwargs,
        doing=stage.begin,
        progress=stage.show,
        note=ui.note,
    )
    write_result(done, screen.evaluated)


def compare(
    *,
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The model to compare with: a folder or a hub id.")
    ],
    sparse: Annotated[str, typer.Argument(metavar="SPARSE", help="The model made from it.")],
    flags: Annotated[dict, Comparing],
    chat_template_kwargs: TemplateArguments = None,
    plot: Annotated[Path | None, plot_option("how long answers stay the same")] = None,
) -> None:
    """Show two models' answers side by side.

    Both models answer greedily. For each prompt, it shows where the answers diverge and how each
    continues. Then it shows how far the models agree on BASE's answers, and a verdict on what users
    will notice.
    """
    draw = plot_writer(plot)
    ui.doing("loading PyTorch and transformers")
    from twellctl.compare import compare as run

    stage = ui.Stage()
    done = run(
        base,
        sparse,
        **flags,
        chat_template_kwargs=chat_template_kwargs,
        doing=stage.begin,
        progress=stage.show,
    )
    screen.compared(done)
    draw(done)


def plot(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]FILE",
            help="JSONs of eval, with NAME as a label, or lists of points, which have their own.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="An svg, png or pdf to write.")],
) -> None:
    """Draw what several models keep.

    The plot shows the share of tasks that each model keeps of its reference's, with standard
    errors, against the bytes of linear layers that it reads for a token. Each evaluation is a
    point. It must have tasks that both answer in their own words.
    """
    ui.doing("drawing")
    from twellctl.plot import plot as run

    ui.say(f"{out}: {counted(len(run(files, out)), 'point')}")
