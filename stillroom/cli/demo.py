"""The verb `demo`: everything once, on generated data."""

from pathlib import Path

from stillroom.cli.make import show_run
from stillroom.cli.options import Document, Verb
from stillroom.console import say
from stillroom.settings.demo import Demo


def demo(settings: Demo) -> Document:
    """`run` on support messages that this program generates.

    The teacher is in the `demo` extra."""
    from stillroom.commands.demo import demo as run_demo

    return run_demo(Path(settings.out))


def show_demo(document: Document) -> None:
    """Prints the result of `run`, and a request to send."""
    show_run(document)
    say(
        "Then    curl -s localhost:8000/v1/entities -H 'content-type: application/json' "
        '-d \'{"text": "The kettle from order 4471-220 is broken, please call Marta Kowalska at +48 601 555 010."}\''
    )


VERBS = (Verb(demo, Demo, shown=show_demo, examples=("stillroom demo --out demo",)),)
