"""A language in which the student is behind is told, even where all languages together pass the gate."""

from compress.data.examples import Example
from compress.evaluation.metrics import ACCURACY
from stillroom.verbs.run.scores import behind_in_languages


def test_a_language_that_falls_behind_its_gate_is_warned_of_and_chance_is_not() -> None:
    languages = ["de"] * 40 + ["fr"] * 400 + ["it"] * 3
    examples = [Example(f"text {i}", label="a", language=language) for i, language in enumerate(languages)]
    gold = [("a", "b")[i % 2] for i in range(len(examples))]
    teacher = list(gold)
    # In de every fourth answer is wrong, in it one of three, in fr none.
    wrong = {*range(0, 40, 4), 440}
    int8 = [("b" if label == "a" else "a") if i in wrong else label for i, label in enumerate(gold)]
    said = {"teacher": teacher, "fp32": int8, "int8": int8}
    found = behind_in_languages(ACCURACY, examples, gold, said, {"teacher": 0.97, "fp32": 0.99})
    assert found == [
        "In de int8 keeps 0.7500 of teacher's score on 40 texts of test; over all languages together 0.97 is asked."
    ]
    assert behind_in_languages(ACCURACY, examples, gold, said | {"int8": gold}, {"teacher": 0.97, "fp32": 0.99}) == []
    without = [Example(example.text, label="a") for example in examples]
    assert behind_in_languages(ACCURACY, without, gold, said, {"teacher": 0.97}) == []
