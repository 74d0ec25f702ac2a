"""Verbs whose standard output or error output is closed, or has lost its reader: one line, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from repository import ROOT

from stillroom.cli.main import Verbs, guarded

VERBS = (["--help"], ["inspect", "BUNDLE"])  # what click prints, and what rich does


def command(arguments: list[str], plain: Path, closing: str = "") -> list[str]:
    given = [str(plain) if each == "BUNDLE" else each for each in arguments]
    return ["bash", "-c", f'exec "$@" {closing}', "bash", sys.executable, "-m", "stillroom", *given]


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_an_output_that_was_closed_before_the_start_is_told_in_one_line(arguments: list[str], plain: Path) -> None:
    done = subprocess.run(command(arguments, plain, ">&-"), check=False, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "standard output is closed" in done.stderr
    for closing, output in (("2>&-", True), (">&- 2>&-", False)):
        done = subprocess.run(
            command(arguments, plain, closing), check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert (done.returncode, bool(done.stdout)) == (0, output)


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_that_is_started_has_what_stands_in_place_of_closed_streams(closing: str) -> None:
    """Otherwise the first file that it opens gets the number of its output."""
    child = "import os; [os.fstat(number) for number in range(3)]"
    program = (
        "import subprocess, sys; from serve.files import open_closed_streams as opened; opened(); "
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}], check=False).returncode)"
    )
    closed = ["bash", "-c", f'exec "$@" {closing}', "bash", sys.executable, "-c", program]
    assert subprocess.run(closed, check=False, cwd=ROOT, capture_output=True).returncode == 0


def test_only_a_broken_pipe_of_the_output_itself_is_told_as_an_unread_output(capfd: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def verb() -> None:
        raise BrokenPipeError(32, "Broken pipe")  # as a socket's

    group = Verbs("stillroom", commands={"verb": verb})
    assert guarded(lambda: group.main(["verb"])) == 1
    said = capfd.readouterr().err
    assert "output was closed" not in said
    assert "a fault of this program" in said


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_an_output_that_nobody_reads_any_more_is_told_in_one_line(arguments: list[str], plain: Path) -> None:
    unread, written = os.pipe()
    os.close(unread)
    try:
        done = subprocess.run(
            command(arguments, plain), check=False, cwd=ROOT, stdout=written, stderr=subprocess.PIPE, text=True
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "the output was closed before all of it was written" in done.stderr
        done = subprocess.run(
            command(arguments, plain), check=False, cwd=ROOT, stdout=written, stderr=written, text=True
        )
        assert done.returncode == 2
    finally:
        os.close(written)
