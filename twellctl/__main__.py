"""Where the command line begins: Ctrl-C is one line, from the first import on."""

import sys

from twellctl.cli import interrupts


def main() -> None:
    """`cli.app.main`, imported where Ctrl-C is heeded already."""
    interrupts.heed()
    try:
        from twellctl.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    finally:
        interrupts.heed_no_more()


if __name__ == "__main__":
    main()
