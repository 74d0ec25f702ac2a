import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_checkpoints import MAX_LENGTH, TAGS, Exported, needs_openvino

from compress.data.encoded import Encoded
from compress.data.examples import Entity, Example
from compress.tasks import TOKEN_CLASSIFICATION
from export.graph.exporter import JOINED
from export.packing import variants
from export.packing.variants import Split, Variants, faults_of, few_texts, make_variants, nothing_to_keep, read_variants
from export.precision import int8_search
from export.precision.int8_search import Evaluator, session_logits
from export.settings import VariantSettings
from export.validation.temperature import choose_confidence
from serve.bundle.manifest import ONNX_NAMES
from serve.bundle.runtimes import has_openvino
from serve.errors import BadInput
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def validation(bert: Exported, texts: list[str]) -> tuple[list[Example], Encoded]:
    """Texts with the entities that float32 itself finds."""
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    unlabelled = TOKEN_CLASSIFICATION.encode([Example(text) for text in texts], tokenizer, TAGS)
    said = unlabelled.task.predictions(unlabelled, session_logits(Session(bert.onnx_file, threads=1), unlabelled))
    examples = [
        Example(text, entities=tuple(Entity(*found) for found in sorted(spans)))  # type: ignore[misc]
        for text, spans in zip(texts, said, strict=True)
    ]
    return examples, TOKEN_CLASSIFICATION.encode(examples, tokenizer, TAGS)


@pytest.fixture(scope="module")
def made(
    bert: Exported, validation: tuple[list[Example], Encoded], tmp_path_factory: pytest.TempPathFactory
) -> Variants:
    examples, encoded = validation
    return make_variants(
        tmp_path_factory.mktemp("variants"),
        bert.checkpoint,
        VariantSettings(("fp32", "fp16", "int8"), fuse=True, gate=0.8),
        encoded.encodings,
        Split(examples, encoded),
        MAX_LENGTH,
        threads=1,
    )


