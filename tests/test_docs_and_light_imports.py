"""What the docs say is true of the code, and what is imported stays light. Which folder may import which, `make check` holds."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_what_reads_and_scores_needs_no_torch() -> None:
    code = "import sys, compress.data.examples, compress.tasks, serve, serve.http.app, stillroom.cli.main\n"
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def fenced(language: str) -> list[tuple[str, str]]:
    """Every fenced block of `language` in the docs, with the page that it stands on."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [(page.name, block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]
    return found


def test_the_process_that_accepts_connections_loads_no_runtime() -> None:
    code = "import sys, serve.http.app; sys.exit(bool({'onnxruntime', 'openvino'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_command_in_the_docs_is_one() -> None:
    command = __import__("stillroom.cli.main", fromlist=["app"]).app
    seen = 0
    for page, block in fenced("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            while words and re.match(r"[A-Z_]+=", words[0]):  # of the environment
                words.pop(0)
            if words[:1] != ["stillroom"] or len(words) < 2:
                continue
            seen += 1
            verb = command.commands.get(words[1])  # type: ignore[attr-defined]
            assert verb, f"{page}: there is no `stillroom {words[1]}`"
            options = {
                option for parameter in verb.params for option in [*parameter.opts, *parameter.secondary_opts]
            } | {"--help"}
            unknown = {word.split("=")[0] for word in words if word.startswith("--")} - options
            assert not unknown, f"{page}: {line.strip()} has {unknown}"
    assert seen >= 4


def test_every_command_in_the_prose_of_the_docs_is_one() -> None:
    """Commands between backticks, and flags that a table or a sentence gives a verb: `--flag` of `verb` and `verb`."""
    command = __import__("stillroom.cli.main", fromlist=["app"]).app
    verbs = {
        name: {option for each in verb.params for option in [*each.opts, *each.secondary_opts]} | {"--help"}
        for name, verb in command.commands.items()
    }
    seen, unknown = 0, set()
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        asked = [found.split() for found in re.findall(r"`(?:stillroom )?([a-z]+ [^`]*--[a-z][^`]*)`", prose)]
        asked += [
            [verb, flag] for flag, verb in re.findall(r"`(--[a-z0-9-]+)[^`]*` of `(?:stillroom )?([a-z]+)`", prose)
        ]
        asked += [
            [verb, flag]
            for flag, verb in re.findall(r"`(--[a-z0-9-]+)[^`]*` of `[a-z]+`(?:, `[a-z]+`)* and `([a-z]+)`", prose)
        ]
        for verb, *words in asked:
            if verb in verbs and words[0] != "run":  # `serve run` is a command of Ray
                seen += 1
                flags = {re.match(r"--[a-z0-9-]*", word)[0] for word in words if word.startswith("--")}  # type: ignore[index]
                unknown |= {f"{page.name}: {verb} {flag}" for flag in flags - verbs[verb]}
    assert not unknown
    assert seen > 50


def test_every_script_in_the_docs_is_there() -> None:
    named = {
        (page, script)
        for page, block in fenced("sh")
        for script in re.findall(r"\bpython ((?:benchmarks|tests)/\S+\.py)", block)
    }
    assert named
    assert not [(page, script) for page, script in named if not (ROOT / script).is_file()]


def test_every_link_to_a_file_of_the_project_leads_there() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 50
    assert not [(page.name, target) for page, target in links if not (page.parent / target).exists()]


def test_every_anchor_in_the_docs_is_a_heading() -> None:
    wrong, seen = [], 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            other = page.parent / target if target else page
            headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            seen += 1
            if anchor not in slugs:
                wrong.append((page.name, target, anchor))
    assert seen > 20
    assert not wrong


def test_every_make_target_in_the_docs_is_one() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {m for _, block in fenced("sh") for m in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)}
    assert named >= {"demo", "test"}
    assert named <= targets


def test_the_recipe_in_the_docs_resolves(tmp_path: Path) -> None:
    from stillroom.inputs.recipe import read_recipe, resolve

    blocks = fenced("toml")
    assert blocks
    for _, block in blocks:
        (tmp_path / "recipe.toml").write_text(block, encoding="utf-8")
        assert resolve(read_recipe(tmp_path / "recipe.toml"), {}).teacher


def test_the_data_in_the_docs_reads(tmp_path: Path) -> None:
    from compress.data.labelled_files import read_examples
    from compress.data.row_fields import BadRows
    from compress.tasks import LABELLED

    blocks = [(page, block) for page, block in fenced("json") if page == "your-data.md"]
    assert blocks
    for _, block in blocks:
        (tmp_path / "rows.jsonl").write_text(block, encoding="utf-8")
        read = []
        for task in LABELLED.values():
            try:
                read += read_examples(tmp_path / "rows.jsonl", task)
            except BadRows:
                continue
        assert read, block


