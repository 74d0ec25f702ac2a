"""Which texts a report shows teacher and student to differ on."""

from compress.data.examples import Example
from compress.evaluation.numbers import PEARSON
from stillroom.verbs.run.scores import SHOWN, disagreements, further_rows


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
