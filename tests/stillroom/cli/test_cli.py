"""Bad input: one message, exit code 2, nothing half-written. Each is tried through the command line's own door."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from repository import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers

from serve.errors import BadInput
from stillroom.cli.main import app, guarded

Run = Callable[..., tuple[int, str]]
NEEDED = {"teacher": "t", "task": "token-classification", "data": "d", "out": "o"}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process: its exit code, and all that it said."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stillroom", *map(str, arguments)])
        code = guarded(app)
        captured = capfd.readouterr()
        assert captured.out == "" or "--json" in arguments or "--help" in arguments
        return code, " ".join((captured.err + captured.out).split())

    return call


@pytest.fixture
def given(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> dict[str, str | Path]:
    """A command that would work; tests break one part of it."""
    return {
        "--teacher": tiny_teacher,
        "--task": "token-classification",
        "--data": task_data,
        "--out": tmp_path / "out",
        "--student": "layers=2,hidden=32,heads=4,ffn=32",
    }


def refused(run: Run, given: dict[str, str | Path], **changes: str | Path) -> str:
    """The message of the command with `changes`, once it is sure that it exits with 2 and leaves nothing behind."""
    arguments = given | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    out = Path(arguments["--out"])
    before = sorted(out.parent.iterdir())
    code, said = run("run", *(part for pair in arguments.items() for part in pair))
    assert code == 2, said
    assert "Traceback" not in said
    assert sorted(out.parent.iterdir()) == before, "something was written"
    return said


def test_a_teacher_without_a_tokenizer(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    bare = shutil.copytree(given["--teacher"], tmp_path / "bare")
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        (bare / name).unlink(missing_ok=True)
    said = refused(run, given, teacher=bare)
    assert "has no tokenizer" in said
    assert "save_pretrained(folder)" in said


def test_a_decoder_as_teacher(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16)).save_pretrained(
        tmp_path / "gpt2"
    )
    said = refused(run, given, teacher=tmp_path / "gpt2")
    assert "'gpt2' model, which is not supported" in said
    assert "bert, distilbert, electra, modernbert, mpnet, roberta, xlm-roberta" in said


def test_pickled_weights_are_not_opened(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    pickled = shutil.copytree(given["--teacher"], tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "Pickled weights are not opened" in refused(run, given, teacher=pickled)


def test_a_teacher_that_is_nowhere(run: Run, given: dict[str, str | Path]) -> None:
    assert "neither a local folder nor a model that can be read from the Hub" in refused(
        run, given, teacher="nobody/nothing"
    )


def test_a_head_whose_labels_are_not_those_of_the_data(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    other = shutil.copytree(given["--teacher"], tmp_path / "other")
    AutoModelForTokenClassification.from_pretrained(
        other, id2label={0: "O", 1: "B-city", 2: "I-city"}, label2id={}
    ).save_pretrained(other)
    said = refused(run, given, teacher=other)
    assert "whose labels (city) lack item of train" in said
    assert "--new-head" in said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("train.jsonl", "text\tlabel\n", "train.jsonl, line 1: is not JSON", id="the-wrong-format"),
        pytest.param("validation.jsonl", "", "validation.jsonl: is empty: it holds no rows", id="an-empty-file"),
        pytest.param(
            "test.jsonl",
            '{"text": "to Rome", "entities": [{"start": 3, "end": 9, "label": "city"}]}\n',
            "test.jsonl, line 1: entity city ends at 9, past the end of the text (7 code points)",
            id="offsets-past-the-end",
        ),
    ],
)
def test_data_that_cannot_be_read(
    run: Run, given: dict[str, str | Path], tmp_path: Path, name: str, content: str, message: str
) -> None:
    folder = shutil.copytree(given["--data"], tmp_path / "data")
    (folder / name).write_text(content)
    assert message in refused(run, given, data=folder)


def test_a_csv_without_a_label_column(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.csv").write_text("text,intent\nhello,greet\n")
    said = refused(run, given, data=tmp_path / "data", task="text-classification")
    assert (
        "train.csv: has the columns text, intent; text and label are needed. Rename columns, or give --label-column intent"
        in said
    )


@pytest.mark.parametrize(
    ("student", "message"),
    [
        pytest.param("3x383", "'3x383' is not known. Did you mean 3x384?", id="an-unknown-student"),
        pytest.param(
            "layers=2,hidden=30,heads=4,ffn=8",
            "width of 30 cannot be divided by 4 heads",
            id="heads-that-do-not-divide",
        ),
    ],
)
def test_a_student_that_cannot_be(run: Run, given: dict[str, str | Path], student: str, message: str) -> None:
    assert message in refused(run, given, student=student)


def test_an_output_folder_that_is_something_else(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    said = refused(run, given, out=tmp_path / "mine")
    assert "is not a bundle" in said
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_output_folder_inside_a_file(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    given["--out"] = tmp_path / "notes.txt" / "deep" / "bundle"
    code, said = run("run", *(part for pair in given.items() for part in pair))
    assert code == 2
    assert f"{tmp_path / 'notes.txt'} is not a folder" in said


def test_a_student_that_cannot_start_from_its_teacher_is_told(run: Run, given: dict[str, str | Path]) -> None:
    given["--student"] = "layers=2,hidden=32,heads=2,ffn=32"
    code, said = run("run", *(part for pair in given.items() for part in pair), "--dry-run", "--json")
    assert code == 0, said
    assert "The student's layers start at random" in said


def test_all_faults_come_in_one_message(run: Run, given: dict[str, str | Path]) -> None:
    said = refused(run, given, teacher="/nowhere", student="huge", data="/nothing")
    assert "3 faults were found; nothing was done" in said


def test_a_head_that_tags_in_another_scheme(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    other = shutil.copytree(given["--teacher"], tmp_path / "other")
    tags = dict(enumerate(["O", "I-city", "I-item"]))
    AutoModelForTokenClassification.from_pretrained(other, id2label=tags, label2id={}).save_pretrained(other)
    assert "whose tags are not in BIO (it lacks B-city, B-item)" in refused(run, given, teacher=other)


def test_a_work_folder_that_is_somebody_elses(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine.txt").write_text("keep me")
    assert "already exists and stillroom did not make it" in refused(run, given)
    assert (tmp_path / "out.work" / "mine.txt").read_text() == "keep me"


def test_texts_of_test_are_left_out_of_what_the_student_sees(
    run: Run, given: dict[str, str | Path], tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (Path(given["--data"]) / "test.jsonl").read_text().splitlines()]
    spaced = tmp_path / "spaced.jsonl"  # the same texts, as an export with blanks around them would hold them
    spaced.write_text("".join(json.dumps({"text": f" {row['text']} "}) + "\n" for row in rows))
    arguments = [*(part for pair in given.items() for part in pair), "--unlabelled", spaced]
    code, said = run("run", *arguments, "--dry-run", "--json")
    assert code == 0, said
    left_out = "60 texts of --unlabelled are in validation or test and were left out"
    assert said.count(f"warning: {left_out}") == 1
    assert [each for each in json.loads(said[said.index("{") :])["warnings"] if left_out in each]


def test_numbers_out_of_range_and_missing_settings(run: Run, given: dict[str, str | Path], tmp_path: Path) -> None:
    assert "--gate is 1.5; give a number from 0 to 1" in refused(run, given, gate="1.5")
    assert "give 8 to 64 tokens" in refused(run, given, max_length="1000")
    code, said = run("run", "--task", "token-classification", "--out", tmp_path / "o")
    assert code == 2
    assert "2 settings are wrong. 1. --teacher is needed. 2. --data is needed." in said


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        pytest.param("teacher = ", "is not TOML", id="not-toml"),
        pytest.param("techer = 'x'", "techer is not a setting (did you mean teacher?)", id="a-typo"),
        pytest.param("batch = 'many'", "--batch is 'many'; give a whole number from 1", id="the-wrong-type"),
        pytest.param(
            "stages = 'minilmv2'", "stages is 'minilmv2'; give a table, as [stages.NAME] begins one", id="no-table"
        ),
        pytest.param("stages = 0", "stages is 0; give a table", id="a-number-for-a-table"),
        pytest.param(
            "[stages.minilmv2]\nlearning_rate = nan", "learning_rate is nan; give a number above 0", id="no-number"
        ),
        pytest.param("corpus = {a = 1}", "--corpus is {'a': 1}; give a list", id="a-table-for-a-list"),
        pytest.param("seed = 1979-05-27", "--seed is datetime.date(1979, 5, 27); give a whole number", id="a-date"),
        pytest.param("teacher-epochs = 0", "--teacher-epochs is 0; give a whole number from 1", id="a-flags-spelling"),
        pytest.param("techer = 'x'\nbatch = 0", "--batch is 0; give a whole number from 1", id="all-at-once"),
        pytest.param(
            "precision = 'int4'", "--precision is 'int4'; give one of auto, fp32, bf16, fp16", id="an-unknown-precision"
        ),
    ],
)
def test_a_recipe_that_cannot_be_read(run: Run, tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "recipe.toml").write_text(toml)
    code, said = run("run", tmp_path / "recipe.toml")
    assert code == 2
    assert message in said


def test_a_flag_that_there_is_not_is_refused(run: Run, given: dict[str, str | Path]) -> None:
    code, said = run("run", *(part for pair in given.items() for part in pair), "--resume")
    assert (code, "No such option '--resume'" in said) == (2, True), said
    assert not Path(given["--out"]).exists()


def test_a_teacher_that_learned_nothing_stops_the_run(run: Run, given: dict[str, str | Path]) -> None:
    arguments = given | {"--teacher-epochs": "1", "--teacher-learning-rate": "1e-9"}
    code, said = run("run", *(part for pair in arguments.items() for part in pair))
    assert code == 2
    assert "The teacher is not shown to be better than chance on this task" in said
    assert "give more --teacher-epochs" in said
    assert not Path(given["--out"]).exists()


def test_a_dry_run_prints_the_plan_and_writes_no_stage(run: Run, given: dict[str, str | Path]) -> None:
    code, said = run("run", *(part for pair in given.items() for part in pair), "--dry-run", "--json")
    assert code == 0, said
    assert said.startswith("task: token-classification (entities, BIO), scored by entity_f1 texts: 240 in train")
    plan = json.loads(said[said.index("{") :])
    assert plan["understood"]["steps"]["teacher"] == 2000
    assert plan["teacher_steps"] == 2000  # five epochs of 240 texts would be 40 steps, too few for a task
    assert plan["student_steps"] == 1000
    assert plan["minutes"] > 0
    assert plan["memory_bytes"] > 10_000_000
    work = Path(f"{given['--out']}.work")
    assert not work.exists()


def test_too_few_minutes_go_to_the_teacher_first_and_the_students_share_the_rest() -> None:
    from compress.runs.stages import Cost, RunStage
    from stillroom.inputs.recipe import Recipe
    from stillroom.verbs.run.time_budget import (
        PLAIN_TEXT,
        REST,
        SHARES,
        STUDENT,
        TEACHER,
        UNDISTILLED,
        Plan,
        fitted,
        refitted,
    )

    def stages_of(*costs: Cost) -> list[RunStage]:
        return [RunStage(cost.listed_as, (), costs=(cost,)) for cost in costs]

    whole = Plan(teacher_steps=1000, distill_tokens=20_000, student_steps=4000, seconds={})
    rates = {"teacher step": 0.3, "student step": 0.1, "token": 0.01, "second": 1.0}
    undistilled = Cost(UNDISTILLED, "student step", lambda plan: plan.student_steps)
    others = (
        Cost(TEACHER, "teacher step", lambda plan: plan.teacher_steps),
        Cost(PLAIN_TEXT, "token", lambda plan: plan.distill_tokens),
        Cost(STUDENT, "student step", lambda plan: plan.student_steps),
        Cost(REST, "second", lambda _: 100.0),
    )
    stages = stages_of(*others, undistilled)
    # 300 s for the teacher, 200 s for plain text, 400 s each for labels alone and the student, and 100 s for the rest.
    assert fitted(whole, stages, rates, Recipe(**NEEDED)).minutes == pytest.approx(1400 / 60)
    assert not fitted(whole, stages, rates, Recipe(**NEEDED)).warnings
    half = fitted(whole, stages, rates, Recipe(**NEEDED, max_minutes=900 / 60))
    assert (half.teacher_steps, half.distill_tokens, half.student_steps) == (1000, 10_000, 2000)
    assert half.minutes == pytest.approx(900 / 60)
    assert len(half.warnings) == 1
    assert "2,000 of 4,000 steps" in half.warnings[0]
    short = fitted(
        whole, stages, rates, Recipe(**NEEDED, max_minutes=400 / 60)
    )  # 300 s to train, of which students keep 30 %
    assert (short.teacher_steps, short.student_steps) == (700, 360)
    assert "leaves the teacher 700 of 1,000 steps" in short.warnings[0]
    without = fitted(whole, stages_of(*others), rates, Recipe(**NEEDED))
    assert without.minutes == pytest.approx(1000 / 60)
    # Two shares of the soft labels are tried, each for a fifth of the student's steps: 2 x 80 s more.
    share = Cost(SHARES, "student step", lambda plan: plan.student_steps / 5)
    shares = stages_of(*others, undistilled, share, share)
    assert fitted(whole, shares, rates, Recipe(**NEEDED)).minutes == pytest.approx(1560 / 60)
    half = fitted(whole, shares, rates, Recipe(**NEEDED, max_minutes=900 / 60))
    assert half.minutes == pytest.approx(900 / 60, rel=0.01)
    # The teacher was to take 300 s and took 50: its 250 s go to the students, who have 750 of the 1000 s that they want.
    again = refitted(short, whole, stages, [], rates, Recipe(**NEEDED, max_minutes=900 / 60), spent_s=50.0)
    assert (again.teacher_steps, again.student_steps, again.distill_tokens) == (700, 3000, 15_000)
    assert "leaves the teacher 700 of 1,000 steps" in again.warnings[0]
    assert "leaves each student 3,000 of 4,000 steps" in again.warnings[1]
    enough = refitted(whole, whole, stages, [], rates, Recipe(**NEEDED, max_minutes=2000 / 60), spent_s=50.0)
    assert enough.student_steps == 4000
    assert not enough.warnings
    late = refitted(short, whole, stages, [], rates, Recipe(**NEEDED, max_minutes=900 / 60), spent_s=5000.0)
    assert late.student_steps == 400  # a tenth, however late it is


def test_minutes_that_cannot_suffice_are_refused_with_what_would(run: Run, given: dict[str, str | Path]) -> None:
    code, said = run("run", *(part for pair in given.items() for part in pair), "--max-minutes", "0.01")
    assert code == 2
    assert "--max-minutes is 0.01" in said
    assert "Give more minutes" in said


def test_a_refusal_for_want_of_minutes_leaves_what_was_finished(
    run: Run, given: dict[str, str | Path], tmp_path: Path
) -> None:
    work = tmp_path / "out.work"
    (work / "teacher").mkdir(parents=True)
    (work / "made-by-stillroom").touch()
    (work / "teacher" / "model.safetensors").write_bytes(b"hours of work")
    code, said = run("run", *(part for pair in given.items() for part in pair), "--max-minutes", "0.001")
    assert code == 2
    assert "--max-minutes is 0.001" in said
    assert (work / "teacher" / "model.safetensors").read_bytes() == b"hours of work"


def test_a_student_that_labels_alone_would_serve_better_is_told_so() -> None:
    from stillroom.verbs.run.report import claims

    row = {"a": "int8", "b": "undistilled", "difference": -0.4, "low": -0.6, "high": -0.2, "supported": True}
    assert "distillation made this model worse" in claims({"differences": [row]})[-1]
    better = row | {"difference": 0.4, "low": 0.2, "high": 0.6}
    assert len(claims({"differences": [better]})) == 1


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "no/such/folder", "nowhere.v2", "tests/nowhere"])
def test_a_path_that_is_not_there_asks_no_network(
    name: str, run: Run, given: dict[str, str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", asked)
    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    monkeypatch.setattr("datasets.load_dataset", asked)
    assert f"--teacher {name} does not exist" in refused(run, given, teacher=name)
    assert f"--data {name} does not exist" in refused(run, given, data=name)


def test_evaluate_names_the_model_and_the_file_that_are_not_there(run: Run, tmp_path: Path) -> None:
    code, said = run("evaluate", "nosuch", "--data", tmp_path / "gone.jsonl")
    assert code == 2
    assert "2 faults were found; nothing was done. 1. MODEL nosuch is neither" in said
    assert "Give the path of a bundle or a transformers folder." in said
    assert f"2. {tmp_path / 'gone.jsonl'} is not a file" in said


def test_distill_names_all_that_is_wrong_at_once(run: Run, tmp_path: Path) -> None:
    code, said = run(
        "distill", "--teacher", "nosuch", "--corpus", tmp_path / "gone.txt", "--corpus", tmp_path / "gone.pdf",
        "--student", "3by384", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 2
    assert "4 faults were found" in said
    for fault in (
        "--teacher nosuch is neither",
        "3by384",
        "gone.txt is not a file",
        "gone.pdf is",
    ):
        assert fault in said


def test_the_version_is_told(run: Run) -> None:
    from importlib.metadata import version

    done = subprocess.run([sys.executable, "-m", "stillroom", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"stillroom {version('stillroom')}\n"


def test_the_help_of_run_shows_the_recipes_defaults(run: Run) -> None:
    _, said = run("run", "--help")
    assert "--budget-ms. [3x384, or that of the checkpoint in --start]" in said
    assert "student to ship. [0.97]" in said


def test_help_shows_examples_and_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['stillroom', 'run', '--help']\nfrom stillroom.cli.main import app, guarded\nassert guarded(app) == 0\n"
    code += "import serve\nassert not {'torch', 'transformers', 'onnxruntime'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stillroom run --teacher bert-base-uncased" in done.stdout


def test_profiles_example_gives_a_folder_and_its_help_says_what_its_seconds_are(run: Run) -> None:
    _, said = run("profile", "--help")
    assert "--out timings" in said
    assert "every model runs at least six turns" in said


def test_the_base_install_says_what_to_install_for_making_models(run: Run, given: dict[str, str | Path]) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['stillroom', *sys.argv[1:]]\n"
    code += "from stillroom.cli.main import app, guarded; sys.exit(guarded(app))"
    arguments = [str(part) for pair in given.items() for part in pair]
    done = subprocess.run([sys.executable, "-c", code, "run", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'in a clone of stillroom: pip install -c constraints.txt -e ".[build]"' in done.stderr


def test_a_fault_of_ours_is_one_line_and_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("on purpose")

    assert guarded(broken) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "a fault of this program (ZeroDivisionError: on purpose). The details are in " in said
    log = Path(said.rsplit(" ", 1)[1].rstrip("."))
    assert "ZeroDivisionError: on purpose" in log.read_text()
    log.unlink()


def test_a_disk_that_fills_up_is_no_fault_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        with open("/dev/full", "w") as full:
            full.write("a bundle")

    assert guarded(write) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "There is no room to write: [Errno 28] No space left on device. Make room and give the same command" in said


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EBUSY]
)  # fmt: skip
def test_a_path_that_the_system_refuses_is_no_fault_of_ours(capfd: pytest.CaptureFixture[str], number: int) -> None:
    def opened() -> None:
        raise OSError(number, os.strerror(number), "/data/test.jsonl")

    assert guarded(opened) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert (
        f"stillroom: /data/test.jsonl cannot be used: {os.strerror(number)}. Allow this user to use it, or give" in said
    )


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_letters_that_the_output_lacks_are_escaped(encoding: str) -> None:
    word = "\u0432\u043e\u0437\u0432\u0440\u0430\u0442 \u00e9\U0001f600"
    program = (
        "from serve.files import open_closed_streams; open_closed_streams()\n"
        "from stillroom.console import result\nfrom stillroom.verb import print_json\n"
        f"print_json([{word!r}]); print(); result({word!r})\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=ROOT, env=environment, capture_output=True, encoding=encoding
    )
    assert done.returncode == 0, done.stderr
    document, _, line = done.stdout.partition("\n\n")
    assert json.loads(document) == [word]
    assert line.strip() == word.encode(encoding, "backslashreplace").decode(encoding)


def test_a_tokenizer_that_panics_is_no_fault_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    assert guarded(lambda: tokenizer.encode("a text")) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "A library in Rust gave up: chunk size must be non-zero. Most often it is a tokenizer that cannot read a text"
        in said
    )


def test_a_gpu_with_too_little_memory_is_no_fault_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    def allocate() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 9 MiB is free."
        )

    assert guarded(allocate) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "The GPU's memory is too small: CUDA out of memory. Tried to allocate 20.00 GiB. Give --device cpu." in said


def test_the_face_gives_its_names_and_refuses_others() -> None:
    import stillroom

    verbs = {
        "run",
        "distill",
        "finetune",
        "label",
        "select",
        "search",
        "benchmark",
        "export",
        "profile",
        "evaluate",
        "explain",
        "push",
        "load",
        "transfer",
    }
    assert set(stillroom.__all__) == {*verbs, "Pipeline", "Generator", "Client"}
    assert all(callable(getattr(stillroom, name)) for name in stillroom.__all__)
    with pytest.raises(AttributeError, match="stillroom has no 'teach'"):
        stillroom.teach  # noqa: B018


def test_a_file_of_the_users_that_hides_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "serve.py").touch()
    root = ROOT
    started = [sys.executable, "-c", "from stillroom import Client"]
    ended = subprocess.run(
        started, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: {tmp_path / 'serve.py'} hides stillroom's package")


def test_several_processes_are_for_verbs_that_train_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.cli.main import app, guarded

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    said: list[str] = []
    monkeypatch.setattr("stillroom.cli.main.say", said.append)
    assert guarded(lambda: app(["inspect", "no-bundle"])) == 2
    assert said == [
        "2 processes were started for `inspect`; only distill, finetune and run train in several. Run this one without torchrun or "
        "accelerate launch."
    ]


def test_what_only_another_process_meets_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stillroom.cli.main import console, guarded

    def fails() -> None:
        raise BadInput("the folder is not seen from here")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("stillroom.cli.main.MAIN_SPEAKS_S", 0.0)
    monkeypatch.setattr(console, "quiet", True)
    assert guarded(fails) == 2
    assert not console.quiet


@pytest.mark.parametrize("module", ["click", "serve.http.app"])
def test_ctrl_c_while_the_program_is_loaded_is_no_traceback(module: str, tmp_path: Path) -> None:
    # Stands where the module is looked for first, and presses Ctrl-C as it is imported.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressed())\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "stillroom", "serve", "nowhere"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) <= 1, done.stderr
