"""What trains a comparison: its teachers, then each row that is not finished, in a process of its own.

Where several rates are given, seed 0 of a row goes first: its scores on validation choose the rate of the other seeds.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from compress.runs import task_stages
from compress.runs.hardware import same_bits
from compress.runs.method_chain import asks_words
from compress.runs.method_trainings import fit_head
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import fingerprint, texts_fingerprint
from compress.runs.task_inputs import TaskInputs
from serve.errors import BadInput
from stillroom.child_process import ChildProcesses
from stillroom.console import bar, say
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.rows import Row, links_of, rates_of, reads_source, rows_of
from stillroom.verbs.compare.training import (
    head_name,
    make_row,
    method_inputs_of,
    rate_taken,
    source_of,
    teacher_fingerprint,
)


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


def open_queue(given: Comparison, inputs_of: dict[str, TaskInputs], work: Workdir) -> Queue:
    """The trainings of this comparison, once the teachers that they learn from are made."""
    inputs = next(iter(inputs_of.values()))
    rows = rows_of(given, inputs_of)
    links = {row: links_of(given, inputs_of[row.student], row) for row in rows}
    source = source_of(given, inputs) if any(reads_source(several) for several in links.values()) else None
    same_bits(inputs.settings.threads)
    of_teacher = teacher_fingerprint(inputs)
    of_source = teacher_fingerprint(source) if source else ""
    of_text = fingerprint("corpus", of_teacher, texts_fingerprint(inputs.corpus), given.tokens)
    work.stage("teacher", of_teacher, partial(_make_teacher, inputs=inputs))
    if source:
        work.stage("teacher-source", of_source, partial(_make_teacher, inputs=source))
    asking = {head_name(row): row for row in rows if any(asks_words(link.stages) for link in links[row])}
    for name, row in asking.items():
        tokens = row.choice.distill_tokens or 0
        plain = replace(method_inputs_of(given, inputs, seed=0), tokens=float(tokens))
        work.stage(name, f"{of_text}-{tokens}", partial(fit_head, given=plain))

    def fingerprint_of(row: Row, rates: tuple[float, ...]) -> str:
        """Of all that decides the student of `row`."""
        read = (of_teacher, of_text if row.choice.distill_tokens else "", of_source if reads_source(links[row]) else "")
        described = [asdict(link) for link in links[row]]
        return fingerprint("row", *read, row.method, row.choice.start, row.seed, described, list(rates))

    return Queue(work, rows, {row: rates_of(given, links[row]) for row in rows}, fingerprint_of)


def _make_teacher(folder: Path, inputs: TaskInputs) -> None:
    steps = inputs.teacher_steps
    say(f"teacher: {steps} steps at most" if steps else "teacher: it has a head for this task")
    task_stages.make_teacher(folder, inputs, steps)


def train_all(given: Comparison, queue: Queue) -> None:
    """Trains each unfinished row in its own process, so that its peak memory is its own; `given.jobs` at a time.

    Raises BadInput: trainings failed; the others are finished, but for those whose rate a failed one was to choose.
    """
    waiting = [row for row in queue.rows if not queue.finished(row)]
    say(f"{len(queue.rows)} trainings, {len(queue.rows) - len(waiting)} of them finished earlier")
    if not waiting:
        return
    if further := sum(len(queue.rates[row]) - 1 for row in waiting if row.seed == 0):
        say(f"  and {further} more of the last stage, to choose its learning rate on validation")
    total, failed = len(waiting), list[str]()
    with bar("trainings") as shown, ChildProcesses(given.jobs, calls_a_process=1) as processes:
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
                    running[processes.submit(make_row, given, row, rates, queue.fingerprint_of(row, rates))] = row
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
            processes.end()
            raise
    if failed:
        left = f" {len(waiting)} more wait for the learning rate that these were to choose." if waiting else ""
        raise BadInput(
            f"{len(failed)} of {total} trainings failed; the others are kept.{left} Leave these methods out, or change the tokens, "
            "--batch or --label-learning-rate:\n" + "\n".join(failed)
        )
