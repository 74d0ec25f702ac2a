"""`python -m stillroom`, and the `stillroom` command. Ctrl-C prints no traceback, even while the command line is loaded."""

import signal
import sys


def main() -> None:
    """Runs `stillroom.cli.main.main`; exit code 130 when Ctrl-C is pressed, even while that is loaded."""
    if sys.argv[1:2] == ["serve"] and hasattr(signal, "SIGHUP"):
        # It asks a server to reload: until one hears it there is nothing to reload.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        from serve.files import open_closed_streams

        open_closed_streams()
        from stillroom.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
