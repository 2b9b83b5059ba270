"""twellctl serve-local: OpenAI's API for one ReLU model, to this machine alone: no key is asked."""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web

from twellctl.checkpoint import Checkpoint, open_checkpoint
from twellctl.errors import TwellError, UsageError
from twellctl.serving.http_guards import aiohttp_log, is_loopback
from twellctl.serving.openai_server import make_app
from twellctl.serving.plan import ServedModel
from twellctl.serving.text_tokens import encode_text

OnReady = Callable[[str, str], None]


def serve_local(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: OnReady | None = None,
) -> None:
    """Serve `model` (a ReLU folder or hub id) until SIGINT or SIGTERM. Raises `TwellError`.

    `on_ready` is called with the model's name and the API's URL once requests are taken. Port 0
    takes a free one. Signals are only heeded in the main thread.
    """
    _check_address(host, port)
    checkpoint = open_checkpoint(model)
    checkpoint.require_relu()
    checkpoint.require_tokenizer()
    with _listener(host, port) as listener:
        served = load_served_model(checkpoint)
        try:
            asyncio.run(serve(served, listener, on_ready))
        finally:
            served.engine.close()


def load_served_model(checkpoint: Checkpoint) -> ServedModel:
    """Weights and tokenizer loaded, the worker started."""
    # torch takes seconds to import: a wrong model or a busy port is told before
    from twellctl.model import load_model, load_tokenizer
    from twellctl.serving.generation import GenerateEngine

    tokenizer = load_tokenizer(checkpoint)
    encode_text(tokenizer, "")  # the first call sets up what several threads then only read
    engine = GenerateEngine(load_model(checkpoint), tokenizer.eos_token_id)
    return ServedModel(_served_name(checkpoint), tokenizer, engine)


async def serve(
    served: ServedModel,
    listener: socket.socket,
    on_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Answer requests until `stop` is set or a signal comes; then end what still runs."""
    stop = stop or asyncio.Event()
    # handler_cancellation: a client that leaves stops its generation
    runner = web.AppRunner(
        make_app(served),
        handler_cancellation=True,
        access_log=None,
        logger=aiohttp_log,
        shutdown_timeout=2,
    )
    await runner.setup()
    try:
        with _signals_set(stop):
            await _start(runner, listener)
            if on_ready:
                on_ready(served.name, _url(listener))
            await stop.wait()
    finally:
        await asyncio.to_thread(served.engine.close)
        await runner.cleanup()


async def _start(runner: web.AppRunner, listener: socket.socket) -> None:
    try:
        await web.SockSite(runner, listener).start()
    except OSError as error:
        raise _no_port(listener.getsockname()[1], error) from error


def _served_name(checkpoint: Checkpoint) -> str:
    """The folder's name; a hub id as it is."""
    is_local = Path(checkpoint.name).exists()
    return checkpoint.path.resolve().name if is_local else checkpoint.name


def _check_address(host: str, port: int) -> None:
    if not is_loopback(host):
        raise UsageError(
            f"host must be this machine's own (127.0.0.1, ::1 or localhost), got {host}: "
            "serve-local asks for no key, so nobody else may reach it"
        )
    if not 0 <= port <= 65535:
        raise UsageError(f"port must be 0 to 65535, got {port}")


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _no_port(port, error) from error
    return listener


def _no_port(port: int, error: OSError) -> TwellError:
    if error.errno == errno.EADDRINUSE:
        return TwellError(f"port {port} is in use: choose another with --port (0 takes a free one)")
    return TwellError(f"port {port} cannot be used: {error.strerror or error}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop` inside; what they did before comes back after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
