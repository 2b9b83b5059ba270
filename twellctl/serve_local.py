"""twellctl serve-local: OpenAI's API for one model and a page to chat with it."""

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from twellctl.decoding.engine import SCREENED, check_gates
from twellctl.errors import TwellError, UsageError, encodable
from twellctl.files.home import from_home
from twellctl.models.answerer import Answerer, load_models, open_answerer
from twellctl.serving.access import Access, is_address, is_loopback
from twellctl.serving.http_errors import aiohttp_log
from twellctl.serving.openai_requests import DEFAULTS
from twellctl.serving.openai_server import Limits, Traffic, make_app
from twellctl.serving.plan import ServedModel
from twellctl.serving.preparing import in_daemon_thread
from twellctl.serving.settings import Serving
from twellctl.settings import chosen
from twellctl.text.tokens import encode_text

OnReady = Callable[[ServedModel, str], None]
# The event loop and the engine's worker share the interpreter. A thread that wants it gets it after
# Python's 5 ms at the latest, which is longer than a step: with 16 clients a tenth of that made
# 842 steps/s of 638.
_SWITCH_SECONDS = 0.0005
FAST = "-fast"  # behind a name: the fit that drafts for it, alone
_CLOSE_SECONDS = 5  # for the step that the engine is at
_HURRY_SECONDS = 5  # from the second signal to the end, whatever still runs


