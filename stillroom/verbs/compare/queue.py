"""Which trainings of a comparison are left, and runs them, each in a process of its own.

Where several rates are given, seed 0 of a row goes first: its scores on validation choose the rate of the other seeds.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from compress.runs.resumable_stages import Workdir
from serve.errors import BadInput
from stillroom.console import bar, say
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.rows import Row
from stillroom.verbs.compare.training import make_row, rate_taken


@dataclass(frozen=True)
class Queue:
    """The rows of a comparison in their folder, and what decides each."""

    work: Workdir
    rows: Sequence[Row]
    rates: dict[Row, tuple[float, ...]]
    """Among which the rate of the row is chosen."""
    fingerprint_of: Callable[[Row, tuple[float, ...]], str]
    """The fingerprint of a row that trains with these rates."""

    def rates_for(self, row: Row) -> tuple[float, ...]:
        """What `row` trains with: all rates of seed 0, and the one chosen there for the others; empty until that is known."""
        several = self.rates[row]
        if row.seed == 0 or len(several) == 1:
            return several
        first = row.first
        if not self.work.finished(first.name, self.fingerprint_of(first, several)):
            return ()
        return (rate_taken(self.work.root / first.name),)

    def fingerprint(self, row: Row) -> str:
        """The fingerprint of `row`, whose rates are known."""
        return self.fingerprint_of(row, self.rates_for(row))

    def finished(self, row: Row) -> bool:
        """Whether `row` is finished. BadInput if it is, but damaged."""
        return bool(self.rates_for(row)) and self.work.finished(row.name, self.fingerprint(row))


def train_all(given: Comparison, queue: Queue) -> None:
    """Trains each unfinished row in its own process, so that its peak memory is its own; `given.jobs` at a time.

    Raises:
        BadInput: trainings failed; the others are finished, but for those whose rate a failed one was to choose.
    """
    waiting = [row for row in queue.rows if not queue.finished(row)]
    say(f"{len(queue.rows)} trainings, {len(queue.rows) - len(waiting)} of them finished earlier")
    if not waiting:
        return
    if further := sum(len(queue.rates[row]) - 1 for row in waiting if row.seed == 0):
        say(f"  and {further} more of the last stage, to choose its learning rate on validation")
    total, failed = len(waiting), list[str]()
    context = multiprocessing.get_context("spawn")
    with (
        bar("trainings") as shown,
        ProcessPoolExecutor(given.jobs, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        shown(0, total)
        running: dict[Future[None], Row] = {}
        done = 0

        def advance(row: Row) -> None:
            nonlocal done
            done += 1
            say(f"  {done}/{total}  {row}")
            shown(done, total, str(row))

        try:
            while waiting or running:
                for row in [row for row in waiting if queue.rates_for(row)]:
                    waiting.remove(row)
                    if queue.finished(row):  # with the rate that seed 0 chose again
                        advance(row)
                        continue
                    rates = queue.rates_for(row)
                    running[pool.submit(make_row, given, row, rates, queue.fingerprint_of(row, rates))] = row
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    row = running.pop(future)
                    try:
                        future.result()
                    except BadInput as error:
                        failed.append(f"{row}: {error}")
                    advance(row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        left = f" {len(waiting)} more wait for the learning rate that these were to choose." if waiting else ""
        raise BadInput(
            f"{len(failed)} of {total} trainings failed; the others are kept.{left} Leave these methods out, or change the tokens, "
            "--batch or --label-learning-rate:\n" + "\n".join(failed)
        )
