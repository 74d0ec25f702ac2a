"""Files that a kill, a full disk or a second program must not damage: locks, files replaced in one step, and full disks.

And the standard streams of a command, also where one of them was closed before it began, or loses its reader.
"""

import errno
import os
import select
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from serve.errors import BadInput, StillroomError
from serve.wording import one_of

FILE_ENDINGS = {
    ".bin", ".csv", ".gz", ".html", ".json", ".jsonl", ".md", ".onnx", ".parquet", ".pt", ".safetensors", ".tar", ".tgz", ".toml", ".tsv",
    ".txt", ".zip",
}  # fmt: skip
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
LOST_AND_FOUND = "lost+found"  # at the root of an empty volume
# Of a path that the system refuses: what rights mend, and what another path or a sound disk does.
NO_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_PATH = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EBUSY, errno.EIO)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota used up, a limit on the size of a file
PARTIAL = ".partial"
RESUME = "Make room, and give the same command again to resume"


def output(
    given: Path | str,
    flag: str = "--out",
    *,
    endings: Collection[str] | None = None,
    beside: bool = True,
    inputs: Iterable[Path | str] = (),
) -> Path:
    """The absolute path of what will be written at `given`, checked before anything else is done. Nothing is left there.

    Args:
        given: a folder, which may be a link or a mount point, and those above it may be missing; or a file in a folder that is there.
        flag: what messages call it.
        endings: those of a file, one of which it needs; None: it is a folder.
        beside: whether more is written beside a folder that is there.
        inputs: files that are read for it.

    Raises:
        BadInput: it is the other of the two, has an ending that says so or is not written, or this user may not write it.
    """
    path = Path(os.path.abspath(os.path.expanduser(given)))
    above = next(each for each in (*path.parents, path) if os.path.lexists(each))
    folder, ending, fault = endings is None, path.suffix.lower(), ""
    begun = os.path.exists(f"{path}.lineage.json")  # by an earlier version, which took any ending; it may go on
    if os.path.islink(path) and not os.path.exists(path):
        fault = f"is a link to {os.readlink(path)}, which is not there"
    elif os.path.exists(path) and not (os.path.isdir(path) if folder else os.path.isfile(path)):
        fault = "already exists and is not a folder" if folder else "already exists and is not a file"
    elif any(os.path.exists(each) and os.path.exists(path) and os.path.samefile(each, path) for each in inputs):
        fault = "is the input file"
    elif folder and ending in FILE_ENDINGS and not os.path.exists(path):
        fault = f"ends in {ending} like a file, and a folder is written"
    elif not os.path.isdir(above):
        fault = f"cannot be created: {above} is not a folder"
    elif endings and ending not in endings and not begun:
        fault = (
            f"{'ends in ' + ending if ending else 'has no ending'}, and what is written there ends in {one_of(endings)}"
        )
    elif endings and not os.path.isdir(path.parent):
        fault = f"is in {path.parent}, which does not exist: there is no folder of that name"
    if fault:
        raise BadInput(f"{flag} {given} {fault}. Give another {'folder' if folder else 'file'}.")
    into = [path] if os.path.isdir(path) else []
    if beside or not into:
        into.append(above)
    for each in into:
        try:
            (probe := each / _beside(path, alone=False).name).mkdir()
            probe.rmdir()
        except OSError as error:
            inside = f" in it, such as {path / 'out'}" if [each] == into[1:] else ""
            raise BadInput(
                f"{flag} {given} cannot be written: this user may not write in {each} ({error.strerror}). Give another path{inside}."
            ) from error
    return path


def path_beside(out: Path | str, ending: str) -> Path:
    """The path of what lies beside the folder `out`: its name with `ending`."""
    path = Path(out)
    if path.name in ("", ".."):
        path = Path(os.path.abspath(path))
    return path.parent / f"{path.name}{ending}"


def vacant(folder: Path, last: str) -> bool:
    """Whether nothing is at `folder`, or an empty folder, or one that a killed call was filling up to the file `last`."""
    if not os.path.lexists(folder):
        return True
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    # Another process may be trying just now whether it may write there, see `output`.
    names = {name for name in names if not (name.startswith(f".{folder.name}.") and name.endswith(PARTIAL))}
    return names <= {LOST_AND_FOUND} or _beside(folder / last, alone=True).name in names


def fill(folder: Path, source: Path, last: str) -> None:
    """Copies the files of `source` into a folder that is there: a mount point and a link to a folder cannot be replaced.

    The file `last` comes last, in one step. Until then, the partial file beside it tells that the folder is unfinished: what a killed
    call has left there is removed first.
    """
    final = _beside(folder / last, alone=True)
    for left in folder.iterdir() if final.exists() else ():
        if left.name not in (LOST_AND_FOUND, final.name):
            remove(left)
    final.touch()
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif path != source / last:
            with replacing(target, alone=True, synced=True) as partial:
                shutil.copyfile(path, partial)
    shutil.copyfile(source / last, final)
    sync(final)
    os.replace(final, folder / last)
    sync(folder)


