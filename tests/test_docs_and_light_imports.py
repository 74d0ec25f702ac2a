"""What the docs say is true of the code, and what is imported stays light. Which folder may import which, `make check` holds."""

import ast
import re
import subprocess
import sys
from pathlib import Path

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
