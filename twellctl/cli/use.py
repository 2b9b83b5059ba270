"""The commands that use a model. Nothing heavy is imported before one runs."""

import re
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
        raise UsageError(f"chat-template-kwargs is not JSON ({reason(error)})") from error
    if not isinstance(found, dict):
        raise UsageError(f"chat-template-kwargs must be a JSON object, got {given}")
    return found


ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A chat template (Jinja) to use instead of the model's."),
]
TemplateArguments = Annotated[
    dict | None,
    typer.Option(
        metavar="JSON",
        parser=template_arguments,
        help="Arguments for the chat template, such as '{\"enable_thinking\": false}'.",
    ),
]

Gates = Annotated[
    str,
    typer.Option(
        metavar="screened|whole",
        help="screened: for one sequence of a ReLU model in bf16, read a 4-bit copy of W_gate, "
        "made at startup in a few seconds, and only the rows that it selects, if one kernel can "
        "run the step and is faster. whole: read all of W_gate.",
    ),
]
Stable = Annotated[
    bool,
    typer.Option(
        "--stable",
        help="Choose the same tokens whoever is beside: sums are added up in one order, all "
        "neurons are computed, and our kernels run at most 32 sequences at once.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Answer as the original does with --stable, token for token: MODEL, a draft head or "
        "a fit, drafts, and the original keeps what it would have written.",
    ),
]
Original = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="With --exact: the model that MODEL was made for. [default: the one "
        "in MODEL's folder (export --with-original), or what MODEL names as its source]",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="TWELL_API_KEY",
        help="The key that clients must send as 'Authorization: Bearer KEY'. The variable is "
        "safer, because other users of this machine can read the command line.",
    ),
]
AllowHosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Another name of this server, for example that of a proxy. Repeatable. Requests "
        "for other names, or from their pages, get 403.",
    ),
]
ServedModelNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="The model's name in requests, for clients with a fixed name. Repeatable. "
        "[default: the folder's name]",
    ),
]
AccessLog = Annotated[
    bool, typer.Option(help="Log each request on stderr in one line, without prompts or keys.")
]
AsChat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Answer PROMPT through the chat template, or continue it as text. "
        "[default: --chat if the tokenizer has a template]",
    ),
]
_COMMAND = re.compile("/[A-Za-z]+")  # a path, a comment or /no_think is none
COMMANDS = (
    "/new starts over, /system TEXT sets the system message, /exit quits; Ctrl-C stops an answer"
)


def generate(
    *,
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to answer or continue; - reads stdin.")
    ],
    flags: Annotated[dict, Drawing],
    chat: AsChat = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateArguments = None,
    gates: Gates = "whole",
    stable: Stable = False,
    exact: Exact = False,
    original: Original = None,
) -> None:
    """Continue or answer a prompt.

    The text is streamed to stdout. Tokens/s and, for a ReLU model, the share of neurons that fired
    go to stderr; with --exact, how many tokens a pass of the original gave, and how many drafts
    were kept.
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
        stable=stable,
        exact=exact,
        original=original,
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
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.")] = "",
    flags: Annotated[dict, Answering],
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateArguments = None,
    gates: Gates = "whole",
    stable: Stable = False,
    exact: Exact = False,
    original: Original = None,
) -> None:
    """Talk to a model.

    Each line is a message, sent with the conversation so far. /new starts a new conversation,
    /system TEXT sets the system message and starts a new one, /exit or the end of input quits. A
    message that begins like a command is sent with a space in front. Ctrl-C stops an answer.
    """
    ui.doing(f"loading {model}")
    from twellctl.generate import load

    loaded = load(
        model,
        chat_template=chat_template,
        gates=gates,
        stable=stable,
        exact=exact,
        original=original,
        note=ui.note,
        for_chat=True,
    )
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
        command, _, rest = (line or "").rstrip().partition(" ")
        if line is None or (command == "/exit" and not rest):
            return
        try:
            if _COMMAND.fullmatch(command):
                _obey(chat, command, rest.strip())
            elif line.strip():
                _answer(chat, line.removeprefix(" ") if line.startswith(" /") else line)
        except TwellError as error:
            if not sys.stdin.isatty():
                raise
            ui.note(f"error: {error}")


def _obey(chat: Chat, command: str, rest: str) -> None:
    """Carry out a line that begins with `/command`; a mistyped one is not sent to the model."""
    if command == "/system":
        chat.begin(rest)
    elif command == "/new" and not rest:
        chat.begin()
    elif command in ("/new", "/exit"):
        ui.note(f"{command} stands alone, got {shown(rest)} behind it")
    else:
        ui.note(f"there is no command {shown(command)}: {COMMANDS}; a space in front sends it")


def _answer(chat: Chat, text: str) -> None:
    with interrupts.first_kept() as stopped:
        ui.stream(chat.ask(text, stopped))
    generated(chat.figures)


def serve_local(
    *,
    model: Model,
    flags: Annotated[dict, Serving],
    api_key: ApiKey = None,
    allow_host: AllowHosts = None,
    served_model_name: ServedModelNames = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateArguments = None,
    gates: Gates = "screened",
    stable: Stable = False,
    exact: Exact = False,
    original: Original = None,
    access_log: AccessLog = True,
) -> None:
    """Serve a model with an OpenAI-compatible API and a chat page.

    With --exact and a fit there are two models: NAME, the original's answers, and NAME-fast, MODEL
    alone (in 4 bits one request at a time).
    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, and /metrics for
    Prometheus; /v1 lists them all. The page at / shows what share of each layer's neurons fires for
    each token. Without a key, only this machine is served. Ctrl-C stops the server once running
    answers are complete; a second one stops it at once.
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
        stable=stable,
        exact=exact,
        original=original,
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
    """Check what works here and what to install.

    With a folder, also check whether twellctl can read it as a model and its code is unchanged.
    """
    ui.doing("looking at the machine, the libraries and the kernels")
    from twellctl.doctor import doctor as run

    diagnosis = run(model, note=ui.note)
    diagnosed(diagnosis)
    if diagnosis.broken:
        raise TwellError("; ".join(diagnosis.broken))
