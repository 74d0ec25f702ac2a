"""From rows of texts and targets to a model that generates, its scores and its answers."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
from command_line import here
from small_task import CITIES, ITEMS, make_teacher, write_rows, write_splits

import stillroom
from compress.models.generator import Generator
from compress.runs.lineage import read_lineage
from serve.errors import BadInput

GENERATION = "text2text-generation"
SETTINGS = {
    "epochs": 20, "learning_rate": 3e-3, "target_tokens": 8, "max_length": 24, "patience": 0, "threads": 1, "device": "cpu"
}  # fmt: skip


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """What is asked about an item and a city, to be put into words that are not in the text."""
    chance = random.Random(seed)
    made: list[dict[str, object]] = []
    for _ in range(count):
        item, city, kind = chance.choice(ITEMS), chance.choice(CITIES), chance.choice(("late", "refund"))
        target = f"the {item} for {city} is late" if kind == "late" else f"please refund the {item}"
        made.append({"text": f"{kind} {item} {city}", "target": target})
    return made


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers without dropout, which learn these few words in seconds."""
    return make_teacher(
        tmp_path_factory.mktemp("encoder") / "model", num_hidden_layers=2, hidden_size=64, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("pairs") / "data", rows)


@pytest.fixture(scope="module")
def generator(encoder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "generator"
    return stillroom.finetune(str(encoder), GENERATION, str(data), out, **SETTINGS)


def test_a_trained_model_writes_what_it_learned_alike_in_any_company(generator: Path):
    model = Generator(generator)
    assert model(["late lamp Oslo", "refund radio Ghent"]) == ["the lamp for oslo is late", "please refund the radio"]
    asked = [str(row["text"]) for row in rows(12, 7)]
    assert [model([text])[0] for text in asked] == model(asked)


def test_evaluate_gives_rouge_and_bleu_with_intervals(generator: Path, data: Path):
    found = stillroom.evaluate(str(generator), data)
    assert found["metric"] == "rouge_l"
    assert found["examples"] == 60
    assert found["low"] <= found["value"] <= found["high"]
    assert found["value"] > 0.9  # a sentence that is the same for every row has about 0.5
    assert set(found["scores"]) == {"rouge_1", "rouge_2", "bleu"}
    assert all(each["low"] <= each["value"] <= each["high"] for each in found["scores"].values())


def test_a_student_learns_the_distributions_of_its_teacher(generator: Path, encoder: Path, data: Path, tmp_path: Path):
    student = stillroom.finetune(
        str(generator), GENERATION, str(data), tmp_path / "student", teacher=str(generator),
        student="layers=1,hidden=64,heads=4,ffn=128", **SETTINGS | {"epochs": 3},
    )  # fmt: skip
    lineage = read_lineage(student)
    assert lineage["method"] == "soft labels"
    assert Generator(student).model.config.num_hidden_layers == 1
    assert stillroom.evaluate(str(student), data)["value"] > 0.9
    assert lineage["loss"][-1][1] < lineage["loss"][0][1]


def test_the_command_line_trains_the_same_weights_and_scores_them_and_parts_of_a_batch_teach_what_the_whole_does(
    encoder: Path, data: Path, tmp_path: Path
):
    # In fp32 the parts of a batch add up to the whole as closely as this asks.
    settings = SETTINGS | {"epochs": 1, "precision": "fp32"}
    whole, parts = (
        stillroom.finetune(str(encoder), GENERATION, str(data), tmp_path / f"in {count}", accumulate=count, **settings)
        for count in (1, 3)
    )
    losses = [[loss for _, loss in read_lineage(made)["loss"]] for made in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    places = ["--model", encoder, "--task", GENERATION, "--data", data, "--out", tmp_path / "made", "--json"]
    trained = here("finetune", *places, *flags)
    assert json.loads(trained.stdout)["metric"] == "rouge_l", trained.stderr
    assert (tmp_path / "made" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    scored = here("evaluate", tmp_path / "made", "--data", data, "--beams", "2")
    assert "bleu 0." in scored.stdout, scored.stderr


def test_a_generator_trained_for_another_task_does_not_generate_any_more(
    generator: Path, data: Path, tmp_path: Path, task_data: Path
):
    tagger = stillroom.finetune(
        str(generator), "text-classification", str(task_data), tmp_path / "tagger", epochs=0.2, threads=1, device="cpu"
    )
    assert stillroom.evaluate(str(tagger), task_data)["metric"] == "accuracy"
    with pytest.raises(BadInput, match="was not trained to generate"):
        Generator(tagger)


def test_all_faults_are_in_one_message(encoder: Path, tmp_path: Path):
    bad = tmp_path / "bad"
    bad.mkdir()
    write_rows(bad / "train.jsonl", [{"text": "a", "target": "b"}, {"text": "a"}, {"text": "a", "target": " "}])
    write_rows(bad / "test.jsonl", [{"text": "a", "summary": "b"}])
    with pytest.raises(BadInput) as fault:
        stillroom.finetune(
            str(encoder), GENERATION, str(bad), tmp_path / "out", target_tokens=60, new_head=True, soft_weight=0.5,
            student="3x",
        )  # fmt: skip
    for part in (
        "train.jsonl, line 2: has no `target`", "train.jsonl, line 3: `target` is empty", "give --target-column NAME",
        "--target-tokens is 60, and the model takes 64 tokens", "--new-head cannot be given", "--soft-weight needs a --teacher",
        "--student '3x' is not known",
    ):  # fmt: skip
        assert part in str(fault.value)
    assert not (tmp_path / "out").exists()


def test_targets_that_are_cut_and_rows_held_out_are_told(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = write_splits(tmp_path / "data", rows, (20, 1, 5))
    (made / "validation.jsonl").unlink()
    few = SETTINGS | {"epochs": 1, "target_tokens": 4, "student": "layers=1,hidden=32,heads=4,ffn=64"}
    stillroom.finetune(str(encoder), GENERATION, str(made), tmp_path / "out", **few)
    told = capsys.readouterr().err
    assert all(part in told for part in ("2 texts of train", "18 of 18 targets of train", "at random"))


def test_models_and_settings_of_other_tasks_are_refused(encoder: Path, generator: Path, data: Path, tmp_path: Path):
    train = partial(stillroom.finetune, str(encoder), data=str(data), out=tmp_path / "out")
    for use, named in (
        (lambda: Generator(encoder), "was not trained to generate text"),
        (lambda: train(task=GENERATION, teacher=str(encoder)), "--teacher .* was not trained to generate text"),
        (lambda: train(task="text-classification", target_tokens=9, student="3x384"), "--student and --target-tokens"),
        (lambda: stillroom.evaluate(str(encoder), data, beams=2), "--beams has no effect"),
        (lambda: stillroom.evaluate(str(generator), data, teacher="other", label_column="other"), "--teacher and --label-column"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=named):
            use()
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_reads_less_shortens_what_is_read(encoder: Path, generator: Path, data: Path, tmp_path: Path):
    longer = make_teacher(tmp_path / "longer", num_hidden_layers=1, max_position_embeddings=128)
    settings = {name: value for name, value in SETTINGS.items() if name != "max_length"} | {"epochs": 1}
    made = stillroom.finetune(str(longer), GENERATION, str(data), tmp_path / "made", teacher=str(generator), **settings)
    assert Generator(made).tokens == 64


def test_texts_and_settings_that_cannot_be_generated_from_are_refused(generator: Path):
    write = Generator(generator)
    with pytest.raises(BadInput, match=r"text\[1\] is empty; beams is 0.*; .*most_tokens is 9"):
        write(["a", " "], beams=0, most_tokens=9)
    for given, fault in (([], "empty list"), ([3], r"text\[0\] is an int"), ("\ud800", "half a surrogate pair")):
        with pytest.raises(BadInput, match=fault):
            write(given)  # type: ignore[arg-type]  # the caller's fault is the point
    with pytest.raises(BadInput, match="device is 'gpu'"):
        Generator(generator, device="gpu")


def test_a_text_that_is_no_list_is_answered_and_a_long_one_is_cut_as_in_training(generator: Path):
    write = Generator(generator)
    assert write("late lamp Oslo") == ["the lamp for oslo is late"]
    assert write("late lamp Oslo" + " and the parcel" * 50) == write("late lamp Oslo" + " and the parcel" * 6)
