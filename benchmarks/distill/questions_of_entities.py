"""Makes a data set of questions from labelled entities: for each text what two of its labels are, and one question without an answer.

    python benchmarks/distill/questions_of_entities.py SNIPS OUT

SNIPS is a folder with train.jsonl, validation.jsonl and test.jsonl, whose rows have `text` and `entities`. A question is "what is the
playlist owner?", its context the text, its answers all entities of that label; the third question is about a label that the text lacks.
`stillroom run --task question-answering --data OUT` reads the result.
"""

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

MOST_TEXTS = {"train": 2500, "validation": 400, "test": 700}
ANSWERED = 2  # questions of a text, at most


def questions_of(row: dict[str, Any], labels: list[str], chance: random.Random) -> list[dict[str, Any]]:
    """The questions about one text."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entity in row["entities"]:
        found[entity["label"]].append(entity)
    asked = chance.sample(sorted(found), min(ANSWERED, len(found)))
    asked.append(chance.choice([label for label in labels if label not in found]))
    return [
        {
            "question": f"what is the {label.replace('_', ' ')}?",
            "context": row["text"],
            "answers": [
                {"text": row["text"][each["start"] : each["end"]], "answer_start": each["start"]}
                for each in found.get(label, [])
            ],
        }
        for label in asked
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    rows = {
        name: [json.loads(line) for line in (given.source / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in MOST_TEXTS
    }
    labels = sorted({entity["label"] for row in rows["train"] for entity in row["entities"]})
    chance = random.Random(0)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, most in MOST_TEXTS.items():
        chosen = chance.sample(rows[name], min(most, len(rows[name])))
        questions = [question for row in chosen for question in questions_of(row, labels, chance)]
        lines = "".join(json.dumps(question) + "\n" for question in questions)
        (given.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(
            f"{name}: {len(questions):,} questions, {sum(not each['answers'] for each in questions):,} without an answer"
        )


if __name__ == "__main__":
    main()
