"""`python -m serve BUNDLE...`: the server without the rest of the command line."""

import argparse
import sys
from functools import partial

from serve.app import aliases_of, serve
from serve.errors import StillroomError


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serve", description="Serve bundles over HTTP.")
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folder that `stillroom export` wrote")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for any free one (default: %(default)s)")
    parser.add_argument("--variant", help="precision to serve (default: each bundle's own)")
    parser.add_argument("--threads", type=int, help="threads of one process of a model (default: 1)")
    parser.add_argument("--processes", type=int, help="processes for each model (default: as many as fit the cores)")
    parser.add_argument(
        "--alias", action="append", default=[], metavar="OTHER=NAME", help="another name for a model; repeatable"
    )
    given = parser.parse_args(arguments)
    try:
        serve(
            given.bundles,
            host=given.host,
            port=given.port,
            variant=given.variant,
            threads=given.threads,
            processes=given.processes,
            aliases=aliases_of(given.alias),
            announce=partial(print, flush=True),
        )
    except StillroomError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
