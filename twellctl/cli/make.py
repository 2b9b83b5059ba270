"""The commands that make a model sparse. Nothing heavy is imported before one runs."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twellctl.cli.command import (
    Model,
    Out,
    Overwrite,
    Revision,
    be_quiet_unless_first,
    plot_option,
    plot_writer,
    process_rank,
)
from twellctl.cli.run_report import write_report
from twellctl.cli.use import Original, TemplateArguments
from twellctl.errors import TwellError, UsageError
from twellctl.fitting.settings import Fit
from twellctl.heads.settings import HeadTraining
from twellctl.models.schemes import SCHEMES
from twellctl.screens import make as screen
from twellctl.screens import ui
from twellctl.training.recipe import Recipe
from twellctl.write import Writing

Prompts = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Prompts to answer: a jsonl, JSON, parquet or Arrow file with prompt, instruction or "
        "question, or with messages.",
    ),
]
ReluModel = Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")]
DryFit = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only estimate the time and memory of a fit; no text is needed."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only estimate time, memory and disk.")]
RecipeName = Annotated[
    str | None, typer.Option(help="A YAML file of settings, or the name of a shipped recipe.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the last checkpoint in OUT.run.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(help="A file from 'profile --json': slots, and figures for the model card."),
]
EvaluationFile = Annotated[
    Path | None,
    typer.Option("--eval", help="A file from 'eval --json': figures for the model card."),
]
BenchFile = Annotated[
    Path | None,
    typer.Option(help="A file from 'bench decode --json': speeds for the model card."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(SCHEMES),
        help="Round all linear layers except the LM head. "
        + " ".join(f"{one.name}: {one.numbers}." for one in SCHEMES.values()),
    ),
]


def convert(
    *,
    model: Model,
    out: Out,
    revision: Revision = None,
    overwrite: Overwrite = False,
    dry_run: DryFit = False,
    plot: Annotated[Path | None, plot_option("what a fit came to, by layer")] = None,
    flags: Annotated[dict, Fit],
) -> None:
    """Convert a model with SiLU or GELU gates to ReLU.

    With --data, the model is fitted layer by layer, without end-to-end training, and works at once.
    To continue after an interruption, repeat the command. On several GPUs:
    torchrun --nproc-per-node GPUS -m twellctl convert ...

    With --bits 4, it is also rounded; with --keep-activation, nothing else is done to it.

    Without --data, only config.json changes, and the weights are copied. Such a model talks noise
    until it is fine-tuned.
    """
    be_quiet_unless_first()
    if plot and (dry_run or "data" not in flags):
        raise UsageError("--plot shows what a fit came to: give --data, and no --dry-run")
    draw = plot_writer(plot)
    ui.doing(f"converting {model}")
    from twellctl.convert import convert as run

    if dry_run:
        from twellctl.fitting.plan import plan

        screen.planned(plan(model, revision=revision, **flags))
        return
    try:
        done = run(
            model,
            out,
            revision=revision,
            overwrite=overwrite,
            doing=ui.doing,
            progress=screen.fitting,
            **flags,
        )
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        if "data" in flags and not overwrite:
            _note_kept_layers(out)
        raise
    screen.converted(done, model)
    if not process_rank():
        draw(done)


def _note_kept_layers(out: Path) -> None:
    """After an interruption of `convert`: that repeating it continues, if layers were fitted."""
    from twellctl.files.made_of import Record
    from twellctl.fitting.source import num_kept
    from twellctl.training.recipe import run_folder

    run = run_folder(out)
    with contextlib.suppress(TwellError):
        if num_kept(Record.read(run)):
            ui.note(f"{run} keeps the layers that were fitted: repeat the command to continue")


def write(
    *,
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The jsonl file to write.")],
    prompts: Prompts,
    flags: Annotated[dict, Writing],
    chat_template_kwargs: TemplateArguments = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Let the original of MODEL, a draft head or a fit, write. Nothing is drafted, for "
            "many answers at once are faster so.",
        ),
    ] = False,
    original: Original = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Let a model answer prompts, as text for convert and finetune.

    A sparse model that is fitted on the original's own answers keeps more of what it can do. MODEL
    can also be the sparse model. After an interruption, the answers in OUT can be used. To
    continue, repeat the command.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.write import write as run

    stage = ui.Stage()
    done = run(
        model,
        out,
        prompts=prompts,
        revision=revision,
        chat_template_kwargs=chat_template_kwargs,
        exact=exact,
        original=original,
        overwrite=overwrite,
        doing=stage.begin,
        progress=partial(screen.written_so_far, stage),
        note=ui.note,
        **flags,
    )
    screen.written(done)


def draft(
    *,
    model: Model,
    out: Out,
    revision: Revision = None,
    overwrite: Overwrite = False,
    flags: Annotated[dict, HeadTraining],
) -> None:
    """Train a draft head: one layer that guesses what MODEL writes next.

    Exact decoding keeps the guesses that MODEL would have written itself. The head learns from text
    that MODEL reads, best its own answers, and MODEL is not changed. At the end it says what of its
    drafts MODEL would keep, on text that was held out.

    It takes one GPU, or the CPU. A training that was interrupted leaves nothing, and begins anew.
    """
    be_quiet_unless_first()
    ui.doing("loading PyTorch and transformers")
    from twellctl.draft import draft as run

    stage = ui.Stage()
    done = run(
        model,
        out,
        revision=revision,
        overwrite=overwrite,
        doing=stage.begin,
        progress=partial(screen.drafting, stage),
        **flags,
    )
    screen.drafted(done, model)


def finetune(
    *,
    model: ReluModel,
    out: Out,
    recipe: RecipeName = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    plot: Annotated[Path | None, plot_option("loss, density and price by step")] = None,
    target_sparsity: Annotated[float | None, typer.Option(hidden=True)] = None,  # 1 - density
    flags: Annotated[dict, Recipe],
) -> None:
    """Train a ReLU model to be sparse.

    Each neuron that fires has a price, which is adjusted until --density is met.

    Flags override the recipe, and the recipe overrides the defaults. On several GPUs:
    torchrun --nproc-per-node GPUS -m twellctl finetune ...
    """
    from twellctl.training.recipe import check_report_to, file_of, recipe_to_resume, resolve_recipe

    be_quiet_unless_first()
    if target_sparsity is not None:
        flags["target_sparsity"] = target_sparsity
    recipe_file = file_of(recipe)
    settings = resolve_recipe(recipe or recipe_to_resume(out, resume), flags)
    check_report_to(settings.report_to)
    if plot and dry_run:
        raise UsageError("--plot shows a run that was taken: without --dry-run")
    draw = plot_writer(plot)
    ui.doing("loading PyTorch and transformers")
    if dry_run:
        _try_out(model, settings)
        return
    from twellctl.finetune import finetune as run
    from twellctl.screens.run import RunScreen

    done = run(
        model,
        out,
        settings,
        resume=resume,
        overwrite=overwrite,
        recipe_file=recipe_file,
        progress=RunScreen(),
    )
    screen.finetuned(done)
    if not process_rank():
        draw(done)


def _try_out(model: str, settings: Recipe) -> None:
    """`finetune --dry-run`."""
    from twellctl.dry_run import as_flags, dry_run

    tried = dry_run(model, settings, ui.note, ui.doing)
    screen.tried_out(tried, as_flags(tried.changes))


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A ReLU model folder, or one that 'convert --bits 4 --keep-activation' wrote.",
        ),
    ],
    out: Out,
    profile: ProfileFile = None,
    evaluation: EvaluationFile = None,
    bench: BenchFile = None,
    quantize: Quantize = None,
    with_original: Annotated[
        bool,
        typer.Option(
            "--with-original",
            help="Put the model that MODEL was made from into OUT as well, for --exact without "
            "--original. Weights that are equal in both lie there once.",
        ),
    ] = False,
    original: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --with-original: that model. [default: the one in MODEL's folder, or what "
            "its config.json names as source]",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a folder that runs sparse with TwELL, and dense in any engine.

    transformers uses TwELL with trust_remote_code=True, even without twellctl installed. ReLU is
    written as a sharp SiLU, so engines that support only SiLU, like llama.cpp, mlx-lm and vLLM,
    give the same results.

    A model in 4 bits that kept its activation stays as it is, and needs no code of ours. With
    --with-original, OUT is all that --exact needs.
    """
    ui.doing(f"checking the weights of {model} and writing them")
    from twellctl.export import export as run

    done = run(
        model,
        out,
        profile=profile,
        evaluation=evaluation,
        bench=bench,
        quantize=quantize,
        with_original=with_original,
        original=original,
        overwrite=overwrite,
        note=ui.note,
    )
    screen.exported(done)


def quickstart(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Run the whole pipeline on a tiny model.

    The model is made on the spot, without a download. Everything takes about two minutes on two
    cores, and ends with a page to open, report.html in OUT.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.quickstart import quickstart as run
    from twellctl.screens.run import RunScreen

    def note(title: str) -> None:
        ui.activity.over()
        ui.note(f"- {title}")

    done = run(
        out,
        overwrite=overwrite,
        note=note,
        progress=ui.progress,
        run=RunScreen("nothing will be kept"),
    )
    note("report: what changed, and what fires")
    screen.quickstarted(done, write_report(done.out))
