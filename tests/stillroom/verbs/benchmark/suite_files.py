"""Small files of each suite, laid out and written as the published ones are, with their oddities."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from small_task import CITIES, ITEMS, questions

WORDS = ("the", "kettle", "lamp", "is", "great", "late", "refund", "parcel", "please", "where")


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(3, 7)))


def lines(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = (), end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [*([header] if header else []), *rows]
    path.write_bytes("".join("\t".join(map(str, row)) + end for row in written).encode())


def glue(folder: Path, rows: int = 24) -> Path:
    """GLUE's nine tasks; the label of each row depends on its words."""
    for split, seed in (("train", 0), ("dev", 1)):
        chance = random.Random(seed)
        pairs = [(sentence(chance), sentence(chance)) for _ in range(rows)]
        yes = [0, 1, *(int("great" in one.split()) for one, _ in pairs[2:])]
        each = [(i, label, *pair) for i, (label, pair) in enumerate(zip(yes, pairs, strict=True))]
        lines(
            folder / "CoLA" / f"{split}.tsv", [("gj04", label, "" if label else "*", one) for _, label, one, _ in each]
        )
        # An opening quote that nothing closes is text.
        sst = [(f'" {one}' if i == 3 else one, label) for i, label, one, _ in each]
        lines(folder / "SST-2" / f"{split}.tsv", sst, ("sentence", "label"))
        header = ("\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String")
        mrpc = [(label, i, i + 1, one, two) for i, label, one, two in each]
        lines(folder / "MRPC" / f"{split}.tsv", mrpc, header, end="\r\n")
        of_sts = [
            "index",
            "genre",
            "filename",
            "year",
            "old_index",
            "source1",
            "source2",
            "sentence1",
            "sentence2",
            "score",
        ]
        sts = [
            (i, "genre", "file", "2012", i, "a", "b", one, two, round(5 * chance.random(), 3))
            for i, _, one, two in each
        ]
        lines(folder / "STS-B" / f"{split}.tsv", sts, of_sts)
        qqp: list[Sequence[object]] = [(i, i, i, one, two, label) for i, label, one, two in each]
        qqp.insert(5, (99, 1, 2, "a row that lacks its label"))
        lines(folder / "QQP" / f"{split}.tsv", qqp, ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"))
        three = ("entailment", "neutral", "contradiction")
        mnli = [(i, "p", "q", "fiction", *"((((", one, two, three[i % 3], three[i % 3]) for i, _, one, two in each]
        parses = [f"sentence{i}_{kind}parse" for kind in ("binary_", "") for i in (1, 2)]
        head = ["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2", "label1", "gold_label"]
        for file in ("train",) if split == "train" else ("dev_matched", "dev_mismatched"):
            lines(folder / "MNLI" / f"{file}.tsv", mnli, head)
        two_way = [(i, one, two, ("entailment", "not_entailment")[label]) for i, label, one, two in each]
        lines(folder / "QNLI" / f"{split}.tsv", two_way, ("index", "question", "sentence", "label"))
        lines(folder / "RTE" / f"{split}.tsv", two_way, ("index", "sentence1", "sentence2", "label"))
        wnli = [(*row[:3], int(row[3] == "entailment")) for row in two_way]
        lines(folder / "WNLI" / f"{split}.tsv", wnli, ("index", "sentence1", "sentence2", "label"))
    return folder


def xnli(folder: Path, languages: Sequence[str]) -> Path:
    """XNLI: English to train on, with its other spelling of a label, and all languages in one file."""
    chance = random.Random(0)
    three = ("neutral", "entailment", "contradictory")
    train = [(sentence(chance), sentence(chance), three[i % 3]) for i in range(24)]
    lines(folder / "XNLI-MT-1.0" / "multinli" / "multinli.train.en.tsv", train, ("premise", "hypo", "label"))
    rows = [
        (language, three[i % 3].replace("contradictory", "contradiction"), sentence(chance), sentence(chance))
        for language in languages
        for i in range(6)
    ]
    for split in ("dev", "test"):
        lines(folder / "XNLI-1.0" / f"xnli.{split}.tsv", rows, ("language", "gold_label", "sentence1", "sentence2"))
    return folder


def tagged(file: Path, rows: int, seed: int, *, prefix: str = "", columns: int = 2) -> None:
    """Words with their tags: cities are places. CoNLL-2003 has B- only where a place follows another; the others on every first word."""
    chance, written = random.Random(seed), []
    for number in range(rows):
        if columns == 4 and number % 5 == 0:
            written.append("-DOCSTART- -X- -X- O\n\n")
        before = "O"
        for word in (chance.choice(ITEMS), "tel:1", chance.choice(CITIES), chance.choice(CITIES), "now"):
            tag = "O" if word not in CITIES else "B-LOC" if columns == 2 or before != "O" else "I-LOC"
            before = tag
            middle = ["NN", "B-NP"] if columns == 4 else []
            written.append((" " if columns == 4 else "\t").join([prefix + word, *middle, tag]) + "\n")
        written.append("\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(written), encoding="utf-8")


def squad(file: Path, count: int, seed: int, *, unanswerable: bool = False) -> None:
    """SQuAD's JSON of questions about messages: of one context several, of one question several answers, places with white space."""
    paragraphs = []
    for row in questions(count, seed):
        answers = [{"text": each["text"], "answer_start": each["answer_start"]} for each in row["answers"]]  # type: ignore[attr-defined]
        if not answers and not unanswerable:
            continue
        asked = {"id": f"{seed}-{len(paragraphs)}", "question": row["question"], "answers": answers * (1 + seed)}
        if unanswerable:
            asked["is_impossible"] = not answers
            if not answers:
                asked["plausible_answers"] = [{"text": "the", "answer_start": 0}]
        paragraphs.append({"context": row["context"], "qas": [asked, {**asked, "id": f"{asked['id']}b"}]})
    half = len(paragraphs) // 2
    articles = [{"title": "a", "paragraphs": paragraphs[:half]}, {"title": "b", "paragraphs": paragraphs[half:]}]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"version": "v2.0" if unanswerable else "1.1", "data": articles}), encoding="utf-8")
