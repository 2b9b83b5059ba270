"""The commands that measure: profile, eval and compare. Nothing heavy is imported before."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twellctl.cli.command import JsonFile, telling
from twellctl.cli.use import TemplateArguments
from twellctl.evaluation.settings import Comparing, Evaluating, Reading
from twellctl.screens import measure as screen
from twellctl.screens import ui


def profile(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")],
    flags: Annotated[dict, Reading],
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile here, for export; - is stdout."),
    ] = None,
) -> None:
    """Count which neurons fire.

    On the text of --data, which must be given. By token and layer; dead ones too, and the slots a
    packed gate needs. Then by position in the window, and by kind of text if --data names several;
    --json holds these by layer too.
    """
    from twellctl.firing.profiled import PROFILE_KEY

    tell = telling(json, PROFILE_KEY, "profile")
    ui.doing(f"reading the text and {model}")
    from twellctl.profile import profile as run

    with ui.progress("windows") as progress:
        done = run(model, **flags, progress=progress)
    tell(done, screen.profiled, partial(screen.next_of_profile, saved_as=json))


def evaluate(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, SiLU or ReLU: a folder or a hub id.")
    ],
    flags: Annotated[dict, Evaluating],
    chat_template_kwargs: TemplateArguments = None,
    json: JsonFile = None,
) -> None:
    """Measure how good a model is.

    On text: cross-entropy, perplexity, density by layer. With --reference how far the two agree
    there, and on answers: the reference answers, both models read that, and a verdict says in words
    what users will notice.

    On tasks: the share of right answers, by likelihood (acc) and by likelihood per character
    (acc_norm) of choices, beside what guessing gets; or in the model's own words, greedily, beside
    --reference (the source that config.json names): what was lost, and the shortest lost ones.
    """
    from twellctl.evaluation.results import VERSION_KEY

    tell = telling(json, VERSION_KEY, "evaluation")
    ui.doing("loading PyTorch and transformers")
    from twellctl.evaluate import evaluate as run

    stage = ui.Stage()
    shown = {"doing": stage.begin, "progress": stage.show, "note": ui.note}
    done = run(model, **flags, chat_template_kwargs=chat_template_kwargs, **shown)
    tell(done, screen.evaluated)


def compare(
    *,
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The model to compare with: a folder or a hub id.")
    ],
    sparse: Annotated[
        str, typer.Argument(metavar="SPARSE", help="The model that was made from it.")
    ],
    flags: Annotated[dict, Comparing],
    chat_template_kwargs: TemplateArguments = None,
) -> None:
    """Show two models' answers side by side.

    Both answer greedily; of each pair, where they part and how each goes on. Then how far they
    agree on what BASE answers, and in words what users will notice.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.compare import compare as run

    stage = ui.Stage()
    how = {"chat_template_kwargs": chat_template_kwargs, "doing": stage.begin}
    screen.compared(run(base, sparse, **flags, **how, progress=stage.show))
