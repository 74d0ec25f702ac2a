"""What every verb's command line has in common: help, completion, streams and JSON."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from in_process import command
from patience import PATIENCE_S
from processes import started
from repository import ROOT
from small_task import write_rows

import stillroom
from compress.methods.catalogue import METHODS, Sizes
from compress.models.initialise import STARTS as COPIED
from compress.settings import STARTS, TASK_METHODS, TEXT_METHODS
from serve.errors import BadInput, GateMissed
from serve.options import options_of
from stillroom.cli import reference
from stillroom.cli.main import GROUPS, guarded
from stillroom.verb import Verb
from stillroom.verbs.evaluate import Evaluation

VERBS = {str(verb.name): verb for verbs in GROUPS.values() for verb in verbs}


def helped(monkeypatch: pytest.MonkeyPatch, *verb: str) -> str:
    """`stillroom VERB --help` on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, said = command(*verb, "--help")
    assert (code, said) == (0, "")
    return out


def rows_of(text: str) -> dict[str, str]:
    """What stands beside each flag of a help text, without its line breaks."""
    found: dict[str, str] = {}
    flag = ""
    for line in text.split("Examples:", maxsplit=1)[0].splitlines():
        if begun := re.match(r"  (--\S+)", line):
            flag = begun[1].replace("--[no-]", "--")
        elif not line.startswith("   "):
            flag = ""
        if flag:
            found[flag] = f"{found.get(flag, '')} {line.strip()}".strip()
    return found


