"""`stillroom benchmark` on small files of every suite: what it scores and shows, that it resumes, and what it refuses."""

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_task import write_rows
from suite_files import glue, squad, tagged, xnli

from compress.data.labelled_files import read_examples
from compress.tasks import TOKEN_CLASSIFICATION
from serve.errors import BadInput
from stillroom import benchmark
from stillroom.report.benchmark_page import beside
from stillroom.verbs.benchmark import show_benchmark, training
from stillroom.verbs.benchmark.suites import GLUE, MLQA_LANGUAGES, XNLI_LANGUAGES, tasks_of, tunings
from stillroom.verbs.benchmark.training import scored

QUICK: dict[str, Any] = {"threads": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glue(tmp_path_factory.mktemp("glue") / "GLUE")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scores") / "scores"


@pytest.fixture(scope="module")
def found(shallow_teacher: Path, files: Path, out: Path) -> dict[str, Any]:
    return benchmark(str(shallow_teacher), "glue", files, out, **QUICK)


def test_every_task_of_glue_has_its_metrics(found: dict[str, Any], out: Path) -> None:
    assert {(row["task"], row["metric"]) for row in found["rows"]} == {
        ("CoLA", "matthews"), ("SST-2", "accuracy"), ("MRPC", "accuracy"), ("MRPC", "f1"), ("STS-B", "pearson"), ("STS-B", "spearman"),
        ("QQP", "accuracy"), ("QQP", "f1"), ("MNLI-m", "accuracy"), ("MNLI-mm", "accuracy"), ("QNLI", "accuracy"), ("RTE", "accuracy"),
        ("WNLI", "accuracy"),
    }  # fmt: skip
    assert all(-1 <= row["mean"] <= 1 and len(row["seeds"]) == 1 for row in found["rows"])
    kept = json.loads((out / "benchmark.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps({key: value for key, value in found.items() if key != "report"}))
    assert found["not_run"] == []
    assert "QQP/train.tsv: 1 row without a text or a label was left out (lines 7)" in found["warnings"]


def test_the_papers_stand_beside_it_with_a_mark_where_their_metric_is_another(found: dict[str, Any]) -> None:
    scores = {"SST-2": 90.0, "MNLI": 80.0, "QQP": 85.0}
    row = published("glue", (), 0.0) | {"scores": scores, "metrics": {"QQP": "f1"}}
    made = beside(found | {"published": [row]})
    assert made.header[0] == "model"
    theirs = dict(zip(made.header, made.rows[1], strict=True))
    assert "mean" not in made.header
    assert (theirs["SST-2"], theirs["MNLI-m"], theirs["QQP"], theirs["CoLA"]) == ("90.0", "80.0", "85.0*", None)


def test_the_page_and_the_terminal_show_both(
    found: dict[str, Any], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (out / "benchmark.html").read_text(encoding="utf-8")
    assert "BERT-base, teacher (12x768)" in page
    assert "MiniLM (2020), table 2" in page
    assert "No score of the papers for a 2x32 on this suite is known here." in page
    show_benchmark(found)
    assert "MNLI-mm" in capsys.readouterr().out


def test_a_benchmark_that_was_stopped_goes_on(
    found: dict[str, Any], shallow_teacher: Path, files: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(out.with_name("scores.work") / "RTE-5e-05-10-seed-0")
    trained: list[str] = []
    real = training.fine_tune

    def counted(settings: Any, *given: Any) -> Path:
        trained.append(settings.task)
        return real(settings, *given)

    monkeypatch.setattr(training, "fine_tune", counted)
    again = benchmark(str(shallow_teacher), "glue", files, out, **QUICK)
    assert trained == ["text-classification"]
    assert again["rows"] == found["rows"]


def test_rows_of_glue_are_read_as_they_are_written(files: Path) -> None:
    read = {task.name: task.rows(files, task.train).rows for task in GLUE}
    assert read["SST-2"][3]["text"].startswith('" ')
    assert {row["label"] for row in read["CoLA"]} == {"0", "1"}
    assert read["MRPC"][0].keys() == {"text", "text_pair", "label"}
    assert not any("\r" in str(value) for row in read["MRPC"] for value in row.values())
    assert all(isinstance(row["label"], float) for row in read["STS-B"])
    assert {row["label"] for row in read["MNLI"]} == {"entailment", "neutral", "contradiction"}


def published(suite: str, names: Sequence[str], score: float) -> dict[str, Any]:
    scores = dict.fromkeys(names, score)
    return {"suite": suite, "shape": "2x32", "model": "theirs", "source": "a paper", "scores": scores}


def test_xnli_is_trained_on_english_and_scored_in_every_language(shallow_teacher: Path, tmp_path: Path) -> None:
    data = xnli(tmp_path / "xnli", XNLI_LANGUAGES)
    document = benchmark(str(shallow_teacher), "xnli", data, tmp_path / "scores", **QUICK)
    assert [row["task"] for row in document["rows"]] == list(XNLI_LANGUAGES)
    assert document["not_run"] == []
    theirs = published("xnli", XNLI_LANGUAGES, 50.0)
    assert beside(document | {"published": [theirs]}).rows[1][-1] == "50.0"
    (task,) = tasks_of("xnli", data)
    assert {row["label"] for row in task.rows(data, task.train).rows} == {"entailment", "neutral", "contradiction"}
    assert len(task.rows(data, task.scored["fr"], "fr").rows) == 6


@pytest.mark.parametrize("suite", ["squad1", "squad2", "mlqa"])
def test_suites_of_questions_are_read_as_they_are_published(suite: str, shallow_teacher: Path, tmp_path: Path) -> None:
    data, version = tmp_path / suite, "2.0" if suite == "squad2" else "1.1"
    squad(data / f"train-v{version}.json", 30, 0, unanswerable=suite == "squad2")
    names = [{"squad1": "SQuAD 1.1", "squad2": "SQuAD 2.0"}.get(suite, "")]
    if suite == "mlqa":
        names = list(MLQA_LANGUAGES)
        squad(data / "MLQA_V1/dev/dev-context-en-question-en.json", 8, 1)
        for language in names:
            squad(data / f"MLQA_V1/test/test-context-{language}-question-{language}.json", 8, 2)
    else:
        squad(data / f"dev-v{version}.json", 12, 1, unanswerable=suite == "squad2")
    document = benchmark(str(shallow_teacher), suite, data, tmp_path / "scores", **QUICK)
    assert [(row["task"], row["metric"]) for row in document["rows"]] == [
        (name, metric) for name in names for metric in ("answer_f1", "exact_match")
    ]
    assert all(0 <= row["mean"] <= 1 for row in document["rows"])
    assert {row["learning_rate"] for row in document["rows"]} == {6e-5}
    theirs = published(suite, names, 70.0)
    assert beside(document | {"published": [theirs]}).rows[1][1] == "70.0"
    page = (tmp_path / "scores" / "benchmark.html").read_text(encoding="utf-8")
    assert "exact match" in page
    if suite == "squad2":
        assert "MiniLM (2020), long version, table 2" in page


def test_files_that_are_not_squad_are_refused(shallow_teacher: Path, tmp_path: Path) -> None:
    squad(tmp_path / "train-v1.1.json", 6, 0)
    elsewhere = '{"question": "q", "answers": [{"text": "c", "answer_start": 2}]}'
    for content, message in (
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1}]}]}]}', "is not SQuAD's JSON"),
        ('{"data": []}', "has no questions under data"),
        ("question\tanswer\n", "has no questions under data"),
        (f'{{"data": [{{"paragraphs": [{{"context": "a b", "qas": [{elsewhere}]}}]}}]}}', "'c' at 2, and the context has 'b'"),
    ):  # fmt: skip
        (tmp_path / "dev-v1.1.json").write_text(content, encoding="utf-8")
        with pytest.raises(BadInput, match=rf"(?s)dev-v1\.1\.json.*{message}"):
            benchmark(str(shallow_teacher), "squad1", tmp_path, tmp_path / "scores", **QUICK)


