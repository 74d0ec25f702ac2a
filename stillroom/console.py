"""Console output: messages and progress bars on stderr, results on stdout."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from compress.progress import Event
from serve.observe.logs import plain

FILE_WIDTH = 140  # columns of a table in a file or a pipe, which have no width of their own

# Shown as they are: line ends, wide and narrow blanks, and the joiners of some scripts and of emoji.
KEPT = "\n\t\xa0\u202f\u3000\u200c\u200d"


class PlainConsole(Console):
    """A console that escapes control characters: a name in a file that someone else made must not drive the terminal."""

    def render_str(self, text: str, **how: Any) -> Text:
        """What is drawn of a message, or of a cell of a table."""
        return super().render_str(plain(text, KEPT), **how)


console = PlainConsole(stderr=True, highlight=False)
if not console.is_terminal:
    console = PlainConsole(stderr=True, highlight=False, width=FILE_WIDTH)
results = PlainConsole(highlight=False)
if not results.is_terminal:
    results = PlainConsole(highlight=False, width=FILE_WIDTH)

FIRST_UNITS = 5  # of work, before the time left is printed; the first ones may take longer than the rest


class Bar:
    """A progress bar that appears once the work has taken two seconds. Without a terminal it prints a line every 15 s."""

    def __init__(self, what: str, draws_per_s: float = 10) -> None:
        self.what, self.draws_per_s = plain(what), draws_per_s
        self.started = self.printed = time.monotonic()
        self.first = 0
        self.progress: Progress | None = None
        self.begun = False

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        """Shows `done` of `total` units, None where it is not known, and `note` beside them: the loss, for example."""
        now = time.monotonic()
        if not self.begun:
            self.first, self.begun = done, True
        if now - self.started < 2:
            return
        rate = (done - self.first) / (now - self.started)
        if console.is_terminal:
            if self.progress is None:
                columns = (
                    TextColumn("  {task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[note]}"),
                )
                self.progress = Progress(
                    *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True,
                    refresh_per_second=self.draws_per_s,
                )  # fmt: skip
                self.progress.start()
                self.progress.add_task(self.what, total=total, note="")
            self.progress.update(self.progress.task_ids[0], completed=done, total=total, note=f"{note}  {rate:.1f}/s")
        elif now - self.printed > 15 and rate > 0:
            self.printed = now
            of = "" if total is None else f"/{total}"
            left = ""
            if total is not None and done - self.first >= FIRST_UNITS:
                left = f", {(total - done) / rate / 60:.1f} min left"
            console.print(f"  {self.what}: {done}{of}, {rate:.1f}/s{', ' + note if note else ''}{left}")

    def close(self) -> None:
        """Take the bar off the screen."""
        if self.progress:
            self.progress.stop()
            self.progress = None


@contextmanager
def bar(what: str, draws_per_s: float = 10) -> Iterator[Bar]:
    """A bar for the work done within it. Each drawing holds the interpreter for over 1 ms."""
    shown = Bar(what, draws_per_s)
    try:
        yield shown
    finally:
        shown.close()


_bars: dict[str, Bar] = {}  # of the work under way, by its name


def show(event: Event) -> None:
    """Shows what a library call reports: its messages as lines, its work as bars."""
    if event.kind == "message":
        say(event.text)
    elif event.kind == "advanced":
        if shown := _bars.get(event.text):
            shown(event.done, event.total, event.note)
    else:
        if shown := _bars.pop(event.text, None):
            shown.close()
        if event.kind == "started":
            _bars[event.text] = Bar(event.text)


def say(text: str) -> None:
    """Prints one message on stderr."""
    console.print(text, markup=False, soft_wrap=True)


def result(text: str) -> None:
    """Prints one line of the result on stdout."""
    results.print(text, markup=False, soft_wrap=True)


def libraries_speak() -> None:
    """Sends the logs of libraries to stderr, too. Call it before they are imported."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    # These libraries read their own log levels from the environment when they are imported.
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "info")


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table on stdout; the first column holds names, the others numbers."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))  # a model's name may look like markup
    results.print(drawn)
