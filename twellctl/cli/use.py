"""The commands that use a model. Nothing heavy is imported before one runs."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.cli import interrupts
from twellctl.cli.command import Model
from twellctl.errors import TwellError, UsageError, reason, shown
from twellctl.files.strict_json import parse_json
from twellctl.generate import Answering, Chat, Drawing
from twellctl.screens import ui
from twellctl.screens.use import diagnosed, end, generated, log, serving
from twellctl.serving.settings import Serving


def template_arguments(given: str) -> dict[str, Any]:
    """The object in --chat-template-kwargs; `UsageError` for what is none."""
    try:
        found = parse_json(given) if given else {}
    except ValueError as error:
        raise UsageError(f"chat-template-kwargs is no JSON ({reason(error)})") from error
    if not isinstance(found, dict):
        raise UsageError(f"chat-template-kwargs must be a JSON object, got {given}")
    return found


ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A chat template (Jinja) in the place of the model's."),
]
TemplateArguments = Annotated[
    dict | None,
    typer.Option(
        metavar="JSON",
        parser=template_arguments,
        help="What the chat template is to know: '{\"enable_thinking\": false}'.",
    ),
]

Gates = Annotated[
    str,
    typer.Option(
        metavar="screened|whole",
        help="screened: steps of one row of a ReLU model in bf16 read of W_gate a copy in 4 bits, "
        "made at the start in some seconds, and the rows that it tells them to, where that takes "
        "one kernel and is faster. whole: all of W_gate.",
    ),
]
COMMANDS = "/new begins again, /system TEXT says how to answer, /exit ends; Ctrl-C stops an answer"


def generate(
    *,
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer or to continue; - reads stdin.")
    ],
    flags: Annotated[dict, Drawing],
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
    gates: Gates = "whole",
) -> None:
    """Continue or answer a prompt.

    The text goes to stdout as it comes; tokens/s and, of a ReLU model, the share of neurons that
    fired to stderr.
    """
    ui.doing(f"loading {model}")
    from twellctl.generate import generate as run

    text = ui.read_stdin() if prompt == "-" else prompt
    answer = run(
        model,
        text,
        chat=chat,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        gates=gates,
        note=ui.note,
        **flags,
    )
    try:
        ui.stream(answer)
    finally:
        generated(answer.figures)


def chat(
    *,
    model: Model,
    system: Annotated[str, typer.Option(metavar="TEXT", help="How the model is to answer.")] = "",
    flags: Annotated[dict, Answering],
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateArguments = None,
    gates: Gates = "whole",
) -> None:
    """Talk with a model.

    A line is a message; what was said before goes with it. /new begins again, /system TEXT says how
    to answer and begins again, /exit or the end of input ends. Ctrl-C stops an answer.
    """
    ui.doing(f"loading {model}")
    from twellctl.generate import load

    loaded = load(model, chat_template=chat_template, gates=gates, note=ui.note)
    how = vars(Answering(**flags)) | {"chat_template_kwargs": chat_template_kwargs}
    _converse(Chat(loaded, system, **how))


def _converse(chat: Chat) -> None:
    """Let whoever is at stdin talk with `chat` until the input ends.

    On a terminal an error leaves the conversation as it was; elsewhere it is raised.
    """
    if sys.stdin.isatty():
        ui.note(COMMANDS)
    while True:
        try:
            line = ui.read_line("> ")
        except KeyboardInterrupt:
            interrupts.forget()
            sys.stdout.write("\n")
            continue
        command, _, rest = (line or "").strip().partition(" ")
        if line is None or command == "/exit":
            return
        if command in ("/new", "/system"):
            chat.begin(rest if command == "/system" else "")
        elif command.startswith("/") and "/" not in command[1:]:  # no path
            ui.note(f"there is no command {shown(command)}: {COMMANDS}")
        elif command:
            _answer(chat, line)


def _answer(chat: Chat, text: str) -> None:
    try:
        with interrupts.first_kept() as stopped:
            ui.stream(chat.ask(text, stopped))
    except TwellError as error:
        if not sys.stdin.isatty():
            raise
        ui.note(f"error: {error}")
        return
    generated(chat.figures)


def serve_local(
    *,
    model: Model,
    flags: Annotated[dict, Serving],
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
    gates: Gates = "screened",
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
        api_key=api_key,
        allow_hosts=allow_host or (),
        names=served_model_name or (),
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        gates=gates,
        on_ready=serving,
        log=log if access_log else None,
        note=ui.note,
        **flags,
    )
    interrupts.ignore()  # one that came late, before the process has ended
    end()


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