@pytest.mark.parametrize("suite", ["conll2003", "wikiann", "crossner"])
def test_suites_of_entities_are_read_as_they_are_published(suite: str, shallow_teacher: Path, tmp_path: Path) -> None:
    data = tmp_path / suite
    if suite == "conll2003":
        for seed, name in enumerate(("eng.train", "eng.testa", "eng.testb")):
            tagged(data / name, 30, seed, columns=4)
    elif suite == "wikiann":
        for language in ("de", "zh-min-nan"):
            for seed, name in enumerate(("train", "dev", "test")):
                tagged(data / language / name, 30, seed, prefix=f"{language}:")
    else:
        for seed, name in enumerate(("train.txt", "dev.txt", "test.txt")):
            tagged(data / "ai" / name, 30, seed)
    only = ("ai",) if suite == "crossner" else ()
    document = benchmark(str(shallow_teacher), suite, data, tmp_path / "scores", tasks=only, **QUICK)
    names = {"conll2003": ["CoNLL-2003"], "wikiann": ["de", "zh-min-nan"], "crossner": ["ai"]}
    assert [row["task"] for row in document["rows"]] == names[suite]
    assert {row["metric"] for row in document["rows"]} == {"entity_f1"}
    assert document["not_run"] == (["politics", "science", "music", "literature"] if suite == "crossner" else [])
    (task, *_) = tasks_of(suite, data) if suite != "crossner" else [t for t in tasks_of(suite, data) if t.name == "ai"]
    first = task.rows(data, task.train).rows[0]
    assert "tel:1" in first["tokens"]
    assert not any(word.startswith(("de:", "zh-min-nan:")) for word in first["tokens"])
    read = read_examples(write_rows(tmp_path / "first.jsonl", [first]), TOKEN_CLASSIFICATION)[0].entities or ()
    assert [each.label for each in read] == ["LOC", "LOC"], "two cities side by side are two places"