def completed(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What a shell is told to complete the last of `words` with."""
    for name, value in {
        "_STILLROOM_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return [line.partition(",")[2] for line in command().out.splitlines()]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_choice_and_default_whole_in_80_columns(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = helped(monkeypatch, verb)
    assert max(map(len, text.splitlines())) <= 80
    rows = rows_of(text)
    for option in options_of(VERBS[verb].kind) if VERBS[verb].kind else ():
        row = rows[option.flag]
        missing = [choice for choice in option.choices if str(choice) not in re.split(r"[\s,.\[\]]+", row)]
        assert not missing, f"{option.flag}: {missing}"
        assert option.kind is bool or not option.default_shown or row.endswith(f"[{option.default_shown}]")


def test_a_flag_takes_one_kind_of_value_in_every_verb() -> None:
    kinds: dict[str, set[object]] = {}
    for verb in VERBS.values():
        for option in options_of(verb.kind) if verb.kind else ():
            kinds.setdefault(option.flag, set()).add(str if option.kind is Path else option.kind)
    assert {flag: found for flag, found in kinds.items() if len(found) > 1} == {}


def test_the_first_help_lists_every_verb_under_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    text = helped(monkeypatch)
    places = [text.index(f"\n{heading}:\n") for heading in GROUPS]
    assert places == sorted(places)
    assert all(f"  {name:<10}  {verb.summary.split()[0]}" in text for name, verb in VERBS.items())


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("exp", ["explain", "export"]),
        ("export x --variants fp32,f", ["fp32,fp32", "fp32,fp16"]),
        ("distill --method minilmv", ["minilmv2"]),
        ("run --student 6x", ["6x768", "6x384"]),
        ("export --v", ["--variants", "--verbose"]),
        ("serve x --variant ", ["fp32", "fp16", "int8"]),
    ],
)
def test_shells_complete_verbs_flags_and_choices(words: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(monkeypatch, "stillroom", *words.split(" ")) == found


def test_a_shell_gets_its_completion_script() -> None:
    assert "_STILLROOM_COMPLETE=bash_complete" in command("--completion", "bash").out


def test_the_reference_page_is_what_the_settings_say() -> None:
    assert (ROOT / "docs" / "reference" / "flags.md").read_text(encoding="utf-8") == reference.page()


def test_the_methods_of_help_are_those_that_there_are() -> None:
    assert {*TEXT_METHODS, *TASK_METHODS} == set(METHODS)
    sizes = Sizes(teacher_layers=12, student_layers=6, teacher_width=768, student_width=768)
    on_text = {name for name, stages in METHODS.items() if {stage.text for stage in stages(sizes)} == {"corpus"}}
    assert set(TEXT_METHODS) == on_text
    assert len(TEXT_METHODS) + len(TASK_METHODS) == len(METHODS)
    assert {*COPIED, "random"} == set(STARTS)


def test_every_verb_but_serve_prints_one_json_document() -> None:
    with_json = {name for name, verb in VERBS.items() if any("--json" in param.opts for param in verb.params)}
    assert set(VERBS) - with_json == {"serve"}


def test_a_missed_gate_is_one_document_and_exit_code_3(capfd: pytest.CaptureFixture[str]) -> None:
    missed = {"gates": [{"name": "int8 over fp32", "value": 0.9, "needed": 0.99, "passed": False}], "report": "r.html"}

    def judge(**settings: object) -> dict[str, object]:
        raise GateMissed("No bundle was written: int8 keeps 0.9.", document=missed)

    verb = Verb("judge", judge, Evaluation, help=None, show=print)
    assert guarded(lambda: verb.main(["--data", "x", "--json"], standalone_mode=False)) == 3
    captured = capfd.readouterr()
    assert json.loads(captured.out) == missed
    assert "No bundle was written" in captured.err
    assert guarded(lambda: verb.main(["--data", "x"], standalone_mode=False)) == 3
    assert capfd.readouterr().out == ""


def test_quiet_leaves_errors_and_results(plain: Path, tmp_path: Path) -> None:
    within_a_word: dict[str, object] = {"text": "to rome", "entities": [{"start": 3, "end": 6, "label": "city"}]}
    rows = write_rows(tmp_path / "test.jsonl", [within_a_word])
    for flags, warned in (([], True), (["-q"], False)):
        code, out, said = command("evaluate", plain, *flags, "--data", rows)
        assert (code, "warning: 1 entity" in said, bool(said)) == (0, warned, warned)
        assert "entity_f1 0.0000" in out
    code, out, said = command("evaluate", plain, "-q", "--data", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "none is not a file" in said


def test_quiet_leaves_errors_alone_in_the_log_of_a_server(plain: Path) -> None:
    command = [sys.executable, "-m", "stillroom", "serve", str(plain), "--port", "0", "--linger-s", "0", "-q"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.post(f"{url}/v1/entities", json={"text": "to rome"}, timeout=PATIENCE_S).status_code == 200
        process.terminate()
        assert process.communicate(timeout=PATIENCE_S)[1] == ""


def test_verbose_lets_libraries_speak() -> None:
    code = "import sys\nfrom stillroom.console import libraries_speak\nif sys.argv[1:]: libraries_speak()\n"
    code += "from transformers.utils import logging\nlogging.get_logger('transformers').info('read the weights')"
    for flags in ([], ["-v"]):
        command = [sys.executable, "-c", code, *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert ("read the weights" in done.stderr) is bool(flags)


# `evaluate` with a fault of this program.
BROKEN = """import sys, stillroom.verbs.evaluate.unlabelled as e; e.generates = None
from stillroom.cli.main import app, guarded
sys.exit(guarded(lambda: app(sys.argv[1:])))"""


def test_verbose_shows_the_traceback_of_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for flags in ([], ["-v"]):
        command = [sys.executable, "-c", BROKEN, "evaluate", "m", "--data", "d", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert (done.returncode, "Traceback" in done.stderr) == (1, bool(flags))


def test_where_no_temporary_folder_can_be_written_one_line_says_so(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("to rome\n")
    for verb, code, needed in (
        (["-m", "stillroom", "profile", plain, "--data", tmp_path / "texts.txt"], 2, "Set TMPDIR to a folder"),
        (["-c", BROKEN, "evaluate", "m", "--data", "d"], 1, "--verbose prints them"),
    ):
        # No file can grow, in no folder: so the root user, too, finds none that can be written.
        command = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, *map(str, verb)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "No usable temporary directory found" in done.stderr
        assert needed in done.stderr


@pytest.mark.parametrize("setting", ["progress", "nonsense"])
def test_functions_name_what_is_no_setting_before_any_work(setting: str) -> None:
    with pytest.raises(BadInput, match=f"^{setting} is not a setting; the settings are .*learning_rate, method"):
        stillroom.distill("teacher", ["corpus.txt"], "out", **{setting: 1})
    with pytest.raises(BadInput, match=f"^{setting} is not a setting; the settings are .*data, data_revision"):
        stillroom.finetune("model", "text-classification", "data", "out", **{setting: 1})