def test_the_data_that_the_docs_generate_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (block for page, block in fenced("python") if page == "your-data.md")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "your-data.md", "exec"), {})  # noqa: S102  # the page's own code
    made = sorted(file.name for file in (tmp_path / "support-messages").iterdir())
    assert made == ["test.jsonl", "train.jsonl", "unlabelled.txt", "validation.jsonl"]


def test_the_calls_of_verbs_in_the_docs_have_settings_that_exist() -> None:
    import inspect
    from importlib import import_module

    import stillroom
    from serve.options import make

    verbs = {
        name: (getattr(stillroom, name), import_module(f"stillroom.verbs.{name}").VERB.kind)
        for name in stillroom.IN_PYTHON
    }
    seen = set()
    for page, block in fenced("python"):
        if "from stillroom import" not in block:
            continue
        for call in ast.walk(ast.parse(block)):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in verbs):
                continue
            function, kind = verbs[call.func.id]
            seen.add(call.func.id)
            given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            bound = inspect.signature(function).bind(*map(ast.literal_eval, call.args), **given).arguments
            values = bound.pop("settings", {}) | bound
            arguments = {
                "checkpoint",
                "model",
                "models",
                "url",
                "teacher",
                "student",
            } - kind.__dataclass_fields__.keys()  # no settings
            assert make(kind, {name: values[name] for name in values.keys() - arguments}), page
    assert seen >= {"run", "finetune", "label", "export", "evaluate", "explain", "profile"}


# What stands in prose for a value, and the value of a flag that prose names without one.
STAND_INS = {
    "FILE": "texts.txt", "NAME": "minilmv2", "M": "minilmv2", "BODY": "teacher", "T": "teacher", "TEACHER": "teacher",
    "MODEL": "classifier", "CHECKPOINT": "classifier", "BUNDLE": "my-bundle", "my.bundle": "my-bundle", "DATA": "data", "D": "data",
    "B": "OUT", "FOLDER": "OUT.cache", "URL": "STORE", "30": "0",  # the seconds of timing an export
    "--teacher": "classifier", "--unlabelled": "texts.txt", "--vocabulary-size": "150", "--checkpoint-seconds": "60", "--tokens": "16",
    "--batch": "16", "--input": "texts.txt", "--name": "tagger", "--uncertain": "5", "--model": "teacher", "--method": "minilmv2",
    "--layer-map": "spread",
}  # fmt: skip
# What a command of prose leaves out, by its verb or one of its words: small inputs, and as few steps as there are.
SHAPE = "--student layers=1,hidden=32,heads=4,ffn=32"
LEFT_OUT = {
    "run": f"--teacher teacher --task text-classification --data data {SHAPE} --out OUT --dry-run",
    "finetune": "--model teacher --task text-classification --data data --out OUT --epochs 1 --batch 40",
    "distill": f"--teacher teacher --corpus texts.txt {SHAPE} --out OUT --epochs 1 --batch 50",
    "export": "classifier --data data --out OUT --variants fp32 --latency-seconds 0",
    "label": "--with classifier --input texts.txt --out OUT.jsonl",
    "select": "--bank texts.txt --like data --task text-classification --encoder teacher --k 3 --near-duplicate 1 --out OUT.jsonl",
    "evaluate": "classifier --data data",
    "explain": "classifier classifier --data data/test.jsonl --out OUT",
    "push": "my-bundle STORE --replace",
    "--start": "--student layers=2,hidden=32,heads=4,ffn=64", "--augment": "--unlabelled texts.txt", "--uncertain": "--with classifier",
    "glue": "--max-length 64", "--layer-map": "--method hidden-states", "--no-pack": "--method minilmv2",
    "text-regression": "--data ratings", "minilmv2": "--corpus texts.txt", "recipe.toml": "--dry-run",
}  # fmt: skip
# What a command that is not run here has in it, and what runs it, or why nothing does.
NOT_HERE = {
    "kubectl": "a cluster", "docker": "its daemon", "systemctl": "systemd", "ray start": "a cluster", "serve run": "test_ray.py",
    "serve deploy": "a cluster", "torchrun": "test_launched.py", "pip ": "it changes the environment", "git show": "the history",
    "make demo": "13 minutes", "demo --out": "13 minutes", "curl": "a name on the internet", "python ": "benchmarks measure for minutes",
    "serve ": "tests/serve", "load --json": "tests/latency/load", "profile --json": "tests/stillroom/verbs/profile",
    "--fuse": "tests/export", "--student auto": "it searches for minutes", "finetune --teacher": "test_verbs.py",
    "benchmark": "the files of a suite", "VERB": "a form of commands",
    "--device cuda": "a GPU", "--paper": "test_papers_table.py", "--sweep": "a minute", "--against": "test_speed_regression.py",
    "--teacher-shard": "several processes", "--source-data": "test_compare.py", "--export": "test_compare.py",
    "xtremedistil-transfer": "it is refused", "--promise": "a bundle that promises",
    "--teacher TEACHER": "a teacher of vectors",
}  # fmt: skip


