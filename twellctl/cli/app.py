"""The commands and their options. Nothing heavy is imported before a command runs."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.cli import bench, interrupts, measure
from twellctl.cli.command import CONTEXT, command, show_help
from twellctl.cli.flags import made, takes
from twellctl.errors import TwellError, UsageError, reason
from twellctl.files.strict_json import parse_json
from twellctl.fitting.settings import Fit
from twellctl.screens import serving, ui
from twellctl.screens.convert import converted, fitting, planned
from twellctl.screens.doctor import diagnosed
from twellctl.screens.export import exported
from twellctl.screens.finetune import finetuned, tried_out
from twellctl.screens.generate import generated
from twellctl.screens.quickstart import quickstarted
from twellctl.training.recipe import Recipe
from twellctl.version import __version__

MAKE, USE = "Make a model sparse", "Use it"
app = typer.Typer(
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
    help="Make pretrained language models sparse, and fast because they are sparse.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder or a hub id.")]
LocalModel = Annotated[str, typer.Argument(metavar="MODEL", help="A ReLU model folder.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A chat template (Jinja) in the place of the model's."),
]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="What the chat template is to know: '{\"enable_thinking\": false}'."
    ),
]


def template_arguments(given: str | None) -> dict[str, Any]:
    """The object in --chat-template-kwargs; `UsageError` for what is none."""
    try:
        found = parse_json(given) if given else {}
    except ValueError as error:
        raise UsageError(f"chat-template-kwargs is no JSON ({reason(error)})") from error
    if not isinstance(found, dict):
        raise UsageError(f"chat-template-kwargs must be a JSON object, got {given}")
    return found


def _version(wanted: bool) -> None:
    if wanted:
        ui.say(f"twellctl {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    show_help(context)


@command(app, "convert owner/model relu --data answers.jsonl", group=MAKE)
@takes(Fit)
def convert(
    *,
    model: Model,
    out: Out,
    revision: Revision = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what a fit would take: time and memory.")
    ] = False,
    flags: dict[str, Any],
) -> None:
    """Make a model with SiLU or GELU gates ReLU.

    With --data it is fitted: layer by layer, by least squares and without training, so that it
    works at once. The same command again goes on where a killed one was. On several GPUs:
    torchrun --nproc-per-node GPUS -m twellctl convert ...

    Without --data config.json is edited and the weights are copied as they are. Such a model talks
    noise until it is fine-tuned.
    """
    ui.doing(f"converting {model}")
    from twellctl.convert import convert as run

    settings = dataclasses.asdict(made(Fit, flags))
    settings = {k: settings[k] for k in (flag.replace("-", "_") for flag in flags)}
    if dry_run:
        from twellctl.fitting.plan import plan

        planned(plan(model, revision=revision, **settings))
        return
    how = {"revision": revision, "overwrite": overwrite}
    converted(run(model, out, **how, doing=ui.doing, told=fitting, **settings), model)


@command(app, "write owner/model own.jsonl", group=MAKE)
def write(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The jsonl file to write.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts to answer: a jsonl, JSON or parquet file of prompt, instruction, "
            "question, or messages that end with a user's.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to write. [default: 20000000; each prompt answered once]"),
    ] = None,
    documents: Annotated[
        float | None,
        typer.Option(
            help="Share of texts that are documents, and no chats. [default: 0.5; 1 for a model "
            "without a chat template]",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of an answer or a document at most. [default: 512, or what the context "
            "leaves]"
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="How freely tokens are drawn. 0, for prompts: the likeliest.")
    ] = 0.8,
    batch_size: Annotated[int, typer.Option(help="Texts to write at once, at most.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Let a model write text to train on.

    With --prompts it answers them. Else a chat model draws users' questions, and answers them; any
    model writes documents behind a first word that is drawn. The sparse form of a chat model,
    fine-tuned on them beside other text, keeps its manner and more of what it knew. MODEL may be
    the sparse one, too. What is in OUT after Ctrl-C can be used.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.screens.write import stages
    from twellctl.write import write as run

    doing, progress = stages()
    done = run(
        model,
        out,
        prompts=prompts,
        tokens=tokens,
        documents=documents,
        max_tokens=max_tokens,
        temperature=temperature,
        batch_size=batch_size,
        seed=seed,
        revision=revision,
        overwrite=overwrite,
        doing=doing,
        progress=progress,
        note=ui.note,
    )
    ui.say(
        f"{done.out}: {done.texts} texts, {done.tokens} tokens, {done.cut} texts cut at "
        f"--max-tokens, {done.drawn / done.seconds:.0f} tokens/s"
    )
    own = ui.word(done.out)
    ui.say(f"next: twellctl finetune RELU OUT --recipe standard --data FILE --data {own}")


_OFTEN = ("recipe", "data", "eval_data", "target_sparsity", "max_tokens", "batch_size")
_OFTEN += ("micro_batch_size", "learning_rate", "lora_rank", "gradient_checkpointing")
_OFTEN += ("resume", "overwrite", "dry_run")


@command(
    app,
    "finetune relu sparse --recipe standard --data train.jsonl",
    group=MAKE,
    shown=_OFTEN,
)
@takes(Recipe)
def finetune(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A ReLU model folder; leave it out with --from-scratch."
        ),
    ],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder to write.")] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE", help="More text, as after --data: so that --data *.jsonl works."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file of settings, or the name of a shipped recipe.")
    ] = None,
    from_scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="In the place of MODEL: train random weights of this config.json, or of the one "
            "in this folder, with the tokenizer beside it.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in OUT.run.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what it would take, time, memory and disk, and, measured on a GPU, the "
            "speed that it is to bring.",
        ),
    ] = False,
    flags: dict[str, Any],
) -> None:
    """Make a ReLU model sparse.

    Fine-tunes it with a price on every neuron that fires, steered until the target is met.

    Flags win over the recipe, the recipe over the defaults. On several GPUs:
    torchrun --nproc-per-node GPUS -m twellctl finetune ...
    """
    from twellctl.training.recipe import file_of, recipe_to_resume, resolve_recipe
    from twellctl.training.trackers import check_report_to

    if from_scratch is not None:
        more = [*([] if out is None else [str(out)]), *(more or [])]
        model, out = None, Path(model)
    elif out is None:
        raise UsageError("no OUT: name the folder to write")
    if more and ("data" not in flags or "eval-data" in flags):
        raise UsageError(f"{more[0]}: which flag is it for? repeat it: --data FILE --data FILE")
    if more:
        flags["data"] += more
    recipe_file = file_of(recipe)
    settings = resolve_recipe(recipe or recipe_to_resume(out, resume), flags)
    if from_scratch is not None:
        from twellctl.training.from_scratch import open_config

        model = open_config(from_scratch)
    check_report_to(settings.report_to)
    ui.doing("loading PyTorch and transformers")
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun and accelerate count processes so
    if dry_run:
        from twellctl.bench.expected_speed import expected_speed
        from twellctl.dry_run import as_flags
        from twellctl.dry_run import dry_run as try_out

        tried = try_out(model, settings, ui.note, ui.doing)
        if is_first:
            has_target = tried.density is not None
            speed = expected_speed(tried.config, tried.density, ui.doing) if has_target else None
            tried_out(tried, speed, as_flags(tried.changes))
        return
    from twellctl.finetune import finetune as run
    from twellctl.screens.run import RunScreen

    how = {"resume": resume, "overwrite": overwrite, "recipe_file": recipe_file}
    result = run(model, out, settings, **how, progress=RunScreen())
    if is_first:
        finetuned(result)


command(app, "profile sparse --data heldout.jsonl --json profile.json", group=MAKE)(measure.profile)


@command(app, "export sparse exported --profile profile.json", group=MAKE)
def export(
    model: LocalModel,
    out: Out,
    profile: Annotated[
        Path | None,
        typer.Option(help="Slots of this 'profile --json' file; its figures for the model card."),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", help="Figures of this 'eval --json' file for the model card."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Speeds of this 'bench decode --json' file for the model card."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="fp8",
            help="Round the weights of linear layers, but the LM head, to FP8 (e4m3) with a scale "
            "for each row.",
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            help="Cut the weights into files of at most so much, like 2GB. [default: 5GB]"
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a folder that runs over TwELL, and densely in any engine.

    Over TwELL with trust_remote_code=True, also where twellctl is not installed. ReLU is written as
    a sharp SiLU: engines that know SiLU alone, like llama.cpp, mlx-lm and vLLM, compute the same.
    """
    ui.doing(f"checking the weights of {model} and writing them")
    from twellctl.export import export as run

    exported(
        run(
            model,
            out,
            profile=profile,
            evaluation=evaluation,
            bench=bench,
            quantize=quantize,
            shard_size=shard_size,
            overwrite=overwrite,
            note=ui.note,
        )
    )


