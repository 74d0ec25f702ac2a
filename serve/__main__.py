"""`python -m serve BUNDLE...`: the server without the rest of the command line."""

import argparse
import sys
from functools import partial

from serve.errors import StillroomError
from serve.http.app import serve
from serve.observe.logs import plain
from serve.settings import add_options, settings_of


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serve", description="Serve bundles over HTTP.")
    parser.add_argument(
        "bundles", nargs="+", metavar="BUNDLE", help="folder that `stillroom run`, `demo` or `export` wrote, or its URL"
    )
    add_options(parser)
    given = parser.parse_args(arguments)
    try:
        serve(given.bundles, settings_of(vars(given)), announce=partial(print, flush=True))
    except StillroomError as error:
        print("error: " + plain(error.message, kept="\n"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
