"""The page at `/` in a real browser, before a real server."""

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from chromium import Tab, browsing
from server_process import HTTP

ENTER, TABULATOR = 13, 9
# The colour of everything that shows text of its own, and the nearest background under it; contrast as WCAG 2.2 defines it.
LEAST_CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const found = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) || each.value;
    if (!own || !each.checkVisibility() || ["SCRIPT", "OPTION"].includes(each.tagName)) continue;
    let under = each;
    while (under.parentElement && pixel(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
    const [a, b] = [getComputedStyle(each).color, getComputedStyle(under).backgroundColor].map(pixel).map(luminance);
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), each.outerHTML.slice(0, 80)]);
  }
  return found.sort((a, b) => a[0] - b[0])[0].concat(found.length);
})()
"""


MODELS = 9  # of the server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, url: str) -> Tab:
    """The page, just opened and ready."""
    browser.problems.clear()
    browser.open(url)
    browser.wait_for(f"byId('model').length === {MODELS}")
    return browser


def choose(tab: Tab, model: str) -> None:
    tab.evaluate(
        f"byId('model').value = {json.dumps(model)}; byId('model').dispatchEvent(new Event('change', {{bubbles: true}}))"
    )


def paste_and_run(tab: Tab, text: str, until: str = "") -> None:
    """As a person does it: into the field that has the focus, then Ctrl and Enter. Waits for something in the answer."""
    tab.evaluate("byId('text').focus(); byId('text').select()")
    tab.type(text)
    tab.press("Enter", code=ENTER, control=True)
    if until:
        tab.wait_for(f"document.querySelector('#answer {until}')")


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.evaluate(f"document.querySelector('{selector}').textContent"))


def marks(tab: Tab) -> list[str]:
    return list(tab.evaluate("[...document.querySelectorAll('#answer mark')].map((mark) => mark.textContent)"))


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        ("Fly 👩🏽‍🚀 to 😀😀 Rome 🇮🇹", ["Rome"]),
        ("a\u0301 to mu\u0308nchen, to ROME", ["ROME"]),
        ("from \u202btel\u202c to Oslo\nfrom Paris", ["Oslo", "Paris"]),
    ],
)
def test_an_entity_is_highlighted_exactly_behind_emoji_and_marks(tab: Tab, text: str, entities: list[str]) -> None:
    paste_and_run(tab, text, "mark")
    assert marks(tab) == entities
    assert tab.evaluate("document.activeElement.id") == "text"
    # Without its labels the answer is the text, to the last character.
    bare = "(() => { const copy = document.querySelector('#answer .text').cloneNode(true);"
    bare += "copy.querySelectorAll('.tag').forEach((tag) => tag.remove()); return copy.textContent; })()"
    assert tab.evaluate(bare) == text
    assert "city" in text_of(tab, "#answer .tag")
    assert text_of(tab, "#status").startswith("1 entity" if len(entities) == 1 else "2 entities")
    assert tab.problems == []


@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("to ירושלים to", "ירושלים"),
        ("to القاهرة please", "القاهرة"),
        ("😀 to 東 to", "東"),
        ("to 𠮷 to", "𠮷"),
        ("to cafe\u0301 to", "cafe\u0301"),
    ],
)
def test_an_entity_is_highlighted_exactly_in_any_script(tab: Tab, text: str, entity: str) -> None:
    choose(tab, "strangers")
    paste_and_run(tab, text, "mark")
    assert entity in marks(tab)
    rows = tab.evaluate("[...document.querySelectorAll('#answer tbody tr')].map((row) => row.cells[0].textContent)")
    assert rows == marks(tab)


def test_classes_are_shown_with_their_scores_and_the_stages_of_the_time(tab: Tab, url: str) -> None:
    choose(tab, "intents")
    paste_and_run(tab, "refund please", ".bars")
    shown = tab.evaluate("[...document.querySelectorAll('.bars li')].map((bar) => bar.innerText.split('\\n'))")
    asked = {"text": "refund please", "model": "intents"}
    (result,) = HTTP.post(f"{url}/v1/classify", json=asked).json()["results"]
    assert shown == [[each["label"], f"{100 * each['score']:.1f} %"] for each in result["labels"]]
    stages = tab.evaluate("[...document.querySelectorAll('#legend dt')].map((name) => name.textContent)")
    assert stages == ["queue", "tokenise", "run", "decode", "other"]
    assert tab.problems == []


def test_the_shell_line_asks_exactly_what_the_page_asked(tab: Tab) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    text = 'it\'s "quoted" $HOME `a` \\n 😀\nRome'
    tab.evaluate("byId('option-min_score').value = '0.5'")
    paste_and_run(tab, text, "mark")
    line = text_of(tab, "#curl")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    (result,) = json.loads(done.stdout)["results"]
    assert [entity["text"] for entity in result["entities"]] == marks(tab) == ["Rome"]
    assert '"min_score":0.5' in line
    assert tab.evaluate("JSON.parse(JSON.stringify(question(chosen()))).text") == text


def test_options_are_those_of_the_servers_own_schema_and_are_sent_only_when_changed(tab: Tab, url: str) -> None:
    schemas = HTTP.get(f"{url}/openapi.json").json()["components"]["schemas"]
    for model, schema in (("cities", "EntitiesRequest"), ("intents", "ClassifyRequest")):
        choose(tab, model)
        offered = tab.evaluate("[...document.querySelectorAll('#options [name]')].map((control) => control.name)")
        placed = {"text", "text_pair", "model", "offsets"}
        assert set(offered) == set(schemas[schema]["properties"]) - placed
        assert offered
        assert not set(tab.evaluate("Object.keys(question(chosen()))")) - placed
    tab.evaluate("byId('option-top_k').value = '2'")
    paste_and_run(tab, "i love it")
    tab.wait_for("document.querySelectorAll('#answer .bars li').length === 2")


def test_an_error_is_shown_in_the_servers_words(tab: Tab) -> None:
    choose(tab, "intents")
    tab.evaluate("byId('option-top_k').value = '-1'")
    paste_and_run(tab, "refund", "[role=alert]")
    shown = tab.evaluate("byId('answer').innerText")
    assert "give a whole number from 1" in shown
    assert "422 invalid_input" in shown
    assert "top_k" in shown
    # The browser reports the refusal itself; the page has no fault of its own.
    assert [problem for problem in tab.problems if "422" not in problem] == []


def test_a_server_that_is_gone_is_an_error_with_what_to_do(tab: Tab) -> None:
    tab.send("Network.enable")
    gone = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    tab.send("Network.emulateNetworkConditions", offline=True, **gone)
    try:
        paste_and_run(tab, "Rome")
        tab.wait_for("document.querySelector('#answer [role=alert]')")
        assert "The server does not answer" in tab.evaluate("byId('answer').innerText")
    finally:
        tab.send("Network.emulateNetworkConditions", offline=False, **gone)
        tab.send("Network.disable")


def test_nothing_found_and_text_cut_off_are_said(tab: Tab) -> None:
    paste_and_run(tab, "please love it")
    tab.wait_for("byId('status').textContent.startsWith('No entities')")
    assert "No entities in this text." in tab.evaluate("byId('answer').innerText")
    answer = {"labels": [], "truncated": True}
    shown = f"answerOf(chosen(), {{text: ''}}, {json.dumps(answer)}).slice(1).map((each) => each.textContent).join()"
    assert "No label applies" in tab.evaluate(shown)
    assert "Truncated" in tab.evaluate(shown)


def test_a_key_is_sent_as_a_bearer_and_never_shown_or_kept(tab: Tab) -> None:
    tab.evaluate("byId('more').open = true; byId('key').focus()")
    tab.type("a-very-secret-key")
    tab.evaluate(
        "window.sent = []; const real = fetch;"
        "window.fetch = (path, options) => { sent.push(options.headers); return real(path, options); }; 0"
    )
    paste_and_run(tab, "Rome", "mark")
    assert tab.evaluate("sent[0].Authorization") == "Bearer a-very-secret-key"
    assert "$API_KEY" in text_of(tab, "#curl")
    assert "a-very-secret-key" not in tab.evaluate("document.body.innerText + location.href")
    assert tab.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_the_keyboard_reaches_everything_in_the_order_it_is_read(tab: Tab) -> None:
    tab.evaluate("byId('more').open = true; byId('model').focus()")
    reached = ["model"]
    for _ in range(7):
        tab.press("Tab", code=TABULATOR)
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    places = [reached.index(each) for each in ("model", "text", "go", "SUMMARY", "option-min_score")]
    assert places == sorted(places)
    unnamed = (
        "[...document.querySelectorAll('input, select, textarea')]"
        ".filter((each) => !each.labels.length && !each.ariaLabel).map((each) => each.id)"
    )
    assert tab.evaluate(unnamed) == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_its_background(browser: Tab, url: str, dark: bool) -> None:
    browser.open(url, dark=dark)
    browser.wait_for(f"byId('model').length === {MODELS}")
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.evaluate("byId('more').open = true")
    paste_and_run(browser, "to rome", "mark")
    # Every colour that a label can have, an error and a notice, beside what stands there.
    browser.evaluate(
        "byId('answer').append(marked('a'.repeat(24), [...Array(24).keys()].map((i) =>"
        "({start: i, end: i + 1, label: 'label', score: 1, hue: 15 * i}))),"
        "element('p', 'error', 'error'), element('p', 'notice', 'notice'))"
    )
    contrast, where, texts = browser.evaluate(LEAST_CONTRAST)
    assert contrast >= 4.5, where
    assert texts > 60
    assert (background == "rgb(20, 23, 27)") == dark


@pytest.mark.parametrize("width", [360, 1280])
def test_no_width_needs_scrolling_sideways(browser: Tab, url: str, width: int) -> None:
    browser.open(url, width=width)
    browser.wait_for(f"byId('model').length === {MODELS}")
    browser.evaluate("byId('more').open = true; byId('parts').hidden = false")
    paste_and_run(browser, "to rome " + "Donaudampfschifffahrtsgesellschaftskapitän" * 3, "mark")
    assert browser.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_of_endpoints_is_no_wider_than_its_window(browser: Tab, url: str, width: int) -> None:
    browser.open(f"{url}/docs", width=width)
    browser.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(
        "[...document.querySelectorAll('pre')].every((each) => each.scrollWidth <= each.clientWidth)"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_endpoints_can_be_read_in_light_and_in_dark(browser: Tab, url: str, dark: bool) -> None:
    browser.open(f"{url}/docs", dark=dark)
    contrast, where, texts = browser.evaluate(LEAST_CONTRAST)
    assert contrast >= 4.5, where
    assert texts > 60


def test_two_parts_of_a_text_are_taken_from_its_selection_and_asked_about(tab: Tab) -> None:
    choose(tab, "relations")
    text = "😀 Rome is in Italy"
    tab.evaluate("byId('text').focus()")
    tab.type(text)
    for part, words in (("head", "Rome"), ("tail", "Italy")):
        tab.evaluate(
            f"byId('text').setSelectionRange(...((at) => [at, at + {len(words)}])(byId('text').value.indexOf('{words}')));"
            f"byId('{part}-take').click()"
        )
    asked = tab.evaluate("question(chosen())")
    assert (asked["head"], asked["tail"]) == ({"start": 3, "end": 7}, {"start": 14, "end": 19})
    tab.evaluate("byId('go').click()")
    tab.wait_for("document.querySelector('#answer .bars')")
    assert marks(tab) == ["Rome", "Italy"]
    assert tab.problems == []


def test_a_model_of_numbers_shows_its_number_and_takes_a_second_text(tab: Tab) -> None:
    choose(tab, "stars")
    assert text_of(tab, "#answer") == "This model gives a text a number."
    assert not tab.evaluate("byId('pair-field').hidden")
    paste_and_run(tab, "i love it", ".score")
    assert text_of(tab, "#answer .score") == "2.4"
    assert text_of(tab, "#status").startswith("Score 2.4 · ")
    assert "/v1/score" in text_of(tab, "#curl")
    assert tab.problems == []


def test_a_model_of_answers_marks_the_answer_in_its_context_or_says_that_there_is_none(tab: Tab) -> None:
    choose(tab, "places")
    assert text_of(tab, "#answer") == "This model answers questions about a context."
    assert tab.evaluate("[byId('text-name').textContent, byId('pair-name').textContent]") == ["Question", "Context"]
    tab.evaluate("byId('pair').value = '😀 fly to new york'")
    paste_and_run(tab, "where", "mark")
    assert marks(tab) == ["new york"]
    assert text_of(tab, "#status").startswith("new york, 99.6 % · ")
    assert '"question":"where","context":"😀 fly to new york"' in text_of(tab, "#curl")
    tab.evaluate("byId('pair').value = 'please love it'")
    paste_and_run(tab, "where")
    tab.wait_for("byId('status').textContent.startsWith('No answer, 7.6 % · ')")
    assert "The model finds no answer in this context." in text_of(tab, "#answer")
    choose(tab, "cities")
    assert tab.evaluate("[byId('text-name').textContent, byId('pair-field').hidden]") == ["Text", True]
    assert tab.problems == []


def test_a_model_of_vectors_shows_its_numbers_and_how_similar_two_texts_are(tab: Tab) -> None:
    choose(tab, "vectors")
    assert text_of(tab, "#answer") == "This model gives a text a vector, and two texts their similarity."
    paste_and_run(tab, "i love it", ".vector")
    assert tab.evaluate("document.querySelectorAll('#answer .vector i').length") == 4
    assert "4 numbers, length 1.000, 5 tokens" in text_of(tab, "#answer")
    tab.evaluate("byId('pair').value = 'fly rome'")
    tab.evaluate("byId('pair').dispatchEvent(new Event('input', { bubbles: true }))")
    assert '"input":["i love it","fly rome"]' in text_of(tab, "#curl")
    assert "/v1/embeddings" in text_of(tab, "#curl")
    paste_and_run(tab, "i love it", ".score")
    # (0.6, 0.8, 0, 0) and (0, 1, 0, 4) of length 1.
    assert text_of(tab, "#answer .score") == "0.1940"
    assert tab.evaluate("document.querySelectorAll('#answer .vector').length") == 2
    assert tab.problems == []


def test_a_promise_is_sent_where_it_is_chosen(tab: Tab) -> None:
    choose(tab, "strangers")
    choices = "[...document.querySelector('#options [name=promise]').options].map((each) => each.text)"
    assert tab.evaluate(choices) == ["none", "precision=0.99", "recall=0.9"]
    assert "promise" not in text_of(tab, "#curl")
    paste_and_run(tab, "to rome", "mark")
    tab.evaluate("document.querySelector('#options [name=promise]').value = 'precision=0.99'")
    tab.evaluate(
        "document.querySelector('#options [name=promise]').dispatchEvent(new Event('input', { bubbles: true }))"
    )
    assert '"promise":"precision=0.99"' in text_of(tab, "#curl")
    paste_and_run(tab, "to rome")
    tab.wait_for("byId('status').textContent.startsWith('No entities')")  # a score of 0.93 is below the promise's 0.95
    assert tab.problems == []
