"""`python -m stillroom`, and the `stillroom` command. Ctrl-C prints no traceback, even while the command line is loaded."""

import sys


def main() -> None:
    """Runs `stillroom.cli.main.main`; exit code 130 when Ctrl-C is pressed, even while that is loaded."""
    try:
        from stillroom.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