def test_every_precision_is_made_and_nothing_forbids_to_ship_it(made: Variants) -> None:
    assert made.faults == []
    assert [gate["passed"] for gate in made.gates] == [True, True]
    assert made.made == ("fp32", "fp16", "int8")
    assert made.schemes == {"fp32": "fp32", "fp16": "fp16", "int8": "static"}
    files = [path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(ONNX_NAMES.values())


def test_every_precision_is_compared_and_judged_in_every_runtime(made: Variants) -> None:
    runtimes = ["", " openvino"] if has_openvino() else [""]
    names = [f"{precision}{runtime}" for precision in ("fp32", "fp16", "int8") for runtime in runtimes]
    assert list(made.parity) == list(made.validation) == [name for name, _, _ in made.runs] == names
    assert all(parity.passed for parity in made.parity.values())
    for name, precision, runtime in made.runs:
        assert (made.parity[name].precision, made.parity[name].runtime) == (precision, runtime)
        assert made.validation[name].share >= 0.8
    assert made.validation["fp32"].value == made.validation["fp32"].share == 1.0
    assert made.validation["fp32"].divergence < made.validation["fp16"].divergence < made.validation["int8"].divergence


def test_kernels_are_joined_in_the_float_graphs_alone(made: Variants) -> None:
    for counts in (made.fusions["fp32"], made.fusions["fp16"]):
        assert [counts[name] for name in JOINED] == [2, 4, 2]
        assert counts["integer products"] == 0
    assert made.fusions["int8"]["integer products"] == 12
    assert [made.fusions["int8"][name] for name in JOINED] == [0, 0, 0]


def test_the_search_and_what_processors_must_have_are_told(made: Variants) -> None:
    assert made.search is not None
    assert made.int8 is not None
    assert made.search.held
    assert made.search.reached == made.validation["int8"]
    assert made.int8.weight_bits == made.search.weight_bits == 7
    assert made.needs == {}
    eight = replace(made, int8=replace(made.int8, weight_bits=8, cpu=("avx512_vnni", "arm64")))
    assert eight.needs == {"int8": ("avx512_vnni", "arm64")}


def test_the_file_beside_the_graphs_is_read_as_it_was_written(made: Variants) -> None:
    made.write()
    try:
        assert read_variants(made.folder) == made
    finally:
        (made.folder / "export.json").unlink()


def test_every_precision_has_the_temperature_of_its_own_logits(
    made: Variants, validation: tuple[list[Example], Encoded]
) -> None:
    texts, encoded = validation
    for precision in ("fp32", "int8"):
        said = session_logits(Session(made.file(precision), threads=1), encoded)
        assert made.confidence[precision] == choose_confidence(encoded, said, examples=texts)
        assert made.confidence[precision].fitted
    assert made.confidence["int8"].temperature != made.confidence["fp32"].temperature
    assert not [note for note in made.notes if "temperature" in note]
    assert list(made.confidence) == ["fp32", "fp16", "int8"]


def test_a_file_that_is_sorted_by_label_is_drawn_from_as_a_whole(
    bert: Exported, validation: tuple[list[Example], Encoded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples, encoded = validation
    drawn: dict[str, set[int]] = {}

    def watch(module: object, name: str, places: Callable[..., set[int]]) -> None:
        real = getattr(module, name)

        def watched(*given: object, **more: object) -> object:
            drawn[name] = places(*given)
            return real(*given, **more)

        monkeypatch.setattr(module, name, watched)

    for constant in ("PARITY_TEXTS", "CALIBRATION_TEXTS"):
        monkeypatch.setattr(variants, constant, 12)
    monkeypatch.setattr(int8_search, "SWEEP_TEXTS", 12)
    at = {text: i for i, text in enumerate(encoded.texts)}
    watch(variants, "graph_parity", lambda checkpoint, file, texts, *_: {at[text] for text in texts})
    ids = [encoding.ids for encoding in encoded.encodings]
    watch(variants, "with_long_texts", lambda calibration, _: {ids.index(each.ids) for each in calibration})
    watch(int8_search, "session_logits", lambda session, part: {at[text] for text in part.texts})
    wanted = VariantSettings(("fp32",), atol=0.25)
    found = make_variants(
        tmp_path, bert.checkpoint, wanted, encoded.encodings, Split(*validation), MAX_LENGTH, threads=1
    )
    assert {parity.absolute_tolerance for parity in found.parity.values()} == {0.25}
    Evaluator(examples, encoded, bert.onnx_file, MAX_LENGTH, threads=1).cost(bert.onnx_file)
    assert drawn.keys() == {"graph_parity", "with_long_texts", "session_logits"}
    for name, places in drawn.items():
        assert len(places) == 12, name
        for quarter in range(4):
            assert places & set(range(10 * quarter, 10 * quarter + 10)), name


def test_the_card_is_told_of_a_tolerance_that_is_not_the_usual_one(made: Variants) -> None:
    wider = replace(made, wanted=replace(made.wanted, atol=0.25))
    told = [line for line in wider.limits if line not in made.limits]
    assert len(told) == 1
    assert "0.25" in told[0]


def with_a_worse_int8(made: Variants, wanted: VariantSettings) -> Variants:
    """The same graphs, had int8 kept less on validation."""
    shares = {"int8": 0.75, "int8 openvino": 0.5, "fp16": 0.99}
    judged = {name: replace(verdict, share=shares.get(name, 1.0)) for name, verdict in made.validation.items()}
    return replace(made, validation=judged, wanted=wanted)


def missed(made: Variants) -> list[tuple[str, float]]:
    return [(gate["name"], gate["value"]) for gate in made.gates if not gate["passed"]]


def test_a_gate_is_missed_by_what_would_be_served_alone(made: Variants) -> None:
    assert missed(with_a_worse_int8(made, VariantSettings(gate=0.9))) == [("int8 over fp32, validation", 0.75)]
    assert missed(with_a_worse_int8(made, VariantSettings(gate=0.75))) == []
    assert len(missed(with_a_worse_int8(made, VariantSettings(gate=1.0)))) == 2


@needs_openvino
def test_the_runtime_that_is_pinned_is_the_one_that_is_gated(made: Variants) -> None:
    pinned = with_a_worse_int8(made, VariantSettings(gate=0.9, runtime="openvino"))
    assert missed(pinned) == [("int8 openvino over fp32, validation", 0.5)]
    assert [pinned.wanted.runs_in(variant) for variant in pinned.made] == ["onnxruntime", "onnxruntime", "openvino"]


def test_a_graph_that_answers_otherwise_may_not_ship(made: Variants) -> None:
    found = {name: replace(made.parity[name], passed=False) for name in ("fp32", "fp16", "int8")}
    found["fp16"] = replace(found["fp16"], beyond_tolerance=3)
    found["int8"] = replace(found["int8"], company_differences=7)
    for name, told in (("fp32", "--atol"), ("fp16", "3 answers"), ("int8", "7 texts")):
        (fault,) = faults_of(name, found[name], made.wanted)
        assert told in fault
    assert faults_of("fp32", made.parity["fp32"], made.wanted) == []
    # Dynamic int8 depends on company by nature, and its card says so.
    assert faults_of("int8", found["int8"], VariantSettings(int8="dynamic")) == []


@pytest.mark.slow
def test_a_float16_graph_that_does_not_run_is_a_fault_and_the_rest_is_made(
    bert: Exported, validation: tuple[list[Example], Encoded], tmp_path: Path
) -> None:
    # A word that training texts have and validation lacks: float32 answers, and float16 is tried on training texts.
    broken = Path(shutil.copytree(bert.checkpoint, tmp_path / "broken"))
    tokenizer = load_tokenizer(broken, MAX_LENGTH)
    weights = load_file(broken / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][tokenizer.token_to_id("cancel")] = np.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    examples = [example for example in validation[0] if "cancel" not in example.text]
    split = Split(examples, TOKEN_CLASSIFICATION.encode(examples, tokenizer, TAGS))
    trained_on = tokenizer.encode_batch(["cancel my order", "book a table"])
    wanted = VariantSettings(("fp32", "fp16"), gate=0.8)
    found = make_variants(tmp_path, broken, wanted, trained_on, split, MAX_LENGTH, threads=1)
    (fault,) = found.faults
    assert "fp16" in fault
    assert "not finite" in fault
    assert found.made == ("fp32",)
    assert {precision for _, precision, _ in found.runs} == {"fp32"}
    assert not found.file("fp16").exists()


def test_where_float32_finds_nothing_no_share_of_it_is_asked_for(
    bert: Exported, validation: tuple[list[Example], Encoded], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    # Inside a word, where no model finds anything.
    examples = [Example(example.text, entities=(Entity(0, 1, "city"),)) for example in validation[0]]
    encoded = TOKEN_CLASSIFICATION.encode(examples, tokenizer, TAGS)
    rest = (encoded.encodings, Split(examples, encoded), MAX_LENGTH)
    with pytest.raises(BadInput, match=r"scores 0 on validation .* of 40 texts.*fp16 .*--gate 0"):
        make_variants(tmp_path, bert.checkpoint, VariantSettings(("fp32", "fp16"), gate=0.9), *rest, threads=1)
    assert not (tmp_path / ONNX_NAMES["fp16"]).exists()
    evaluator = Evaluator(examples, encoded, bert.onnx_file, MAX_LENGTH, threads=1)
    for wanted in (VariantSettings(("fp32",), gate=0.9), VariantSettings(("fp32", "int8"), gate=0)):
        (warning,) = nothing_to_keep(evaluator, wanted)
    said: list[str] = []
    alone = VariantSettings(("fp32",), gate=0.9)
    found = make_variants(tmp_path / "alone", bert.checkpoint, alone, *rest, threads=1, progress=said.append)
    assert warning in found.notes
    assert f"warning: {warning}" in said
    assert found.gates == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"atol": -1.0}, "--atol is -1"),
        ({"atol": float("nan")}, "--atol is nan"),
        ({"int8": "sparse"}, "--int8 .*static, weight-only, dynamic"),
        ({"runtime": "tensorrt"}, "--runtime .*onnxruntime, openvino"),
        ({"gate": 2.0}, "--gate is 2"),
        ({"gate": -0.1}, "--gate is -0.1"),
        ({"gate": float("nan")}, "--gate is nan"),
        ({"int8": "weight-only", "runtime": "openvino"}, "only onnxruntime reads|OpenVINO"),
    ],
)
def test_variants_that_cannot_be_made_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        VariantSettings(**settings)  # type: ignore[arg-type]


def test_int8_of_few_texts_is_told() -> None:
    (said,) = few_texts(1, 400, VariantSettings(variants=("fp32", "int8")))
    assert said.startswith("int8 rests on few texts: 1 text to calibrate it, and 400 to compare it with fp32.")
    assert few_texts(400, 2, VariantSettings(variants=("int8",)))
    assert (
        few_texts(400, 400, VariantSettings(variants=("int8",)))
        == few_texts(1, 1, VariantSettings(variants=("fp32",)))
        == []
    )