def parsed(words: list[str], verb: Any) -> tuple[list[str], dict[str, str]]:
    """The arguments and options of a command of `verb`; an option without its value has that of `STAND_INS`."""
    takes_value = {flag: not getattr(option, "is_flag", False) for option in verb.params for flag in option.opts}
    arguments: list[str] = []
    options, last = dict[str, str](), ""
    for word in words:
        if word.startswith("--"):
            last = word
            options[last] = STAND_INS.get(last, "") if takes_value.get(last) else ""
        elif takes_value.get(last):
            options[last], last = STAND_INS.get(word, word), ""
        elif word != "...":
            arguments.append(STAND_INS.get(word, word))
    return arguments, options


def test_every_command_in_the_prose_of_the_docs_runs_or_is_listed_with_its_reason(
    task_data: Path, shallow_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of one verb that do not contradict one another are one; those of `run` are planned, each alone."""
    from in_process import command
    from lookup_bundles import INTENTS, intent_table, write_bundle
    from small_task import ratings, write_splits

    verbs = __import__("stillroom.cli.main", fromlist=["app"]).app.commands
    programs = "kubectl|docker|systemctl|ray|torchrun|pip|git|make|curl|python|serve|stillroom"
    spans = {
        " ".join(span.split()).removeprefix("stillroom ")
        for page in PAGES
        for span in re.findall(
            rf"`((?:(?:{programs}) |(?:{'|'.join(verbs)}) --)[^`]+)`",
            re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL),
        )
    }
    asked = {each for each in spans - verbs.keys() if not any(part in f"{each} " for part in NOT_HERE)}
    assert not {part for part in NOT_HERE if not any(part in f"{each} " for each in spans)}, "no command has this"
    groups: list[tuple[str, list[str], dict[str, str]]] = []
    for verb, *words in map(str.split, sorted(asked)):
        arguments, options = parsed(words, verbs[verb])
        for word in (*words, *options.values()):
            options = parsed(LEFT_OUT.get(word, "").split(), verbs[verb])[1] | options
        for other, theirs, of_theirs in groups:
            fits = not (theirs and arguments) and all(of_theirs.get(k, v) == v for k, v in options.items())
            if other == verb and ((fits and verb != "run") or (theirs, of_theirs) == (arguments, options)):
                theirs.extend(arguments if theirs != arguments else [])
                of_theirs.update(options)
                break
        else:
            groups.append((verb, arguments, options))
    for folder in (task_data, shallow_teacher):
        shutil.copytree(folder, tmp_path / ("data" if folder is task_data else "teacher"))
    write_splits(tmp_path / "ratings", ratings, (40, 40, 40))
    (tmp_path / "texts.txt").write_text("\n".join(f"please refund the lamp {i}" for i in range(50)), encoding="utf-8")
    write_bundle(tmp_path / "my-bundle", intent_table(), task="text-classification", labels=INTENTS)
    classifier_of(shallow_teacher, tmp_path / "classifier")
    (tmp_path / "recipe.toml").write_text(
        'teacher = "teacher"\ntask = "text-classification"\ndata = "data"\nout = "o"\nstudent = "layers=1,hidden=32,heads=4,ffn=32"\n',
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    failed = []
    for number, (verb, arguments, options) in enumerate(groups):
        if "recipe.toml" not in arguments:
            more, further = parsed(LEFT_OUT.get(verb, "").split(), verbs[verb])
            arguments, options = arguments or more, further | options  # noqa: PLW2901
        words = [*arguments, *(word for option in options.items() for word in option if word)]
        words = [
            word.replace("OUT", f"out{number}").replace("STORE", f"file://{tmp_path}/store{number}") for word in words
        ]
        ended = command(verb, *words)
        if ended.code:
            failed.append(f"{verb} {' '.join(words)}: {ended.code} {ended.said[-300:]}")
    assert not failed, "\n".join(failed)


def classifier_of(teacher: Path, folder: Path) -> None:
    """A model of random weights for the intents of the task."""
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(teacher, folder)
    names = ("praise", "refund", "status")
    changes = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    AutoModelForSequenceClassification.from_pretrained(folder, **changes).save_pretrained(folder)
