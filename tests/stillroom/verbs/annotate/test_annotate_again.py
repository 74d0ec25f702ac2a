"""What `stillroom annotate` does with errors that stand in its output, and with rows that it fails to answer itself."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from in_process import command
from test_annotate import lines

from serve.bundle.runtimes import Device
from serve.errors import BadInput, InternalError
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation, answering
from stillroom.verbs.annotate.checks import lineage
from stillroom.verbs.annotate.parts import Job
from stillroom.verbs.annotate.rows import Columns
from stillroom.verbs.annotate.run import annotate

pytestmark = pytest.mark.usefixtures("forked_workers")


def row(text: str) -> str:
    return json.dumps({"text": text})


def written(job: Annotation, *rows: str) -> Annotation:
    job.input.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return job


@pytest.fixture
def job(cities: Path, tmp_path: Path) -> Annotation:
    return Annotation(cities, tmp_path / "in.jsonl", tmp_path / "out.jsonl", bad_rows="skip", processes=1)


def test_a_mended_row_is_asked_again_and_no_other_is(job: Annotation) -> None:
    pair = json.dumps({"text": "rome", "text_pair": "a"})  # which the model refuses
    annotate(written(job, row("rome"), "nope", row("oslo"), "{}", row("paris"), pair))
    before = job.output.read_bytes().splitlines(keepends=True)
    # A computed answer would be another: this one shows that it was kept.
    before[2] = before[2].replace(b'"truncated":false', b'"truncated":true')
    job.output.write_bytes(b"".join(before))
    mended = (row("rome"), row("fly to rome"), row("oslo"), "{}", row("paris"), row("to oslo"), row("a"))
    document = annotate(written(job, *mended))
    after = job.output.read_bytes().splitlines(keepends=True)
    assert (document["rows"], document["rows_before"], document["rows_asked_again"]) == (7, 6, 2)
    assert document["bad_rows"] == 0
    assert [after[0], *after[2:5]] == [before[0], *before[2:5]]
    for line, text in ((1, "fly to rome"), (5, "to oslo")):
        assert json.loads(after[line]) == {"text": text, "answer": Pipeline(job.bundle)(text)}
    assert annotate(job)["texts_per_s"] is None
    assert job.output.read_bytes() == b"".join(after)


@pytest.mark.parametrize(
    ("name", "bad", "mended"),
    [
        pytest.param("in.csv", 'text,x\na,b\n"c\nd"\nrome,d\n', "text,x\na,b\noslo,c\nrome,d\n", id="csv-of-fewer-lines"),
        pytest.param("in.json", '[{"text": "a"}, {"text": 1}, {"text": "rome"}]',
                     '[{"text": "a"}, {"text": "oslo"}, {"text": "rome"}]', id="json"),
    ],
)  # fmt: skip
def test_rows_of_every_format_are_asked_again(job: Annotation, name: str, bad: str, mended: str) -> None:
    job = replace(job, input=job.input.with_name(name))
    job.input.write_text(bad, encoding="utf-8", errors="surrogateescape")
    assert annotate(job)["bad_rows"] == 1
    kept = job.output.read_bytes()
    assert annotate(job)["texts_per_s"] is None
    assert job.output.read_bytes() == kept
    job.input.write_text(mended, encoding="utf-8")
    document = annotate(job)
    assert (document["rows"], document["rows_asked_again"], document["bad_rows"]) == (3, 1, 0)
    assert [each["text"] for each in lines(job.output)] == ["a", "oslo", "rome"]


def test_a_row_that_is_still_bad_stops_the_work_after_all_others_are_mended(job: Annotation) -> None:
    annotate(written(job, "nope", row("rome"), "{}"))
    job = replace(job, bad_rows="stop")
    with pytest.raises(BadInput, match=r"3 rows are in .*\n.*line 1: is not JSON"):
        annotate(written(job, "still not", row("rome"), row("oslo"), row("paris")))
    found = lines(job.output)
    assert [each.get("text") for each in found] == [None, "rome", "oslo"]
    document = annotate(written(job, row("a"), row("rome"), row("oslo"), row("paris")))
    assert (document["rows"], document["rows_asked_again"]) == (4, 1)


def test_many_mended_rows_end_with_the_bytes_of_a_run_that_had_no_bad_row(
    job: Annotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "WINDOW_ROWS", 7)
    drawn = random.Random(0)
    good = [row(f"please {number} rome") for number in range(60)]
    bad = {number for number in range(60) if drawn.random() < 0.3}
    annotate(written(job, *("nope" if number in bad else each for number, each in enumerate(good[:45]))))
    mended = set(drawn.sample(sorted(bad & set(range(45))), 5))
    annotate(written(job, *("nope" if number in bad - mended else each for number, each in enumerate(good))))
    document = annotate(written(job, *good))
    assert document["rows_asked_again"] == len(bad - mended)
    whole = replace(job, output=job.output.with_name("whole.jsonl"))
    annotate(whole)
    assert job.output.read_bytes() == whole.output.read_bytes()


def test_a_fault_while_rows_are_mended_leaves_the_output_as_it_was(job: Annotation) -> None:
    annotate(written(job, "nope", row("rome"), row("oslo")))
    before = job.output.read_bytes()
    job.output.with_name("out.jsonl.mended").write_text("half of it")  # as a kill leaves it
    with pytest.raises(BadInput, match=r"line 3 of .* is not the answer to row 3"):
        annotate(written(job, row("a"), row("rome"), row("paris")))
    assert job.output.read_bytes() == before
    there = ["in.jsonl", "out.jsonl", "out.jsonl.lineage.json"]
    assert sorted(file.name for file in job.output.parent.iterdir()) == there


def test_a_link_to_the_output_stays_one(job: Annotation) -> None:
    real = job.output.with_name("real.jsonl")
    real.touch(mode=0o640)
    job.output.symlink_to(real)
    annotate(written(job, "nope", row("rome")))
    annotate(written(job, row("a"), row("rome")))
    assert job.output.is_symlink()
    assert [each["text"] for each in lines(real)] == ["a", "rome"]
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_fault_of_ours_ends_the_output_before_its_row_with_exit_code_1(job: Annotation) -> None:
    written(job, row("rome"), row("oslo"), row("love it"), "nope", row("paris"))
    for _ in range(2):  # another run is told again
        ended = command("annotate", job.bundle, "--input", job.input, "--output", job.output)
        assert ended.code == 1
        assert f"2 rows are in {job.output}" in ended.said
        assert f"{job.input}, line 3: the model gave logits that are not finite" in ended.said
        assert "bad row" not in ended.said  # what stands behind was not come to
        assert [each["text"] for each in lines(job.output)] == ["rome", "oslo"]
    document = annotate(written(replace(job, bad_rows="stop"), row("rome"), row("oslo"), row("love"), row("paris")))
    assert (document["rows"], document["rows_before"], document["bad_rows"]) == (4, 2, 0)
    assert [each["text"] for each in lines(job.output)] == ["rome", "oslo", "love", "paris"]


def test_skipping_goes_past_a_text_on_which_the_model_fails_and_not_past_a_model_that_fails_on_all(
    job: Annotation,
) -> None:
    document = annotate(written(replace(job, bad_rows="skip"), row("rome"), row("love it"), "nope", row("paris")))
    assert (document["rows"], document["bad_rows"]) == (4, 2)
    found = lines(job.output)
    assert [list(each) for each in found] == [["text", "answer"], ["error"], ["error"], ["text", "answer"]]
    assert (found[1]["error"]["line"], found[1]["error"]["code"]) == (2, "internal")
    with pytest.raises(InternalError, match="line 1: the model gave logits"):
        annotate(written(replace(job, bad_rows="skip", restart=True), row("love it"), row("refund it")))


def test_a_fault_of_ours_at_a_mended_row_keeps_its_error_and_every_answer(job: Annotation) -> None:
    annotate(written(job, row("rome"), "nope", "no", row("oslo")))
    before = job.output.read_bytes()
    with pytest.raises(InternalError, match="line 2: the model gave logits"):
        annotate(written(job, row("rome"), row("love it"), row("it"), row("oslo"), row("paris")))
    assert job.output.read_bytes() == before
    mended = written(job, row("rome"), row("love"), row("fly"), row("oslo"), row("paris"))
    assert annotate(mended)["rows_asked_again"] == 2


def test_an_output_begun_on_one_device_is_of_another_lineage_than_on_the_other(job: Annotation) -> None:
    def lineage_on(device: Device) -> dict[str, Any]:
        how = Job("", "d", "fp32", 1, device, Columns(), AnswerOptions(), None, "skip", 5, str(job.output))
        return lineage(job, how, parts=False)

    here, there = map(lineage_on, get_args(Device))
    assert here != there
    assert "device" not in here  # outputs from before there was a choice can be resumed
