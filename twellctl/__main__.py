"""The entry of the command line. Ctrl-C ends it in one line, from the first import on."""

import os
import sys

from twellctl.cli import interrupts


def main() -> None:
    """Run `cli.main.main`, which is imported when Ctrl-C is handled already."""
    interrupts.heed()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a failure is one line, torch adds none
    try:
        from twellctl.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    finally:
        interrupts.heed_no_more()


if __name__ == "__main__":
    main()
