"""What the page of a transfer says is supported, and what is not."""

from typing import Any

from test_page_width import transferred

from stillroom.report.transfer_page import points, sentences
from stillroom.report.transfer_page import transferred as rows_of


def document() -> dict[str, Any]:
    found = transferred()
    apart = {"worse": (-0.03, -0.01), "alike": (-0.02, 0.01), "better": (0.01, 0.03)}
    chosen, *others, alone = found["table"]
    for row, (name, (low, high)) in zip(others, apart.items(), strict=True):
        row |= {
            "source": name,
            "minus_chosen": {"value": (low + high) / 2, "low": low, "high": high, "seeds": [low, high]},
        }
    return found | {"table": [chosen, *others, alone], "chosen": chosen["source"]}


def test_a_lead_is_claimed_only_where_the_interval_leaves_out_0() -> None:
    said = " ".join(sentences(document()))
    assert "is ahead of worse, and behind better, and not shown to differ from alike." in said
    ten = "With 10 labels of each target that lead is -0.0123 [-0.0212, +0.0034] on average over targets"
    assert f"{ten} (not supported; above 0 in 1 of 2 seeds)." in said


def test_it_is_said_when_the_student_without_a_source_is_as_good() -> None:
    found = document()
    *_, alone = found["table"]
    assert any(sentence.startswith("With all labels no source is worth") for sentence in sentences(found)), (
        "here both are equal"
    )
    alone["mean"] = {"validation": {"value": 0.5}, "test": alone["mean"]["test"]}
    assert not any("no source is worth" in sentence for sentence in sentences(found))


def test_a_lone_source_is_compared_with_none_alone() -> None:
    found = document()
    found["table"] = [row for row in found["table"] if row["source"] in (found["chosen"], None)]
    said = sentences(found)
    assert not any("On test" in sentence for sentence in said)
    assert [row[0] for row in rows_of(found).rows] == [found["chosen"], "no source"]
    assert [row[1] for row in points(found).rows][:5] == ["10", "50", "100", "500", "13,084"]
