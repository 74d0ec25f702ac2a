"""`python -m stillroom`, and the `stillroom` command: the command line, loaded where Ctrl-C is no traceback."""

import sys


def main() -> None:
    """See `stillroom.cli.main.main`; exit code 130 when Ctrl-C is pressed while that is loaded, too."""
    try:
        from stillroom.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
