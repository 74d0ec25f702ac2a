"""`python -m serve BUNDLE...`: the server without the rest of the command line."""

import argparse
import signal
import sys
from typing import Any

from serve.files import open_closed_streams


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    if hasattr(signal, "SIGHUP"):
        # It asks a server to reload: until one hears it there is nothing to reload.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open_closed_streams()
    from serve.errors import StillroomError
    from serve.http.app import serve
    from serve.observe.logs import plain
    from serve.options import described, make, options_of
    from serve.settings import ServeSettings

    parser = argparse.ArgumentParser(prog="python -m serve", description="Serve bundles over HTTP.")
    parser.add_argument(
        "bundles", nargs="+", metavar="BUNDLE", help="folder that `stillroom run`, `demo` or `export` wrote, or its URL"
    )
    for option in options_of(ServeSettings):
        # argparse takes a percent sign as the start of a format.
        about = (option.help if option.choices else described(option)).replace("%", "%%")
        about += f" [{option.default_shown}]" if option.default_shown else ""
        metavar = option.kind.__name__.upper()
        how: dict[str, Any] = {
            "type": option.kind,
            "choices": option.choices or None,
            "metavar": None if option.choices else metavar,
        }
        if option.kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif option.several:
            how = {"action": "append", "metavar": metavar}
        parser.add_argument(option.flag, dest=option.name, help=about, default=None, **how)
    given = vars(parser.parse_args(arguments))
    try:
        serve(given.pop("bundles"), make(ServeSettings, given))
    except StillroomError as error:
        print("error: " + plain(error.message, kept="\n"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
