"""The commands that measure: profile, eval and compare. Nothing heavy is imported before."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twellctl.cli.command import JsonFile, telling
from twellctl.cli.use import TemplateArguments, template_arguments
from twellctl.screens import measure as screen
from twellctl.screens import ui

TextColumn = Annotated[str, typer.Option(help="The column that holds the text.")]
Windows = Annotated[int, typer.Option(help="Windows, at even strides through the text.")]
SeqLen = Annotated[
    int | None, typer.Option(help="Tokens of a window. [default: 1024, or the context if shorter]")
]
_KINDS = (
    "Text: jsonl, txt or parquet files, or folders. Repeatable: each is a kind of text, by the "
    "file's name or NAME; equal names are one kind."
)


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")],
    data: Annotated[list[str], typer.Option(metavar="[NAME=]FILE", help=_KINDS)],
    text_column: TextColumn = "text",
    windows: Windows = 128,
    seq_len: SeqLen = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile here, for export; - is stdout."),
    ] = None,
) -> None:
    """Count which neurons fire.

    By token and layer; dead ones too, and the slots a packed gate needs. Then by position
    in the window, and by kind of text if --data names several; --json holds these by layer too.
    """
    from twellctl.firing.profiled import PROFILE_KEY

    tell = telling(json, PROFILE_KEY, "profile")
    ui.doing(f"reading the text and {model}")
    from twellctl.profile import profile as run

    with ui.progress("windows") as progress:
        done = run(
            model,
            data,
            text_column=text_column,
            windows=windows,
            seq_len=seq_len,
            progress=progress,
        )
    tell(done, partial(screen.profiled, saved_as=json))


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, SiLU or ReLU: a folder or a hub id.")
    ],
    reference: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model with the same tokenizer, to compare with."),
    ] = None,
    data: Annotated[list[str] | None, typer.Option(metavar="[NAME=]FILE", help=_KINDS)] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help='A jsonl file of {"query", "choices", "gold"}, of {"prompt", "answer"} or of '
            '{"prompt", "entry_point", "tests"}, or a folder of them. Repeatable.',
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A jsonl file of {"prompt"} or {"messages"}, for both models to answer. '
            "[default: the tasks, or what opens the windows of --data]",
        ),
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run the code that the models write for tests, in processes with limits.",
        ),
    ] = False,
    chat_template_kwargs: TemplateArguments = None,
    text_column: TextColumn = "text",
    windows: Windows = 128,
    seq_len: SeqLen = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Ask only so many questions of each task, the first ones, and prompts."),
    ] = None,
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
    done = run(
        model,
        data or (),
        reference=reference,
        tasks=tasks or (),
        prompts=prompts,
        run_code=run_code,
        text_column=text_column,
        windows=windows,
        seq_len=seq_len,
        limit=limit,
        chat_template_kwargs=template_arguments(chat_template_kwargs),
        doing=stage.begin,
        progress=stage.show,
        note=ui.note,
    )
    tell(done, screen.evaluated)


def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The model to compare with: a folder or a hub id.")
    ],
    sparse: Annotated[
        str, typer.Argument(metavar="SPARSE", help="The model that was made from it.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A jsonl file of {"prompt"} or {"messages"}. [default: eight of our own]',
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Prompts to ask, at even strides. [default: 8]", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    chat_template_kwargs: TemplateArguments = None,
) -> None:
    """Show two models' answers side by side.

    Both answer greedily; of each pair, where they part and how each goes on. Then how far they
    agree on what BASE answers, and in words what users will notice.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.compare import compare as run

    stage = ui.Stage()
    screen.compared(
        run(
            base,
            sparse,
            prompts=prompts,
            limit=limit,
            max_tokens=max_tokens,
            chat_template_kwargs=template_arguments(chat_template_kwargs),
            doing=stage.begin,
            progress=stage.show,
        )
    )