def test_grids_are_those_of_the_papers() -> None:
    cola, sst, *_ = GLUE
    assert len(tunings(sst, "minilm")) == 12
    assert {each.epochs for each in tunings(cola, "minilm")} == {3, 5, 10}
    assert [(each.learning_rate, each.epochs, each.batch) for each in tunings(cola, "compared")] == [(2e-5, 6, 32)]
    (xnli_task,) = tasks_of("xnli", Path())
    assert {(each.batch, each.epochs) for each in tunings(xnli_task, "minilm")} == {(128, 5)}


@pytest.mark.parametrize(
    ("suite", "given", "message"),
    [
        ("squad2", {}, r"lacks train-v2\.0\.json, dev-v2\.0\.json"),
        ("glue", {"tasks": ("SST",)}, r"--only SST: --suite glue has CoLA, SST-2"),
        ("crossner", {}, "lacks politics/train.txt, politics/dev.txt"),
        ("wikiann", {}, "has no folder of a language"),
    ],
)
def test_a_suite_that_cannot_be_run_is_refused(
    suite: str, given: dict[str, Any], message: str, shallow_teacher: Path, files: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        benchmark(str(shallow_teacher), suite, files, tmp_path / "scores", **QUICK, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("SST-2/train.tsv", "text\tlabel\na b\t1\n", "lacks the columns sentence; its first line has text, label"),
        ("SST-2/train.tsv", "sentence\tlabel\n", "has no rows"),
        ("SST-2/train.tsv", "sentence\tlabel\n" + "a b\n" * 5 + "c d\t1\n" * 5, r"5 of 10 rows .*\(lines 2, 3, 4"),
        ("STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\thigh\n", "line 2: 'high' is no number"),
    ],
)
def test_files_that_are_not_as_published_are_refused_with_their_place(
    file: str, content: str, message: str, shallow_teacher: Path, files: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(files, tmp_path / "GLUE")
    (data / file).write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        benchmark(str(shallow_teacher), "glue", data, tmp_path / "scores", tasks=(file.partition("/")[0],), **QUICK)


def test_tags_of_no_scheme_are_refused_before_any_training(shallow_teacher: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("eng.train", "eng.testa", "eng.testb")):
        tagged(tmp_path / "conll" / name, 6, seed, columns=4)
    with (tmp_path / "conll" / "eng.testb").open("a", encoding="utf-8") as file:
        file.write("Oslo NNP B-NP LOC\n\n")
    with pytest.raises(BadInput, match=r"(?s)eng\.testb is not as it was published.*LOC"):
        benchmark(str(shallow_teacher), "conll2003", tmp_path / "conll", tmp_path / "scores", **QUICK)


# The metrics of the suites against their formulas, and on the cases that are hard.


def matthews(gold: list[str], said: list[str]) -> float:
    """Matthews' correlation of two classes by its formula."""
    seen = Counter(zip(gold, said, strict=True))
    tp, tn, fp, fn = seen["1", "1"], seen["0", "0"], seen["0", "1"], seen["1", "0"]
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / below if below else 0.0


def f1(gold: list[str], said: list[str]) -> float:
    """F1 of class 1 by its formula."""
    seen = Counter(zip(gold, said, strict=True))
    below = 2 * seen["1", "1"] + seen["0", "1"] + seen["1", "0"]
    return 2 * seen["1", "1"] / below if below else 0.0


def pearson(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    both = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return both / math.sqrt(math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y))


def ranks(values: list[float]) -> list[float]:
    """The mean rank of equal values."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_is_its_formula(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        gold, said = ([chance.choice("01") for _ in range(chance.randint(2, 12))] for _ in range(2))
        said = (said * 6)[: len(gold)]
        assert scored("accuracy", gold, said) == pytest.approx(
            sum(a == b for a, b in zip(gold, said, strict=True)) / len(gold)
        )
        assert scored("f1", gold, said) == pytest.approx(f1(gold, said))
        assert scored("matthews", gold, said) == pytest.approx(matthews(gold, said))
        x = [round(chance.random(), 1) for _ in range(chance.randint(5, 12))]
        y = [round(a + chance.random(), 1) for a in x]
        if len(set(x)) > 1 and len(set(y)) > 1:
            assert scored("pearson", x, y) == pytest.approx(pearson(x, y))
            assert scored("spearman", x, y) == pytest.approx(pearson(ranks(x), ranks(y)))


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
@pytest.mark.parametrize(("gold", "said"), [([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), ([2.0, 2.0], [1.0, 3.0])])
def test_constant_numbers_have_no_correlation(metric: str, gold: list[float], said: list[float]) -> None:
    assert scored(metric, gold, said) == 0


def test_one_class_alone_is_worth_nothing_by_matthews_and_f1() -> None:
    assert scored("matthews", ["0", "1", "1"], ["1", "1", "1"]) == 0
    assert scored("f1", ["1", "1"], ["0", "0"]) == 0
    assert scored("f1", ["0", "0"], ["0", "0"]) == 0


def test_entities_are_scored_as_whole_spans() -> None:
    gold = [frozenset({(0, 4, "LOC"), (5, 9, "PER")}), frozenset[tuple[int, int, str]]()]
    said = [frozenset({(0, 4, "LOC"), (5, 8, "PER")}), frozenset({(0, 1, "LOC")})]
    assert scored("entity_f1", gold, said) == pytest.approx(2 * 1 / (3 + 2))  # type: ignore[arg-type]


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(ValueError, match="bleu"):
        scored("bleu", ["1"], ["1"])
