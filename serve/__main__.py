"""`python -m serve BUNDLE...`: the server without the rest of the command line."""

import argparse
import signal
import sys

from serve.standard_streams import open_closed_streams


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    if hasattr(signal, "SIGHUP"):
        # It asks a server to reload: until one hears it there is nothing to reload.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open_closed_streams()
    from serve.errors import StillroomError
    from serve.http.app import serve
    from serve.observe.logs import plain
    from serve.settings import add_options, settings_of

    parser = argparse.ArgumentParser(prog="python -m serve", description="Serve bundles over HTTP.")
    parser.add_argument(
        "bundles", nargs="+", metavar="BUNDLE", help="folder that `stillroom run`, `demo` or `export` wrote, or its URL"
    )
    add_options(parser)
    given = parser.parse_args(arguments)
    try:
        serve(given.bundles, settings_of(vars(given)))
    except StillroomError as error:
        print("error: " + plain(error.message, kept="\n"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
