"""How far a reader of one `run` jumps: `python tools/walk.py` runs a tiny one and counts the files that it crosses.

The functions of the five packages are listed in the order of their first call, in the main process alone; a module's own body,
lambdas and comprehensions are left out. A file counts once it is entered. A return is a step in that list into a file that was
entered before, from another file.
"""

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("serve", "compress", "export", "latency", "stillroom"))
QUICK = """
    --teacher-epochs 25 --teacher-learning-rate 5e-3 --student-learning-rate 5e-3 --student-epochs 8 --augment 2
    --student layers=2,hidden=32,heads=4,ffn=32 --batch 16 --latency-seconds 1 --threads 1
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--functions", action="store_true", help="also list the functions in the order of their first call"
    )
    chosen = parser.parse_args()
    order = first_calls()
    files: set[str] = set()
    returns, at = 0, ""
    for code in order:
        returns += code.co_filename != at and code.co_filename in files
        at = code.co_filename
        files.add(at)
        if chosen.functions:
            print(f"{Path(at).relative_to(ROOT)}:{code.co_firstlineno} {code.co_qualname}")
    print(f"{len(order):,} functions in {len(files)} files, {returns} returns to a file left before")
    return 0


def first_calls() -> list[CodeType]:
    """Runs `run` on a tiny teacher. -> the functions that were called, by their first call"""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from small_task import examples, make_teacher, write_splits

    from stillroom.cli.main import app, guarded

    called: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(PACKAGES):
            called.setdefault(code)

    with tempfile.TemporaryDirectory() as folder:
        teacher, data, out = make_teacher(Path(folder, "teacher")), Path(folder, "data"), Path(folder, "out")
        write_splits(data, examples)
        command = f"run --teacher {teacher} --task token-classification --data {data} --out {out} {QUICK}"
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            status = guarded(lambda: app(command.split()))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if status == 2:
        raise SystemExit(f"`{command}` ended with {status}")
    return list(called)


if __name__ == "__main__":
    sys.exit(main())
