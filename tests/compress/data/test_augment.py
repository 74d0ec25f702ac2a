"""Generated text: what is swapped, what is masked, and what stays."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from compress.data import augment
from compress.data.augment import augmented
from compress.data.examples import Entity, Example
from serve.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder, 8)


@pytest.fixture(scope="module")
def without_mask() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


EXAMPLES = [
    Example("send the kettle to São Paulo 🚚 now", entities=(Entity(9, 15, "item"), Entity(19, 28, "city"))),
    Example("Ghent\tand １２ lamps!", entities=(Entity(0, 5, "city"), Entity(13, 18, "item"))),
    Example("nothing here", entities=()),
]
CITIES, ITEMS = {"São Paulo", "Ghent"}, {"kettle", "lamps"}


def test_an_entity_gives_way_only_to_one_of_its_label(without_mask: Tokenizer) -> None:
    made = augmented(EXAMPLES, without_mask, 60, seed=0)
    first = re.compile("send the (.*) to (.*) 🚚 now")
    second = re.compile("(.*)\tand １２ (.*)!")
    said = {found.groups() for e in made if (found := first.fullmatch(e.text))}
    assert said == {(item, city) for item in ITEMS for city in CITIES} - {("kettle", "São Paulo")}
    said = {found.groups() for e in made if (found := second.fullmatch(e.text))}
    assert said == {(city, item) for item in ITEMS for city in CITIES} - {("Ghent", "lamps")}
    assert len(made) == 6  # no repeats, and nothing that train says already


def test_about_a_tenth_of_the_other_words_is_masked_whole(tokenizer: Tokenizer) -> None:
    text = " ".join(f"word{n}" for n in range(40))  # longer than the tokenizer would keep, in many pieces a word
    made = augmented([Example(text, label="x")], tokenizer, 200, seed=0)
    words = [word for example in made for word in example.text.split(" ")]
    masked = [word for word in words if word == "[MASK]"]
    assert all(word == "[MASK]" or re.fullmatch(r"word\d+", word) for word in words)
    assert 0.08 < len(masked) / len(words) < 0.12


def test_entities_are_never_masked(tokenizer: Tokenizer) -> None:
    made = augmented(EXAMPLES, tokenizer, 60, seed=0)
    assert any("[MASK]" in example.text for example in made)
    for example in made:
        if example.text.endswith("!"):
            assert any(example.text.startswith(city) for city in CITIES)


def test_nothing_made_carries_a_label(tokenizer: Tokenizer) -> None:
    made = augmented([*EXAMPLES, Example("a plain text to vary", label="x")], tokenizer, 20, seed=0)
    assert made
    assert all(example.label is None and example.entities is None for example in made)


def test_both_texts_of_a_pair_are_varied(tokenizer: Tokenizer) -> None:
    pair = Example(" ".join(["red"] * 20), text_pair=" ".join(["blue"] * 20), label="x")
    made = augmented([pair], tokenizer, 30, seed=0)
    assert any("[MASK]" in example.text for example in made)
    assert all(example.text_pair and set(example.text_pair.split()) <= {"blue", "[MASK]"} for example in made)
    assert any("[MASK]" in (example.text_pair or "") for example in made)


def test_the_seed_decides_what_is_made(tokenizer: Tokenizer) -> None:
    made = augmented(EXAMPLES, tokenizer, 5, seed=5)
    assert made == augmented(EXAMPLES, tokenizer, 5, seed=5)
    assert made != augmented(EXAMPLES, tokenizer, 5, seed=6)


def test_every_text_is_varied_before_the_limit(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setattr(augment, "MOST_TEXTS", 40)
    examples = [Example(f"{label} {'and then ' * 20}", label=label) for label in "abcd" for _ in range(50)]
    made = augmented(examples, tokenizer, 60, seed=0)
    assert len(made) == 40
    assert {example.text[0] for example in made} >= set("abcd")


def test_no_copies_make_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert augmented(EXAMPLES, tokenizer, 0, seed=0) == []


def test_head_and_tail_stay_as_they_are_and_are_found_where_they_went(tokenizer: Tokenizer) -> None:
    text = "the lamp that was lost on the way to Oslo is in a box"
    given = Example(text, label="x", head=(37, 41), tail=(4, 8))
    made = augmented([given], tokenizer, 40, seed=0)
    assert any("[MASK]" in example.text for example in made)
    for example in made:
        assert example.label is None
        assert example.head is not None
        assert example.tail is not None
        assert example.text[slice(*example.head)] == "Oslo"
        assert example.text[slice(*example.tail)] == "lamp"