def serve_local(
    model: str | Path,
    *,
    api_key: str | None = None,
    allow_hosts: Sequence[str] = (),
    names: Sequence[str] = (),
    chat_template: str | Path | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    gates: str = SCREENED,
    stable: bool = False,
    exact: bool = False,
    original: str | Path | None = None,
    on_ready: OnReady | None = None,
    log: Callable[[str], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> None:
    """Serve `model` (a folder or hub id) until SIGINT or SIGTERM. Raises `TwellError`.

    `settings` are the fields of `Serving`. If `api_key` is set, clients must send it; only then can
    `host` be an address that other machines can reach. `allow_hosts` are names that Host and Origin
    headers may have (see serving/access.py). After a signal, running answers have `drain` seconds
    to finish; a second one ends them at once. `names` are the model's names in requests, instead of
    the folder's name. `chat_template`, a file, replaces the model's, and gets
    `chat_template_kwargs` in all requests. With `own_sampling`, temperature and the like default to
    generation_config.json. `gates`, `stable`, `exact` and `original` are as in
    `twellctl.generate.load`; with `exact` a fit is served alone, too, under each name with "-fast"
    behind it. Once the server takes requests, `on_ready` is called with what is served and the URL,
    which ends in the port. `log` receives one line per answered request. Port 0 takes a free one.
    Signals work only in the main thread.
    """
    how = chosen(Serving, settings)
    access = access_of(how.host, api_key, allow_hosts)
    _check_names(names)
    check_gates(gates)
    answerer = open_answerer(model, exact, original)
    if exact and answerer.head is None:
        _check_fast(names)
    answerer.checkpoint.require_tokenizer()
    with _short_turns(), _listener(how.host, how.port) as listener:
        served = load_served_model(
            answerer,
            names=names,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            own_sampling=how.own_sampling,
            max_running=how.max_running,
            max_waiting=how.max_waiting,
            gates=gates,
            stable=stable,
        )
        answerer.checkpoint.beware_of_noise(note)
        if answerer.original is None:
            answerer.checkpoint.say_if_dense(note)
        limits = Limits(answer_seconds=how.timeout)
        serving = serve(
            served, listener, on_ready, access=access, limits=limits, drain=how.drain, log=log
        )
        asyncio.run(serving)


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"a name to serve under must be printable text, got {name!r}")


def _check_fast(names: Sequence[str]) -> None:
    """`UsageError` for a name that a fit alone gets."""
    for name in names:
        if f"{name}{FAST}" in names:
            raise UsageError(f"{name}{FAST} is what {name} is called alone: choose other names")


def load_served_model(
    answerer: Answerer,
    *,
    names: Sequence[str] = (),
    chat_template: str | Path | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    own_sampling: bool = True,
    stable: bool = False,
    **how: Any,
) -> ServedModel:
    """Weights and tokenizer loaded, the worker started; `how`: what `open_engines` takes.

    A fit that drafts for its original is also served alone, beside it.
    """
    # torch takes seconds to import: errors about the model and the port come before it
    from twellctl.decoding.opening import describe_decoder, open_engines
    from twellctl.models.loading import describe_place, load_tokenizer

    tokenizer = load_tokenizer(answerer.checkpoint, chat_template)
    encode_text(tokenizer, "")  # the first call sets up what several threads then only read
    model, draft = load_models(answerer)
    name, *others = names or [_served_name(answerer)]
    about = {"device": describe_place(model)}
    ends = [tokenizer.eos_token_id]
    engine, *alone = open_engines(model, ends, stable=stable, draft=draft, **how)
    if draft is None:
        about["engine"] = describe_decoder(model, stable=stable)
    else:
        drafter = "its draft head" if answerer.head else answerer.named.name
        about["exact"] = f"{name}: the answers of {answerer.answering.name}, drafted by {drafter}"
        if alone:
            about["fast"] = f"{name}{FAST}: {drafter} alone, in the same cache"
        about["engine"] = describe_decoder(model, draft, stable=True)
    if screens := next(filter(None, (each.screens for each in (engine, *alone))), None):
        about["gates"] = str(screens)
    if engine.plan:
        about["steps"] = f"{engine.plan} (tokens at once, way)"
    defaults = sampling_of(model.generation_config) if own_sampling else {}
    if defaults:
        about["sampling"] = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    served = ServedModel(
        name,
        tokenizer,
        engine,
        about,
        tuple(others),
        defaults,
        template=chat_template_kwargs or {},
        beside={f"{each}{FAST}": other for other in alone for each in (name, *others)},
    )
    served.guides.prepare()
    return served


def _served_name(answerer: Answerer) -> str:
    """The folder's name; a hub id as it is."""
    name = answerer.named.name
    folder = from_home(name)
    return folder.resolve().name if folder.exists() else name


def sampling_of(config: Any) -> dict[str, float]:
    """The sampling that a generation_config.json asks for, as far as it is supported.

    If it turns sampling off, only its repetition_penalty counts.
    """
    samples = getattr(config, "do_sample", None) is not False
    found: dict[str, float] = {}
    for name, plain in DEFAULTS.items():
        value: Any = getattr(config, name, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        counts = samples or name == "repetition_penalty"
        if counts and is_number and 0 <= value < 1e6 and value != plain:
            found[name] = value
    return found


async def serve(
    served: ServedModel,
    listener: socket.socket,
    on_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
    *,
    access: Access | None = None,
    limits: Limits | None = None,
    drain: float = 0,
    log: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until `stop` is set or a signal comes.

    Running ones then have `drain` seconds. The engine is closed after that, without waiting
    endlessly for its worker.
    """
    stop, hurry = stop or asyncio.Event(), asyncio.Event()
    limits, traffic = limits or Limits(), Traffic()
    runner = _runner(make_app(served, access or Access(), limits, traffic, log), limits)
    with _signals_set(stop, hurry):
        try:
            await runner.setup()
            await _start(runner, listener)
            if on_ready:
                on_ready(served, _url(listener))
            await stop.wait()
            traffic.drain()
            await _first_of(drain, traffic.idle.wait(), hurry.wait())
        finally:
            _, closed = in_daemon_thread(served.engine.close)
            await _first_of(_CLOSE_SECONDS, closed, hurry.wait())
            await runner.cleanup()


def _runner(app: web.Application, limits: Limits) -> web.AppRunner:
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves stops its generation
        access_log=None,
        logger=aiohttp_log,
        keepalive_timeout=limits.idle_seconds,
        lingering_time=limits.farewell_seconds,
        shutdown_timeout=2,
    )


async def _first_of(seconds: float, *events: Awaitable) -> None:
    """Returns after one of `events`, or `seconds`."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _start(runner: web.AppRunner, listener: socket.socket) -> None:
    try:
        await web.SockSite(runner, listener).start()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _no_address(host, port, error) from error


def access_of(host: str, key: str | None, names: Sequence[str]) -> Access:
    """Who may send requests to a server on `host`; beyond loopback a key is required."""
    beyond = not is_loopback(host)
    if not host or re.fullmatch(r"\[.*\]|[^:]*:\d+|\[.*\]:\d+", host):
        raise UsageError(
            f"host must be a name or an address alone, got {host!r}: leave brackets out, and give "
            "the port with --port"
        )
    if beyond and key is None:
        raise UsageError(
            f"host must be this machine's own (127.0.0.1, ::1 or localhost), got {host}: what "
            "others can reach needs a key, --api-key or TWELL_API_KEY"
        )
    if key is not None and (not key.isascii() or not key.isprintable() or not key or " " in key):
        raise UsageError("the key must be one or more ASCII characters without spaces")
    for name in names:
        if not (re.fullmatch(r"[\w.-]+", name, re.ASCII) or is_address(name)):
            raise UsageError(
                f"a host to allow is a name in ASCII without scheme or port, got {name!r}"
            )
    own = {host, *names} if beyond else names
    return Access(key, frozenset(name.lower() for name in own), beyond)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, TypeError) as error:
        listener.close()
        raise _no_address(host, port, error) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _no_address(host: str, port: int, error: OSError | TypeError) -> TwellError:
    """A `TypeError` is of a name that no host can have."""
    said = error if isinstance(error, TypeError) else error.strerror or error
    if isinstance(error, TypeError | socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return TwellError(
            f"host {encodable(host)} cannot be used: {said}; give an address of this machine"
        )
    if error.errno == errno.EADDRINUSE:
        return TwellError(f"port {port} is in use: choose another with --port (0 takes a free one)")
    return TwellError(f"port {port} cannot be used: {said}; choose another with --port")


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop` inside, then `hurry`; what they did before comes back after.

    After the second one the process ends within `_HURRY_SECONDS`, though the event loop may hang.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    last = threading.Timer(_HURRY_SECONDS, os._exit, [1])
    last.daemon = True
    came = 0

    def heed(number: int, frame: object) -> None:
        nonlocal came
        came += 1
        if came == 2:
            last.start()
        loop.call_soon_threadsafe((stop if came == 1 else hurry).set)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        # wakes the loop, also where another thread gets the signal; `heed` needs no loop
        loop.add_signal_handler(number, lambda: None)
        signal.signal(number, heed)
    try:
        yield
    finally:
        last.cancel()
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
