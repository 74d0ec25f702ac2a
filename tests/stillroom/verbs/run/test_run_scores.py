"""On which texts teacher and student differ, and in which languages the student is behind."""

from compress.data.examples import Example
from compress.evaluation.metrics import ACCURACY
from compress.evaluation.numbers import PEARSON
from stillroom.verbs.run.scores import SHOWN, behind_in_languages, disagreements, further_rows


def test_numbers_differ_where_they_can_be_told_from_each_other_and_the_furthest_apart_come_first() -> None:
    examples = [Example(f"text {i}", "second" if i == 2 else None, label=float(i)) for i in range(4)]
    teacher = [0.0, 10.0, 20.0, 30.0]
    found = disagreements(examples, [0.0, 1.0, 2.0, 3.0], teacher, [0.5, 15.0, 40.0, 30.0], "test")
    assert found["disagreeing"] == {"count": 2, "texts": 4, "split": "test", "shown": 2}
    assert found["disagreements"] == [
        {"text": "text 2 | second", "teacher": "20", "student": "40", "gold": "2"},
        {"text": "text 1", "teacher": "10", "student": "15", "gold": "1"},
    ]


def test_classes_and_entities_differ_where_they_are_not_the_same_and_so_many_are_shown() -> None:
    examples = [Example("to rome")] * 100
    gold = [frozenset({(3, 7, "city")})] * 100
    found = disagreements(examples, gold, gold, [frozenset()] * 100, "test")
    assert (found["disagreeing"]["count"], len(found["disagreements"])) == (100, SHOWN)
    assert found["disagreements"][0] == {
        "text": "to rome", "teacher": "city: rome", "student": "nothing", "gold": "city: rome",
    }  # fmt: skip
    assert disagreements(examples[:2], ["a", "b"], ["a", "b"], ["a", "a"], "test")["disagreeing"]["count"] == 1


def test_each_model_has_its_other_scores_with_their_intervals() -> None:
    gold = [float(i) for i in range(50)]
    rows = further_rows(PEARSON, gold, {"int8": [-number for number in gold], "teacher": gold})
    assert [row["name"] for row in rows] == ["teacher", "int8"]
    assert (rows[0]["spearman"]["value"], rows[0]["mean_squared_error"]["value"]) == (1, 0)
    assert rows[1]["spearman"]["high"] < -0.99


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
    (warning,) = found
    assert warning.startswith("In de int8 keeps 0.7500 of teacher's score on 40 texts of test")
    assert behind_in_languages(ACCURACY, examples, gold, said | {"int8": gold}, {"teacher": 0.97, "fp32": 0.99}) == []
    without = [Example(example.text, label="a") for example in examples]
    assert behind_in_languages(ACCURACY, without, gold, said, {"teacher": 0.97}) == []
