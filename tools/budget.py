"""Counts the size of the code: `python tools/budget.py` prints the numbers, with `--check` beside those recorded in budget.json.

Lines are all lines of the .py files of the five packages. A function is every `def` and `async def`, nested ones too, its lines
from the `def` to its end. A comparison with a task's name is a ==, !=, in, not in, a case, or the key of a table, whose other side
holds the name of a task, or a constant made of such names, outside `tasks/`.
"""

import argparse
import ast
import functools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tools" / "budget.json"
PACKAGES = ("serve", "compress", "export", "latency", "stillroom")
TASKS = {
    "token-classification",
    "text-classification",
    "text-regression",
    "question-answering",
    "feature-extraction",
    "text2text-generation",
}
MAY_GROW = {"median_function_lines"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a number is above its record")
    parser.add_argument("--record", action="store_true", help="write today's numbers to budget.json")
    parser.add_argument("--tasks", action="store_true", help="print each comparison with a task's name")
    chosen = parser.parse_args()
    if chosen.tasks:
        print(*(f"{path.relative_to(ROOT)}:{line}" for path in sources() for line in task_comparisons(path)), sep="\n")
        return 0
    numbers = count()
    recorded = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if chosen.record:
        RECORD.write_text(json.dumps(numbers, indent=2) + "\n")
        recorded = numbers
    for name, number in numbers.items():
        limit = recorded.get(name, number)
        over = number > limit and name not in MAY_GROW
        print(f"{name:24} {number:>8,} of {limit:>8,}{'  over: say why in the commit that raises it' if over else ''}")
    grown = [name for name, number in numbers.items() if name not in MAY_GROW and number > recorded.get(name, number)]
    return 1 if chosen.check and grown else 0


def count() -> dict[str, float]:
    paths = list(sources())
    functions = [lines for path in paths for lines in function_lines(path)]
    lines = {path: len(path.read_text().splitlines()) for path in paths}
    return {
        "source_lines": sum(lines.values()),
        "source_files": len(paths),
        "files_under_40_lines": sum(size < 40 for size in lines.values()),
        "functions": len(functions),
        "median_function_lines": statistics.median(functions),
        "task_comparisons": sum(len(list(task_comparisons(path))) for path in paths),
        "setting_calls": sum(len(list(setting_calls(path))) for path in paths),
        "test_lines": lines_below("tests"),
        "benchmark_lines": lines_below("benchmarks"),
    }


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def lines_below(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def function_lines(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def setting_calls(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setting":
            yield node.lineno


def task_comparisons(path: Path) -> Iterator[int]:
    """The lines of `path` that ask for a task's name. -> line numbers; none for files in `tasks/`"""
    if "tasks" in path.relative_to(ROOT).parts:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Compare(left=left, comparators=others, lineno=line) if any(map(names_a_task, (left, *others))):
                yield line
            case ast.Dict(keys=keys, lineno=line) if any(names_a_task(key) for key in keys if key):
                yield line
            case ast.match_case(pattern=pattern) if names_a_task(pattern):
                yield pattern.lineno


def names_a_task(node: ast.AST) -> bool:
    if isinstance(node, ast.MatchValue):
        return names_a_task(node.value)
    if isinstance(node, ast.MatchOr):
        return any(names_a_task(pattern) for pattern in node.patterns)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(names_a_task(element) for element in node.elts)
    if isinstance(node, ast.Constant):
        return node.value in TASKS
    return isinstance(node, ast.Name) and node.id in constants_of_tasks()


@functools.cache
def constants_of_tasks() -> set[str]:
    """The module-level constants that hold names of tasks, as `GENERATION = "text2text-generation"`."""
    constants = set()
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            value = node.value
            parts = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [value])
            if any(isinstance(part, ast.Constant) and part.value in TASKS for part in parts):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                constants |= {target.id for target in targets if isinstance(target, ast.Name)}
    return constants


if __name__ == "__main__":
    sys.exit(main())
