"""The commands that make a model sparse. Nothing heavy is imported before one runs."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twellctl.cli.command import Model, Out, Overwrite, Revision, be_quiet_unless_first
from twellctl.cli.use import TemplateArguments
from twellctl.errors import counted
from twellctl.fitting.settings import Fit
from twellctl.screens import make as screen
from twellctl.screens import ui
from twellctl.training.recipe import Recipe
from twellctl.write import Writing


def convert(
    *,
    model: Model,
    out: Out,
    revision: Revision = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate the time and memory of a fit.")
    ] = False,
    flags: Annotated[dict, Fit],
) -> None:
    """Convert a model with SiLU or GELU gates to ReLU.

    With --data, the model is fitted layer by layer, without end-to-end training, and works at once.
    To continue after an interruption, repeat the command. On several GPUs:
    torchrun --nproc-per-node GPUS -m twellctl convert ...

    Without --data, only config.json changes, and the weights are copied. Such a model talks noise
    until it is fine-tuned.
    """
    be_quiet_unless_first()
    ui.doing(f"converting {model}")
    from twellctl.convert import convert as run
    from twellctl.fitting.source import num_kept
    from twellctl.training.recipe import run_folder

    if dry_run:
        from twellctl.fitting.plan import plan

        screen.planned(plan(model, revision=revision, **flags))
        return
    how = {"revision": revision, "overwrite": overwrite}
    try:
        done = run(model, out, **how, doing=ui.doing, told=screen.fitting, **flags)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        kept = run_folder(out)
        if num_kept(kept) and "data" in flags and not overwrite:
            ui.note(f"{kept} keeps the layers that were fitted: repeat the command to continue")
        raise
    screen.converted(done, model)


def write(
    *,
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The jsonl file to write.")],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Prompts to answer: a jsonl, JSON or parquet file with prompt, instruction or "
            "question, or with messages that end with a user's.",
        ),
    ],
    flags: Annotated[dict, Writing],
    chat_template_kwargs: TemplateArguments = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Let a model answer prompts, as text for convert and finetune.

    A sparse model that is fitted on the original's own answers keeps more of what it can do. MODEL
    can also be the sparse model. After Ctrl-C, the answers in OUT can be used.
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
        overwrite=overwrite,
        doing=stage.begin,
        progress=partial(screen.written_so_far, stage),
        note=ui.note,
        **flags,
    )
    ui.say(
        f"{done.out}: {counted(done.texts, 'text')}, {counted(done.tokens, 'token')}, "
        f"{counted(done.cut, 'text')} cut at "
        f"--max-tokens, {done.drawn / done.seconds:.0f} tokens/s"
    )
    step = f"profile {ui.word(model)}" if done.is_relu else f"convert {ui.word(model)} RELU"
    ui.say(f"next: twellctl {step} --data {ui.word(done.out)}")


def finetune(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")],
    out: Out,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file of settings, or the name of a shipped recipe.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in OUT.run.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate time, memory and disk.")
    ] = False,
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
    ui.doing("loading PyTorch and transformers")
    if dry_run:
        from twellctl.dry_run import as_flags
        from twellctl.dry_run import dry_run as try_out

        tried = try_out(model, settings, ui.note, ui.doing)
        screen.tried_out(tried, as_flags(tried.changes))
        return
    from twellctl.finetune import finetune as run
    from twellctl.screens.run import RunScreen

    how = {"resume": resume, "overwrite": overwrite, "recipe_file": recipe_file}
    screen.finetuned(run(model, out, settings, **how, progress=RunScreen()))


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")],
    out: Out,
    profile: Annotated[
        Path | None,
        typer.Option(help="A file from 'profile --json': slots, and figures for the model card."),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", help="A file from 'eval --json': figures for the model card."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="A file from 'bench decode --json': speeds for the model card."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="fp8",
            help="Round the weights of all linear layers except the LM head to FP8 (e4m3), with "
            "one scale per row.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a folder that runs sparse with TwELL, and dense in any engine.

    transformers uses TwELL with trust_remote_code=True, even without twellctl installed. ReLU is
    written as a sharp SiLU, so engines that support only SiLU, like llama.cpp, mlx-lm and vLLM,
    give the same results.
    """
    ui.doing(f"checking the weights of {model} and writing them")
    from twellctl.export import export as run

    screen.exported(
        run(
            model,
            out,
            profile=profile,
            evaluation=evaluation,
            bench=bench,
            quantize=quantize,
            overwrite=overwrite,
            note=ui.note,
        )
    )


def quickstart(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Run the whole pipeline on a tiny model.

    The model is made on the spot, without a download. Everything takes two or three minutes.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.quickstart import quickstart as run
    from twellctl.screens.run import RunScreen

    def note(title: str) -> None:
        ui.activity.over()
        ui.note(f"- {title}")

    shown = {"note": note, "progress": ui.progress, "run": RunScreen("nothing will be kept")}
    screen.quickstarted(run(out, overwrite=overwrite, **shown))
