"""Bad input: one message, exit code 2, nothing half-written. Each is tried through the command line's own door."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from in_process import Ended, command
from repository import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers

import stillroom
from serve.errors import BadInput
from stillroom.cli.main import console, guarded
from stillroom.verbs.run.report import claims

Arguments = dict[str, str | Path]


@pytest.fixture
def given(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> Arguments:
    """A `run` that would work; tests break one part of it."""
    return {
        "--teacher": tiny_teacher,
        "--task": "token-classification",
        "--data": task_data,
        "--out": tmp_path / "out",
        "--student": "layers=2,hidden=32,heads=4,ffn=32",
    }


def run(given: Arguments, *more: str | Path, **changes: str | Path) -> Ended:
    """The command with `changes`, and with `more` arguments."""
    arguments = given | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return command("run", *(part for pair in arguments.items() for part in pair), *more)


def refused(given: Arguments, *more: str | Path, **changes: str | Path) -> str:
    """The message of the command, once it is sure that it exits with 2 and leaves nothing behind."""
    folder = Path(given["--out"]).parent
    before = sorted(folder.rglob("*"))
    ended = run(given, *more, **changes)
    assert (ended.code, ended.out) == (2, ""), ended.said
    assert sorted(folder.rglob("*")) == before, "something was written"
    return ended.said


def without_tokenizer(teacher: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        (teacher / name).unlink(missing_ok=True)


def of_a_decoder(teacher: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16)).save_pretrained(teacher)


def with_tags(*tags: str) -> Callable[[Path], None]:
    def add_head(teacher: Path) -> None:
        from transformers import AutoModelForTokenClassification

        model = AutoModelForTokenClassification.from_pretrained(teacher, id2label=dict(enumerate(tags)), label2id={})
        model.save_pretrained(teacher)

    return add_head


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(without_tokenizer, ("has no tokenizer", "save_pretrained"), id="without a tokenizer"),
        pytest.param(of_a_decoder, ("'gpt2'", "modernbert, mpnet, roberta"), id="a decoder"),
        pytest.param(
            lambda teacher: (teacher / "model.safetensors").rename(teacher / "pytorch_model.bin"), ("Pickled",), id="pickled weights",
        ),
        pytest.param(with_tags("O", "B-city", "I-city"), ("lack item of train", "--new-head"), id="a label that its head lacks"),
        pytest.param(with_tags("O", "I-city", "I-item"), ("BIO", "lacks B-city, B-item"), id="tags of another scheme"),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_be_used_is_refused(
    given: Arguments, tmp_path: Path, spoil: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    spoiled = shutil.copytree(given["--teacher"], tmp_path / "spoiled")
    spoil(spoiled)
    said = refused(given, teacher=spoiled)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("train.jsonl", "text\tlabel\n", "line 1: is not JSON", id="another format"),
        pytest.param("validation.jsonl", "", "is empty", id="an empty file"),
        pytest.param(
            "test.jsonl", '{"text": "to Rome", "entities": [{"start": 3, "end": 9, "label": "city"}]}\n',
            "line 1: entity city ends at 9", id="an entity that ends behind its text",
        ),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_is_refused(
    given: Arguments, tmp_path: Path, name: str, content: str, words: str
) -> None:
    folder = shutil.copytree(given["--data"], tmp_path / "data")
    (folder / name).write_text(content)
    assert f"{name}{',' if 'line' in words else ':'} {words}" in refused(given, data=folder)


def test_a_csv_without_a_column_of_labels_is_refused_with_the_flag_that_names_one(
    given: Arguments, tmp_path: Path
) -> None:
    (tmp_path / "csv").mkdir()
    for name in ("train", "test"):
        (tmp_path / "csv" / f"{name}.csv").write_text("text,intent\nhello,greet\n")
    said = refused(given, data=tmp_path / "csv", task="text-classification")
    assert "text and label are needed" in said
    assert "--label-column intent" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": "nobody/nothing"}, ("nobody/nothing", "Hub")),
        ({"student": "3x383"}, ("'3x383'", "3x384?")),
        ({"student": "layers=2,hidden=30,heads=4,ffn=8"}, ("width of 30", "4 heads")),
        ({"gate": "1.5"}, ("--gate is 1.5", "0 to 1")),
        ({"max_length": "1000"}, ("8 to 64",)),
        ({"teacher": "/nowhere", "student": "huge", "data": "/nothing"}, ("3 faults", "/nowhere", "huge", "/nothing")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_used_is_named(
    given: Arguments, changes: dict[str, str], words: tuple[str, ...]
) -> None:
    said = refused(given, **changes)
    assert all(word in said for word in words), said


def test_missing_settings_and_unknown_flags_are_named(given: Arguments, tmp_path: Path) -> None:
    missing = command("run", "--task", "token-classification", "--out", tmp_path / "out")
    assert missing.code == 2
    assert "--teacher is needed. 2. --data is needed" in missing.said
    assert "--resume" in refused(given, "--resume")


def test_folders_of_other_things_are_left_alone(given: Arguments, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "is not a bundle" in refused(given, out=tmp_path / "mine")
    within = tmp_path / "mine" / "thesis.txt"
    assert f"{within} is not a folder" in refused(given, out=within / "deep" / "bundle")
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine.txt").write_text("keep me")
    assert "already exists and stillroom did not make it" in refused(given)
    assert (within.read_text(), (tmp_path / "out.work" / "mine.txt").read_text()) == ("years of work", "keep me")


def test_a_refusal_for_want_of_minutes_leaves_what_was_finished(given: Arguments, tmp_path: Path) -> None:
    work = tmp_path / "out.work"
    (work / "teacher").mkdir(parents=True)
    (work / "made-by-stillroom").touch()
    (work / "teacher" / "model.safetensors").write_bytes(b"hours of work")
    ended = run(given, max_minutes="0.001")
    assert ended.code == 2
    assert "--max-minutes is 0.001" in ended.said
    assert "Give more minutes" in ended.said
    assert (work / "teacher" / "model.safetensors").read_bytes() == b"hours of work"


def test_texts_of_test_are_left_out_of_what_the_student_sees(given: Arguments, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (Path(given["--data"]) / "test.jsonl").read_text().splitlines()]
    spaced = tmp_path / "spaced.jsonl"  # the same texts, as an export with blanks around them would hold them
    spaced.write_text("".join(json.dumps({"text": f" {row['text']} "}) + "\n" for row in rows))
    code, out, said = run(given, "--dry-run", "--json", unlabelled=spaced)
    assert code == 0, said
    left_out = "60 texts of --unlabelled are in validation or test and were left out"
    assert said.count(f"warning: {left_out}") == 1
    assert [each for each in json.loads(out)["warnings"] if left_out in each]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        pytest.param("teacher = ", "is not TOML", id="not TOML"),
        pytest.param("techer = 'x'", "techer is not a setting (did you mean teacher?)", id="a typo"),
        pytest.param("batch = 'many'", "--batch is 'many'", id="the wrong type"),
        pytest.param("teacher-epochs = 0", "--teacher-epochs is 0", id="the spelling of a flag"),
        pytest.param("techer = 'x'\nbatch = 0", "--batch is 0", id="all at once"),
        pytest.param("precision = 'int4'", "'int4'; give one of auto, fp32, bf16, fp16", id="an unknown choice"),
        pytest.param("stages = 'minilmv2'", "stages is 'minilmv2'; give a table", id="a text for a table"),
        pytest.param("stages = 0", "stages is 0; give a table", id="a number for a table"),
        pytest.param("corpus = {a = 1}", "--corpus is {'a': 1}; give a list", id="a table for a list"),
        pytest.param("seed = 1979-05-27", "--seed is datetime.date(1979, 5, 27)", id="a date"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "recipe.toml").write_text(toml)
    ended = command("run", tmp_path / "recipe.toml")
    assert ended.code == 2
    assert message in ended.said


def test_a_teacher_that_learned_nothing_stops_the_run(given: Arguments) -> None:
    ended = run(given, teacher_epochs="1", teacher_learning_rate="1e-9")
    assert ended.code == 2
    assert "not shown to be better than chance" in ended.said
    assert "--teacher-epochs" in ended.said
    assert not Path(given["--out"]).exists()


def test_a_dry_run_prints_the_plan_and_writes_no_stage(given: Arguments) -> None:
    code, out, said = run(given, "--dry-run", "--json")
    assert code == 0, said
    assert said.startswith("task: token-classification (entities, BIO), scored by entity_f1 texts: 240 in train")
    plan = json.loads(out)
    assert plan["understood"]["steps"]["teacher"] == 2000
    assert plan["teacher_steps"] == 2000  # five epochs of 240 texts would be 40 steps, too few for a task
    assert plan["student_steps"] == 1000
    assert plan["minutes"] > 0
    assert plan["memory_bytes"] > 10_000_000
    assert not Path(f"{given['--out']}.work").exists()
    other_heads = run(given, "--dry-run", "--json", student="layers=2,hidden=32,heads=2,ffn=32")
    assert "The student's layers start at random" in other_heads.said


def test_a_student_that_labels_alone_would_serve_better_is_told_so() -> None:
    row = {"a": "int8", "b": "undistilled", "difference": -0.4, "low": -0.6, "high": -0.2, "differ": True}
    told = claims({"differences": [row]})
    assert "these two models differ" in told[0]
    assert "distillation made this model worse" in told[-1]
    assert "not shown to differ" in claims({"differences": [row | {"high": 0.1, "differ": False}]})[0]
    better = row | {"difference": 0.4, "low": 0.2, "high": 0.6}
    assert len(claims({"differences": [better]})) == 1


@pytest.mark.parametrize("name", ["./nowhere", "no/such/folder"])
def test_a_path_that_is_not_there_asks_no_network(name: str, given: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    for function in ("huggingface_hub.HfApi.repo_info", "huggingface_hub.snapshot_download", "datasets.load_dataset"):
        monkeypatch.setattr(function, asked)
    said = refused(given, teacher=name, data=name)
    assert f"--teacher {name} does not exist" in said
    assert f"--data {name} does not exist" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evaluate", "nosuch", "--data", "gone.jsonl"), ("2 faults", "MODEL nosuch", "gone.jsonl is not a file")),
        (
            ("distill", "--teacher", "nosuch", "--corpus", "gone.txt", "--corpus", "gone.pdf", "--student", "3by384", "--out", "out"),
            ("4 faults", "--teacher nosuch", "3by384", "gone.txt is not a file", "gone.pdf is"),
        ),
    ],
    ids=["evaluate", "distill"],
)  # fmt: skip
def test_other_verbs_name_all_that_is_wrong_at_once(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command(*arguments)
    assert ended.code == 2
    assert all(word in ended.said for word in words), ended.said
    assert not list(tmp_path.iterdir())


def test_the_version_is_told() -> None:
    assert command("--version") == (0, f"stillroom {version('stillroom')}\n", "")


def test_help_shows_examples_and_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['stillroom', 'run', '--help']\nfrom stillroom.cli.main import app, guarded\nassert guarded(app) == 0\n"
    code += "import serve\nassert not {'torch', 'transformers', 'onnxruntime'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stillroom run --teacher bert-base-uncased" in done.stdout


def test_the_base_install_says_what_to_install_for_making_models(given: Arguments) -> None:
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


def write_to_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        full.write("a bundle")


def panic_in_a_tokenizer() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    tokenizer.encode("a text")


def allocate_too_much() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 15.77 GiB.")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (write_to_a_full_disk, ("no room to write", "No space left on device", "Make room")),
        (panic_in_a_tokenizer, ("A library in Rust", "chunk size must be non-zero", "tokenizer")),
        (allocate_too_much, ("The GPU's memory is too small", "allocate 20.00 GiB. Give --device cpu")),
    ],
)
def test_failures_of_the_machine_or_of_a_library_are_no_fault_of_this_program(
    fails: Callable[[], None], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded(fails) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert all(word in said for word in words), said


OF_A_TASK = "--task text-classification --data none"
WITH_RESULTS = {
    "run": f"--teacher TEACHER --student 3x384 {OF_A_TASK}",
    "distill": "--teacher TEACHER --corpus none.txt",
    "finetune": f"--model TEACHER {OF_A_TASK}",
    "label": "--with-command true --task text-classification --input none.txt",
    "select": "--bank none.txt --like none --task text-classification --encoder TEACHER",
    "compare": f"--teacher TEACHER --method labels {OF_A_TASK}",
    "transfer": "--teacher TEACHER --source a=text-classification:none --target b=text-classification:none",
    "search": f"--teacher TEACHER --budget-ms 5 {OF_A_TASK}",
    "export": "TEACHER",
    "benchmark": "TEACHER --suite glue --data none",
    "profile": "TEACHER",
    "load": "http://127.0.0.1:1 --data none.txt --rate 1",
    "explain": "TEACHER TEACHER --data none.txt",
    "demo": "",
}


PLACES = [
    *((verb, "/proc/none") for verb in WITH_RESULTS),
    *(("profile", place) for place in ("a.csv", "link", "~/a.zip")),
]


@pytest.mark.parametrize(("verb", "place"), PLACES)
def test_every_verb_checks_the_place_of_its_results_before_it_begins(
    verb: str, place: str, tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("gone")
    before = sorted(tmp_path.rglob("*"))
    arguments = WITH_RESULTS[verb].replace("TEACHER", str(tiny_teacher)).split()
    ended = command(verb, *arguments, f"--out={place}")
    assert ended.code == 2
    assert re.search(rf"--out [^~ ]*{Path(place).name} ", ended.said), ended.said
    assert sorted(tmp_path.rglob("*")) == before


REFUSALS = ("EACCES", "EPERM", "EROFS", "EISDIR", "ENOTDIR", "ELOOP", "ENAMETOOLONG", "EBUSY", "EIO")


@pytest.mark.parametrize("name", REFUSALS)
def test_a_path_that_the_system_refuses_is_no_fault_of_this_program(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    number = getattr(errno, name)

    def opened() -> None:
        raise OSError(number, os.strerror(number), "/data/test.jsonl")

    assert guarded(opened) == 2
    said = " ".join(capfd.readouterr().err.split())
    mend = "Allow this user to use it, or give" if name in ("EACCES", "EPERM", "EROFS") else "Give"
    assert f"stillroom: /data/test.jsonl cannot be used: {os.strerror(number)}. {mend} another path." in said


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


def test_the_package_has_a_function_for_each_verb_and_refuses_other_names() -> None:
    verbs = "run distill finetune label select search benchmark export profile evaluate explain push load transfer"
    assert set(stillroom.__all__) == {*verbs.split(), "Pipeline", "Generator", "Client"}
    assert all(callable(getattr(stillroom, name)) for name in stillroom.__all__)
    with pytest.raises(AttributeError, match="stillroom has no 'teach'"):
        stillroom.teach  # noqa: B018


def test_a_file_of_the_users_that_hides_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "serve.py").touch()
    started = [sys.executable, "-c", "from stillroom import Client"]
    ended = subprocess.run(
        started, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: {tmp_path / 'serve.py'} hides stillroom's package")


def test_several_processes_are_for_verbs_that_train_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    ended = command("inspect", "no-bundle")
    assert ended.code == 2
    assert "2 processes were started for `inspect`; only distill, finetune and run train in several" in ended.said


def test_an_error_of_another_process_alone_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
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