command(app, "eval exported --reference owner/model --data heldout.jsonl", group=USE, name="eval")(
    measure.evaluate
)
command(app, "compare owner/model exported", group=USE)(measure.compare)
app.add_typer(bench.app, name="bench", rich_help_panel=USE)


@command(app, "generate exported 'Once upon a time'", group=USE)
def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer or to continue; - reads stdin.")
    ],
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to write at most. [default: 256, or what the context leaves]"),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="How freely tokens are drawn; 0 takes the likeliest each time.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that hold this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the draw. [default: another each time]")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Answer PROMPT through the chat template, or continue it as text. "
            "[default: chat, if the tokenizer has a template]",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateArguments = None,
) -> None:
    """Continue or answer a prompt.

    The text goes to stdout as it comes; tokens/s and, of a ReLU model, the share of neurons that
    fired to stderr.
    """
    ui.doing(f"loading {model}")
    from twellctl.generate import generate as run

    text = ui.read_stdin() if prompt == "-" else prompt
    made = run(
        model,
        text,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        chat=chat,
        chat_template=chat_template,
        chat_template_kwargs=template_arguments(chat_template_kwargs),
        note=ui.note,
    )
    try:
        ui.stream(made)
    finally:
        generated(made.figures)


@command(app, "serve-local exported --port 8000", group=USE)
def serve_local(
    model: Model,
    host: Annotated[
        str, typer.Option(help="The address to listen on; beyond this machine only with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TWELL_API_KEY",
            help="What clients must send as 'Authorization: Bearer KEY'. The variable is safer: "
            "other users of this machine can read the command line.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name of this server, behind a proxy for example; can be repeated. "
            "Requests for, or from pages of, other names get 403.",
        ),
    ] = None,
    max_running: Annotated[
        int, typer.Option(help="How many choices are written side by side at most.")
    ] = 64,
    max_waiting: Annotated[int, typer.Option(help="How many more may wait; others get 429.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 600,
    drain: Annotated[
        float,
        typer.Option(help="Seconds that running answers have to finish after Ctrl-C or SIGTERM."),
    ] = 30,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model, for those that have a fixed name; can be repeated. "
            "[default: the folder's name]",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateArguments = None,
    own_sampling: Annotated[
        bool,
        typer.Option(
            help="Where a request names no temperature, top_p, top_k, min_p or repetition_penalty, "
            "take those of generation_config.json, else 1, 1, all, 0 and 1."
        ),
    ] = True,
    access_log: Annotated[
        bool, typer.Option(help="A line on stderr for each request; no prompts, no keys.")
    ] = True,
) -> None:
    """Serve a model through OpenAI's API, and a page to chat.

    /v1/chat/completions, /v1/completions, /v1/models; the page at /, which shows what share of each
    layer's neurons fires for each token; /health; /metrics for Prometheus; /v1 lists them all. To
    this machine only, unless there is a key. Ctrl-C ends it once running answers are complete, a
    second one at once.
    """
    from twellctl.serve_local import serve_local as run

    run(
        model,
        host=host,
        port=port,
        api_key=api_key,
        allow_hosts=allow_host or (),
        max_running=max_running,
        max_waiting=max_waiting,
        timeout=timeout,
        drain=drain,
        names=served_model_name or (),
        chat_template=chat_template,
        chat_template_kwargs=template_arguments(chat_template_kwargs),
        own_sampling=own_sampling,
        on_ready=serving.serving,
        log=serving.log if access_log else None,
        note=ui.note,
    )
    interrupts.ignore()  # one that came late, before the process has ended
    serving.end()


@command(app, "quickstart --out demo", group=MAKE)
def quickstart(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    seed: Annotated[int, typer.Option(help="Seed of everything drawn.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Do the whole job on a tiny model.

    The model is made here, without a download, and all is done in two or three minutes.
    """
    ui.doing("loading PyTorch and transformers")
    from twellctl.quickstart import quickstart as run
    from twellctl.screens.run import RunScreen

    def note(title: str) -> None:
        ui.activity.over()
        ui.note(f"- {title}")

    shown = {"note": note, "progress": ui.progress, "run": RunScreen("nothing will be kept")}
    result = run(out, overwrite=overwrite, seed=seed, **shown)
    quickstarted(result)
    if result.shortfalls:
        raise TwellError("; ".join(result.shortfalls))


@command(app, "doctor exported", group=USE)
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model folder to check as well; it is only read."),
    ] = None,
) -> None:
    """Say what works here and what to install.

    With a folder: whether its config.json fits its weights, and its code is unchanged.
    """
    ui.doing("looking at the machine, the libraries and the kernels")
    from twellctl.doctor import doctor as run

    diagnosis = run(model, note=ui.note)
    diagnosed(diagnosis)
    if diagnosis.broken:
        raise TwellError("; ".join(diagnosis.broken))
