import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import BadInput
from serve.text.viterbi import grammar, likeliest_valid

# Tags, and the sequences that are valid, as a regular expression over one character a tag: the rules said another way.
SCHEMES = {
    "BIO": (("O", "B-a", "I-a", "B-b", "I-b"), "oAaBb", r"(o|Aa*|Bb*)*"),
    "BIOES": (("O", "B-a", "I-a", "E-a", "S-a", "B-b", "E-b"), "oAaeSBf", r"(o|S|Aa*e|Bf)*"),
    "BILOU": (("L-a", "U-a", "O", "I-a", "B-a"), "eSoaA", r"(o|S|Aa*e)*"),
    "IO": (("O", "a", "I-b"), "oab", r"[oab]*"),
    "BIO-and-IO": (("O", "B-a", "I-a", "I-b"), "oAab", r"(o|Aa*|b)*"),
}


def is_valid(scheme: str, path: tuple[int, ...]) -> bool:
    _, letters, pattern = SCHEMES[scheme]
    return re.fullmatch(pattern, "".join(letters[index] for index in path)) is not None


def some_probabilities(words: int, tags: int, seed: int, sparse: bool) -> np.ndarray:
    random = np.random.default_rng(seed)
    made = random.dirichlet(np.full(tags, 0.3), size=words)
    return np.where(random.random(made.shape) < 0.5, 0.0, made) if sparse else made


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=30, deadline=None)
@given(words=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_no_valid_path_is_likelier(scheme: str, words: int, seed: int) -> None:
    tags = SCHEMES[scheme][0]
    probabilities = some_probabilities(words, len(tags), seed, sparse=False)
    paths = [path for path in itertools.product(range(len(tags)), repeat=words) if is_valid(scheme, path)]
    best = max(paths, key=lambda path: float(np.log(probabilities[np.arange(words), path]).sum()))

    found = likeliest_valid(probabilities, tags)

    assert found.tolist() == list(best)


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=60, deadline=None)
@given(words=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), sparse=st.booleans())
def test_no_sequence_is_invalid_however_probable(scheme: str, words: int, seed: int, sparse: bool) -> None:
    tags = SCHEMES[scheme][0]
    found = likeliest_valid(some_probabilities(words, len(tags), seed, sparse), tags)
    assert is_valid(scheme, tuple(found.tolist()))


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=60, deadline=None)
@given(words=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_words_keep_their_likeliest_tags_where_those_are_valid(scheme: str, words: int, seed: int) -> None:
    tags = SCHEMES[scheme][0]
    probabilities = np.random.default_rng(seed).integers(1, 4, size=(words, len(tags))) / 10  # many ties
    each = probabilities.argmax(axis=1)
    assert grammar(tags).allows(each) == is_valid(scheme, tuple(each.tolist()))
    if is_valid(scheme, tuple(each.tolist())):
        assert likeliest_valid(probabilities, tags).tolist() == each.tolist()


def test_after_many_unlikely_words_a_hair_still_decides() -> None:
    # The sum of logarithms so far is too large for its last digits to tell these apart.
    probabilities = np.array([[1e-300, 0.0]] * 50 + [[0.5, np.nextafter(0.5, 1)]])
    assert likeliest_valid(probabilities, ("O", "a")).tolist() == [0] * 50 + [1]


def test_a_beginning_is_found_for_an_inside_that_is_sure_of_itself() -> None:
    probabilities = np.array([[0.6, 0.4, 0.0], [0.01, 0.0, 0.99]])  # O I-city would not be valid
    assert likeliest_valid(probabilities, ("O", "B-city", "I-city")).tolist() == [1, 2]


def test_tags_that_allow_no_sequence_are_refused() -> None:
    with pytest.raises(BadInput, match="no valid sequence for this text") as caught:
        likeliest_valid(np.array([[0.5, 0.5]]), ("B-a", "E-a"))
    assert caught.value.field == "constrained"
