"""Holds a server against its own OpenAPI document with schemathesis: every answer must be as it is described there.

    python benchmarks/serve/schemathesis_run.py [URL] [--examples 100] [--seed 0]

Without a URL it serves three small models itself. Prints the cases run and the failures; ends with 1 when there are any.
What schemathesis is let to accept, and why, stands in `schemathesis.toml`.
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
    """What a run of schemathesis found."""

    cases: int
    operations: int
    failures: list[str]
    """Each failure, and each error that kept schemathesis from testing; with what it takes to see it again."""
    said: str
    """All that it printed."""


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
            raise RuntimeError(f"schemathesis wrote no report; it said:\n{said}")
        found = json.loads(report.read_text(encoding="utf-8"))
    failures = [json.dumps(each)[:2000] for each in (*found["failures"], *found["errors"])]
    if finished.returncode and not failures:
        failures = [f"schemathesis ended with {finished.returncode}: {said[-2000:]}"]
    return Outcome(found["test_cases"]["generated"], found["operations"]["tested"], failures, said)


def main() -> int:
    """Run it and print what came out."""
    parser = argparse.ArgumentParser(description="Hold a server against its own OpenAPI document.")
    parser.add_argument("url", nargs="?", help="a running server (default: one of three small models)")
    parser.add_argument("--examples", type=int, default=100, help="cases an operation, at least, in fuzzing")
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