@contextmanager
def locked(path: Path, *, shared: bool = False, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Context that holds the lock file `path` alone, or with other readers if `shared`. The file is not removed.

    Waits for another process, and calls `waiting` first. The lock ends with this process, however that ends. Windows has no locks.
    """
    with path.open("a") as file:
        if not lock(file.fileno(), shared=shared, wait=waiting is None) and waiting:
            waiting()
            lock(file.fileno(), shared=shared)
        yield


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Locks an open file until it is closed. False if another process holds it, which is waited for unless `wait` is False."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def lock_at(path: Path, descriptor: int) -> bool:
    """Locks the open file `path` until it is closed. False if another process holds it, or held and removed it since it was opened."""
    try:
        return lock(descriptor, wait=False) and os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def replacing(path: Path, *, alone: bool = False, synced: bool = False) -> Iterator[Path]:
    """A temporary path beside `path` to write to. At the end it replaces `path`, or is deleted if writing failed.

    A reader sees the old file or the new one, never half of one.

    Args:
        path: the file.
        alone: no other process writes `path` meanwhile, so that the next call overwrites what a kill left.
        synced: the file is on the disk at the end, also after a power cut.
    """
    beside = _beside(path, alone=alone)
    try:
        yield beside
        if synced:
            sync(beside)
        os.replace(beside, path)
        if synced:
            sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path, *, alone: bool = False, synced: bool = False, last: str = "") -> Iterator[Path]:
    """An empty folder to fill beside `folder`. At the end it replaces `folder`, or is deleted if filling it failed.

    With `last`, the file that makes it whole, an empty folder that is there is filled in its place, see `fill`; and what a link leads
    to is replaced, not the link.

    No folder can replace a full one, so the old one is moved aside first, and back if the new one cannot be renamed. A reader may
    find none for that moment. After a kill in it, the next call with `alone` puts the old one back. Arguments as of `replacing`.
    """
    filled = bool(last) and folder.is_dir() and vacant(folder, last)
    if last and not filled:
        folder = Path(os.path.realpath(folder))
    beside = _beside(folder, alone=alone)
    aside = beside.with_suffix(".old")
    if os.path.lexists(aside) and not os.path.lexists(folder):
        os.rename(aside, folder)
    for left in (beside, aside):  # by a kill
        remove(left)
    beside.mkdir(parents=True)
    try:
        yield beside
        if synced:
            for path in (*beside.rglob("*"), beside):
                sync(path)
        if filled:
            fill(folder, beside, last)
        else:
            _replace_folder(folder, beside, aside)
        if synced:
            sync(folder.parent)
    finally:
        remove(beside)
    remove(aside)


def _replace_folder(folder: Path, new: Path, aside: Path) -> None:
    if os.path.lexists(folder):
        os.rename(folder, aside)
    try:
        os.rename(new, folder)
    except BaseException:
        if os.path.lexists(aside):
            os.rename(aside, folder)
        raise


def remove(path: Path) -> None:
    """Removes a folder or whatever is in its place, such as a link; not where that leads."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _beside(path: Path, *, alone: bool) -> Path:
    return path.parent / f".{path.name}{'' if alone else '.' + os.urandom(4).hex()}{PARTIAL}"


def sync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room(error: BaseException) -> bool:
    """Whether `error` says that the disk is full, a quota is used up, or the file is too large."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    # Libraries in Rust have no errno.
    return not isinstance(error, StillroomError) and any(f"(os error {each})" in str(error) for each in NO_ROOM)


def refused(error: BaseException) -> str:
    """What to say of an `error` by which the system refuses a path that was given; empty if it is another one."""
    if not (isinstance(error, OSError) and error.filename) or error.errno not in NO_RIGHTS + NO_PATH:
        return ""
    mend = "Allow this user to use it, or give" if error.errno in NO_RIGHTS else "Give"
    return f"{error.filename} cannot be used: {error.strerror}. {mend} another path."


@contextmanager
def disk_errors_reported(name: str | Path, *, if_full: str = RESUME, otherwise: str = "") -> Iterator[None]:
    """Context for writing the file or folder `name`.

    Raises:
        BadInput: the disk is full, and `if_full` says what to do; or the system refuses otherwise, if `otherwise` says what to do.
    """
    try:
        yield
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        if no_room(error):
            raise BadInput(f"{name} could not be written: {why}. {if_full}") from error
        if otherwise and isinstance(error, OSError):
            raise BadInput(f"{name} cannot be written ({why}); {otherwise}") from error
        raise


def open_closed_streams() -> None:
    """Lets standard streams take any letter, and opens the null device in place of each that was closed at the start.

    Otherwise Python has none, and the next file or connection that is opened gets its number, to which libraries still write.
    """
    without_output = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # a process that this one starts writes to that number, too
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as this process is
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # letters that the encoding of an old locale lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    if without_output:
        sys.stderr.write("stillroom: standard output is closed; what would be printed there is lost\n")


def reader_gone(stream: TextIO) -> bool:
    """Whether what is written to `stream` cannot be read any more, since the other end of its pipe or connection is closed."""
    polled = select.poll()
    try:
        polled.register(stream.fileno(), 0)
    except (OSError, ValueError):  # it has no file, or that is closed
        return False
    return bool(polled.poll(0))  # asked for nothing, it tells errors and hang-ups


def drop_unwritten(stream: TextIO) -> None:
    """Puts the null device in place of the file of `stream`, whose reader has gone, so that its last flush at the exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
