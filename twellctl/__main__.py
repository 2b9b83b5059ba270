"""Where the command line begins: Ctrl-C is one line, from the first import on."""

import os
import signal
import sys
import types


def main() -> None:
    """`cli.main`, imported where Ctrl-C is heeded already."""
    signal.signal(signal.SIGINT, interrupt)
    try:
        from twellctl.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    finally:  # all is done: what is left ends at once, and says nothing
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt(signum: int, frame: types.FrameType | None) -> None:
    """`KeyboardInterrupt`; but while torch is imported, where one would abort in C++, the end.

    Commands import it before they write anything.
    """
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        os.write(2, b"error: interrupted\n")
        os._exit(130)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
