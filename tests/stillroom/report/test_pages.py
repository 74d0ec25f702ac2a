import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from jinja2 import UndefinedError
from read_page import HOSTILE, Page, part
from repository import ROOT
from synthetic_profile import synthetic_profile
from test_comparison_page import document as comparison
from test_profile_page import renamed
from test_run_page import full_report

from stillroom.report import comparison_page
from stillroom.report.formats import table
from stillroom.report.pages import Look, Part, can_write_pages, environment, rendered
from stillroom.report.profile_page import profile_page
from stillroom.report.run_page import report_files, report_page, write_report
from stillroom.verbs.profile.run import write_profile


@pytest.fixture
def no_jinja(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can import Jinja2."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    can_write_pages.cache_clear()
    environment.cache_clear()
    yield
    can_write_pages.cache_clear()


@pytest.mark.usefixtures("no_jinja")
def test_without_jinja_a_profile_is_json_and_a_table_and_one_message_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").write_text("of an earlier profile")
    for _ in range(2):  # a profile writes what it knows again and again
        write_profile(tmp_path, synthetic_profile(models=1))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json", "table.md"]
    assert json.loads((tmp_path / "report.json").read_text())["models"][0]["name"] == "teacher torch fp32"
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("HTML pages are left out, because Jinja2 is not installed") == 1
    assert "pip install '.[report]'" in said


@pytest.mark.usefixtures("no_jinja")
def test_without_jinja_a_bundle_has_its_report_as_json(tmp_path: Path) -> None:
    assert list(report_files(full_report())) == ["report.json"]
    assert write_report(tmp_path / "report.html", full_report()) == tmp_path / "report.json"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_the_profile_is_imported_and_told_without_jinja() -> None:
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from stillroom.report import comparison_page, profile_page, run_page\n"
        "from synthetic_profile import synthetic_profile\n"
        "print(profile_page.profile_markdown(synthetic_profile(models=1)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/latency'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| teacher torch fp32 |" in told.stdout


# Each with a text wherever one from outside can stand.
PAGES: dict[str, Callable[[str], str]] = {
    "run": lambda text: report_page(full_report(text)),
    "profile": lambda text: profile_page(renamed(synthetic_profile(), text)),
    "comparison": lambda text: comparison_page.page(comparison(text)),
}


@pytest.mark.parametrize("name", PAGES)
def test_text_from_outside_stays_text_and_a_page_needs_nothing_but_itself(name: str) -> None:
    plain = PAGES[name]("a plain name")
    page = Page(PAGES[name](HOSTILE))
    assert HOSTILE in page.texts
    assert len(page.tags) == len(Page(plain).tags)  # nothing of it was read as markup
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "link", "object", "use", "image"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "srcset", "data")]
    targets = [attributes["href"] for _, attributes in page.tags if "href" in attributes]
    assert targets
    assert all(target and target[1:] in page.sections() for target in targets)
    assert not re.search(r"https?://|url\(|@import", plain)
    assert "default-src 'none'" in plain


def test_a_name_that_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'nothing' is undefined"):
        environment().from_string("{{ nothing }}").render()


def test_a_section_that_holds_nothing_but_explanations_is_left_out() -> None:
    notes: list[Part] = [("quiet", "why"), ("note", "profile_server")]
    empty: list[Part] = ["", None, [], {}, table(), ("pre", ""), ("charts", []), ("bars", "no rows", [])]
    deep: list[Part] = [("under", "a heading", [("details", "a title", [*notes, *empty])])]
    page = Page(
        rendered("A page", [], [("empty", "Empty", [*notes, *empty, *deep]), ("one", "One", [*notes, *deep, "a line"])])
    )
    assert page.sections() == ["one"]
    assert [tag for tag, _ in page.tags if tag in ("nav", "h3", "details", "ul", "pre", "table")] == []
    assert page.texts.count("why") == 1


def test_every_part_has_a_macro_and_its_text_stays_text() -> None:
    assert set(get_args(Look)) <= set(dir(environment().get_template("parts.html").module))
    text: list[Part] = [
        HOSTILE,
        [HOSTILE],
        {HOSTILE: HOSTILE},
        ("quiet", HOSTILE),
        ("answer", HOSTILE),
        ("pre", HOSTILE),
    ]
    text += [("command", HOSTILE), ("advice", HOSTILE), ("warnings", [HOSTILE]), ("verdict", "met", HOSTILE, HOSTILE)]
    titled: list[Part] = [(look, HOSTILE, text) for look in ("under", "details", "opened", "figure")]
    page = Page(rendered(HOSTILE, text, [("one", HOSTILE, [*text, *titled])]))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert page.texts.count(HOSTILE) > 60


def test_commands_in_a_sentence_are_set_as_code_and_escaped() -> None:
    page = Page(part("coded", "run `stillroom <b> profile` again"))
    assert page.texts == ["run", "stillroom <b> profile", "again"]
    assert [tag for tag, _ in page.tags] == ["code"]
