"""Test a server against its own OpenAPI document with schemathesis: every answer must match the document.

    python benchmarks/serve/schemathesis_run.py [URL] [--examples 100] [--seed 0]

Without a URL it serves five small models. Prints the number of cases and the failures; the exit code is 1 if there are any.
`schemathesis.toml` has the accepted statuses and the reasons.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

if __package__:
    from benchmarks.serve.small_server import small_server
else:
    from small_server import small_server

CONFIG = Path(__file__).with_name("schemathesis.toml")


@dataclass(frozen=True)
class Outcome:
    """The results of a run of schemathesis."""

    cases: int
    operations: int
    failures: list[str]
    """Each failure, and each error that kept schemathesis from testing, with what is needed to reproduce it."""
    said: str
    """Its whole output."""


def hold_against_its_document(url: str, examples: int, seed: int) -> Outcome:
    """Runs all phases and default checks on the server at `url`, with at least `examples` cases an operation."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        program = "from schemathesis.cli import schemathesis; schemathesis()"
        options = ["--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure"]
        reports = ["--report", "json", "--report-json-path", str(report)]
        command = [sys.executable, "-c", program, "--config-file", str(CONFIG), "run", f"{url}/openapi.json"]
        finished = subprocess.run(
            [*command, *options, *reports], cwd=folder, capture_output=True, text=True, check=False
        )
        said = finished.stdout + finished.stderr
        if not report.is_file():
            raise RuntimeError(f"schemathesis wrote no report; its output:\n{said}")
        found = json.loads(report.read_text(encoding="utf-8"))
    failures = [json.dumps(each)[:2000] for each in (*found["failures"], *found["errors"])]
    if finished.returncode and not failures:
        failures = [f"schemathesis ended with {finished.returncode}: {said[-2000:]}"]
    return Outcome(found["test_cases"]["generated"], found["operations"]["tested"], failures, said)


def main() -> int:
    """Runs schemathesis and prints the results."""
    parser = argparse.ArgumentParser(description="Test a server against its own OpenAPI document.")
    parser.add_argument("url", nargs="?", help="a running server (default: one of five small models)")
    parser.add_argument("--examples", type=int, default=100, help="least number of cases per operation in fuzzing")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = asked.url or stack.enter_context(small_server())
        outcome = hold_against_its_document(url.rstrip("/"), asked.examples, asked.seed)
    for failure in outcome.failures:
        print(failure)
    print(f"{outcome.cases} cases of {outcome.operations} operations, {len(outcome.failures)} failures")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
