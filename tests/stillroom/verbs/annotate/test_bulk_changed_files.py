"""`stillroom annotate` over a folder whose files, bundle or output change, or are not what they seem."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lookup_bundles import city_table, write_bundle
from pyarrow import parquet
from test_bulk import digests, job_of, parts_of, refused, settings_of

from serve.errors import BadInput
from stillroom.verbs.annotate import run
from stillroom.verbs.annotate.annotator import Annotator
from stillroom.verbs.annotate.inputs import inputs_of
from stillroom.verbs.annotate.parts import MANIFEST, Job, Part, PartsManifest
from stillroom.verbs.annotate.rows import Start
from stillroom.verbs.annotate.run import annotate_files, summary
from stillroom.verbs.annotate.storage import DiskFolder, storage_of

pytestmark = pytest.mark.usefixtures("forked_workers")


def annotator_of(job: Job, before: Callable[[], object] = lambda: None) -> Annotator:
    """An annotator that calls `before` when it opens the bundle: after it has checked the input of its first part."""

    def bundle() -> str:
        before()
        return job.bundle

    return Annotator(job, bundle)


def write_lines(path: Path, count: int) -> None:
    path.write_text("".join(f'{{"text": "fly to rome {number}"}}\n' for number in range(count)))


def write_table(path: Path, count: int) -> None:
    parquet.write_table(pa.table({"text": [f"fly to rome {number}" for number in range(count)]}), path)


def test_files_without_rows_are_listed_and_have_no_parts(cities: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    (given / "empty.jsonl").touch()
    (given / "head.csv").write_text("text\n")
    write_table(given / "none.parquet", 0)
    assert summary(annotate_files(settings_of(cities, given, out))) == f"{given} has no rows; nothing was done."
    write_lines(given / "a.jsonl", 3)
    for restart in (False, False, True):
        document = annotate_files(settings_of(cities, given, out, restart=restart))
        assert (document["files"], document["rows"], document["parts"]) == (4, 3, 1)
    assert json.loads((out / MANIFEST).read_bytes())["inputs"]["head.csv"]["rows"] == 0


@pytest.mark.parametrize(("name", "write"), [("in.jsonl", write_lines), ("in.parquet", write_table)])
def test_an_input_that_changes_while_a_part_is_made_leaves_no_part(
    name: str, write: Callable[[Path, int], None], cities: Path, tmp_path: Path
) -> None:
    given, out = tmp_path / name, tmp_path / "out"
    write(given, 12)
    (source,) = inputs_of(str(given))
    part, later = Part(source, Start(), 12), source.mark

    def touch() -> None:
        os.utime(given, ns=(0, int(later) + 1))

    with pytest.raises(BadInput, match=r"was changed while it was annotated; give another --output, or --restart"):
        annotator_of(job_of(cities, out), touch).annotate(part)
    assert list(out.iterdir()) == []
    # One that is shorter than the plan, though its size and time say nothing.
    write(given, 4)
    (source,) = inputs_of(str(given))
    with pytest.raises(BadInput, match="was changed while it was annotated"):
        annotator_of(job_of(cities, out)).annotate(Part(source, Start(), 12))
    assert list(out.iterdir()) == []
    assert annotator_of(job_of(cities, out)).annotate(Part(source, Start(), 4)).rows == 4


def test_an_input_that_changes_before_it_is_read_is_refused(cities: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 3)
    (source,) = inputs_of(str(tmp_path / "in.jsonl"))
    write_lines(tmp_path / "in.jsonl", 4)
    with pytest.raises(BadInput, match=r"in.jsonl was changed while it was read; give the same command again"):
        annotator_of(job_of(cities, tmp_path / "out")).scan(source)


def test_another_bundle_in_the_folder_of_the_first_does_not_answer(cities: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(cities, bundle)
    job = job_of(bundle, tmp_path / "out")
    shutil.rmtree(bundle)
    write_bundle(bundle, city_table() * 2)
    write_lines(tmp_path / "in.jsonl", 3)
    (source,) = inputs_of(str(tmp_path / "in.jsonl"))
    with pytest.raises(
        BadInput, match=f"the bundle {bundle} was changed while it was used; give the same command again"
    ):
        annotator_of(job).annotate(Part(source, Start(), 3))
    assert list((tmp_path / "out").iterdir()) == []


def test_files_of_others_stay_where_the_output_is_refused(cities: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 3)
    out = tmp_path / "out"
    (out / "deep" / f".d.{'0' * 32}.partial").mkdir(parents=True)
    for name in (".film.partial", f".mine.{'0' * 32}.partial", "other.txt"):
        (out / name).write_text("mine")
    before = sorted(out.rglob("*"))
    assert "holds files that `annotate` did not write (other.txt)" in refused(cities, tmp_path / "in.jsonl", out)
    assert sorted(out.rglob("*")) == before
    (out / "other.txt").unlink()
    annotate_files(settings_of(cities, tmp_path / "in.jsonl", out))
    assert [each.name for each in sorted(out.rglob(".*"))] == [".film.partial", f".d.{'0' * 32}.partial"]


def test_a_kill_within_a_restart_leaves_an_output_that_is_known(
    cities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out"
    write_lines(given, 12)
    annotate_files(settings_of(cities, given, out))
    whole = digests(out)
    removed = list[str]()

    def remove(self: DiskFolder, name: str) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(name)
        (self.path / name).unlink()

    with monkeypatch.context() as patched:
        patched.setattr(DiskFolder, "remove", remove)
        with pytest.raises(KeyboardInterrupt):
            annotate_files(settings_of(cities, given, out, restart=True, answer_field="a"))
    assert len(digests(out)) == 2
    PartsManifest(storage_of(str(out)), {"now": 1}, restart=True)  # and then ended, before an input was read
    assert digests(out) == {}
    assert "was begun with " in refused(cities, given, out)
    annotate_files(settings_of(cities, given, out, restart=True))
    assert digests(out) == whole
    assert len(parts_of(out, "in.jsonl")) == 3


def test_a_part_that_is_not_in_the_output_at_the_end_is_told(
    cities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out, made = tmp_path / "in.jsonl", tmp_path / "out", run._make
    write_lines(given, 12)

    def lose_a_part(*arguments: Any) -> Any:  # as a node does that writes to a folder of its own
        found = made(*arguments)
        parts_of(out, "in.jsonl")[1].rename(tmp_path / "part")
        return found

    monkeypatch.setattr(run, "_make", lose_a_part)
    told = refused(cities, given, out)
    assert "does not have these parts as they were written: in.jsonl-000000000005-000000000010.jsonl; " in told
    manifest = json.loads((out / MANIFEST).read_bytes())
    assert (manifest["complete"], len(manifest["parts"])) == (False, 2)
    monkeypatch.setattr(run, "_make", made)
    assert annotate_files(settings_of(cities, given, out))["parts_before"] == 2
    assert json.loads((out / MANIFEST).read_bytes())["complete"]


def test_a_part_that_a_shared_disk_shows_late_is_waited_for(cities: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out"
    write_lines(given, 12)
    annotate_files(settings_of(cities, given, out))
    lineage = json.loads((out / MANIFEST).read_bytes())["lineage"]
    part = parts_of(out, "in.jsonl")[1]
    part.rename(tmp_path / "part")
    showing = threading.Timer(0.5, (tmp_path / "part").rename, [part])
    showing.start()
    manifest = PartsManifest(storage_of(str(out)), lineage)
    run._check_there(manifest, replace(job_of(cities, out), on_nodes=True))
    showing.join()
    assert len(manifest.parts) == 3
