import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_checkpoints import MAX_LENGTH, TAGS, Exported, needs_openvino

from compress.data.encoded import Encoded, encode
from compress.data.examples import Entity, Example
from compress.evaluation.predictions import predictions
from export.graph.fusions import JOINED
from export.packing.builder import Variants, VariantSettings, faults_of, make_variants, refuse_nothing_to_keep
from export.precision.int8_search import Evaluator, session_logits
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
    unlabelled = encode([Example(text) for text in texts], tokenizer, "token-classification", TAGS)
    said = predictions(unlabelled, session_logits(Session(bert.onnx_file, threads=1), unlabelled))
    examples = [
        Example(text, entities=tuple(Entity(*found) for found in sorted(spans)))  # type: ignore[misc]
        for text, spans in zip(texts, said, strict=True)
    ]
    return examples, encode(examples, tokenizer, "token-classification", TAGS)


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
        examples,
        encoded,
        MAX_LENGTH,
        threads=1,
    )


def test_every_precision_is_made_and_nothing_forbids_to_ship_it(made: Variants) -> None:
    assert made.faults == []
    assert made.missed == []
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


@needs_openvino
def test_what_openvino_says_is_near_what_onnxruntime_says(made: Variants) -> None:
    for precision in ("fp32", "fp16", "int8"):
        ours, theirs = made.validation[precision], made.validation[f"{precision} openvino"]
        assert theirs.share == pytest.approx(ours.share, abs=0.05)
    assert made.parity["int8 openvino"].company_differences == 0


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
    document = made.as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["runtimes"] == dict.fromkeys(("fp32", "fp16", "int8"), "onnxruntime")
    assert document["parity"].keys() == made.parity.keys()


def test_every_precision_has_the_temperature_of_its_own_logits(
    made: Variants, validation: tuple[list[Example], Encoded]
) -> None:
    encoded = validation[1]
    for precision in ("fp32", "int8"):
        said = session_logits(Session(made.file(precision), threads=1), encoded)
        assert made.confidence[precision] == choose_confidence(encoded, said)
        assert made.confidence[precision].fitted
    assert made.confidence["int8"].temperature != made.confidence["fp32"].temperature
    assert not [note for note in made.notes if "temperature" in note]
    assert list(made.confidence) == list(made.as_dict()["confidence"]) == ["fp32", "fp16", "int8"]
    assert made.as_dict()["confidence"]["int8"]["temperature"] == made.confidence["int8"].temperature


def with_a_worse_int8(made: Variants, wanted: VariantSettings) -> Variants:
    """The same graphs, had int8 kept less on validation."""
    shares = {"int8": 0.75, "int8 openvino": 0.5, "fp16": 0.99}
    judged = {name: replace(verdict, share=shares.get(name, 1.0)) for name, verdict in made.validation.items()}
    return replace(made, validation=judged, wanted=wanted)


def test_a_gate_is_missed_by_what_would_be_served_alone(made: Variants) -> None:
    assert with_a_worse_int8(made, VariantSettings(gate=0.9)).missed == [
        "int8 keeps 0.7500 of fp32's metric on validation, needed 0.9"
    ]
    assert with_a_worse_int8(made, VariantSettings(gate=0.75)).missed == []
    assert len(with_a_worse_int8(made, VariantSettings(gate=1.0)).missed) == 2


@needs_openvino
def test_the_runtime_that_is_pinned_is_the_one_that_is_gated(made: Variants) -> None:
    pinned = with_a_worse_int8(made, VariantSettings(gate=0.9, runtime="openvino"))
    assert pinned.missed == ["int8 openvino keeps 0.5000 of fp32's metric on validation, needed 0.9"]
    assert pinned.as_dict()["runtimes"] == {"fp32": "onnxruntime", "fp16": "onnxruntime", "int8": "openvino"}


def test_a_graph_that_answers_otherwise_may_not_ship(made: Variants) -> None:
    found = {name: replace(made.parity[name], passed=False) for name in ("fp32", "fp16", "int8")}
    found["fp16"] = replace(found["fp16"], beyond_tolerance=3)
    found["int8"] = replace(found["int8"], company_differences=7)
    assert [faults_of(name, parity, made.wanted) for name, parity in found.items()] == [
        ["the fp32 graph does not answer as torch does"],
        ["the fp16 graph moves 3 answers by more than its tolerance"],
        ["7 texts are answered otherwise in company than alone by int8"],
    ]
    assert faults_of("fp32", made.parity["fp32"], made.wanted) == []
    # Dynamic int8 depends on company by nature, and its card says so.
    assert faults_of("int8", found["int8"], VariantSettings(int8="dynamic")) == []


def test_a_float16_graph_that_does_not_run_is_a_fault_and_the_rest_is_made(
    bert: Exported, validation: tuple[list[Example], Encoded], tmp_path: Path
) -> None:
    # A word that training texts have and validation lacks: float32 answers, and float16 is tried on training texts.
    broken = Path(shutil.copytree(bert.checkpoint, tmp_path / "broken"))
    tokenizer = load_tokenizer(broken, MAX_LENGTH)
    weights = load_file(broken / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][tokenizer.token_to_id("cancel")] = np.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    known = [i for i, example in enumerate(validation[0]) if "cancel" not in example.text]
    found = make_variants(
        tmp_path,
        broken,
        VariantSettings(("fp32", "fp16"), gate=0.8),
        tokenizer.encode_batch(["cancel my order", "book a table"]),
        [validation[0][i] for i in known],
        encode([validation[0][i] for i in known], tokenizer, "token-classification", TAGS),
        MAX_LENGTH,
        threads=1,
    )
    (fault,) = found.faults
    assert re.fullmatch(r"the fp16 graph does not run: .*not finite numbers; leave fp16 out of --precision", fault)
    assert found.made == ("fp32",)
    assert {precision for _, precision, _ in found.runs} == {"fp32"}
    assert not found.file("fp16").exists()


def test_where_float32_finds_nothing_no_share_of_it_is_asked_for(
    bert: Exported, validation: tuple[list[Example], Encoded], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    # Inside a word, where no model finds anything.
    examples = [Example(example.text, entities=(Entity(0, 1, "city"),)) for example in validation[0]]
    encoded = encode(examples, tokenizer, "token-classification", TAGS)
    given = (
        bert.checkpoint,
        VariantSettings(("fp32", "fp16"), gate=0.9),
        encoded.encodings,
        examples,
        encoded,
        MAX_LENGTH,
    )
    with pytest.raises(
        BadInput, match=r"scores 0 on validation in fp32: of 40 texts .* fp16 could keep 0\.9\. .*--gate 0"
    ):
        make_variants(tmp_path, *given, threads=1)
    assert not (tmp_path / ONNX_NAMES["fp16"]).exists()
    evaluator = Evaluator(examples, encoded, bert.onnx_file, MAX_LENGTH, threads=1)
    for wanted in (VariantSettings(("fp32",), gate=0.9), VariantSettings(("fp32", "int8"), gate=0)):
        refuse_nothing_to_keep(evaluator, wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precisions": ("fp32", "int4")}, "--precision int4 is unknown; the precisions are fp32, fp16, int8"),
        ({"precisions": ()}, "--precision names nothing"),
        ({"int8": "sparse"}, "--int8 sparse is unknown; the schemes are static, weight-only, dynamic"),
        ({"runtime": "tensorrt"}, "--runtime tensorrt is unknown; the runtimes are onnxruntime, openvino"),
        ({"gate": 2.0}, "--gate is 2; a share between 0 and 1 is needed"),
        ({"gate": -0.1}, "--gate is -0.1"),
        ({"gate": float("nan")}, "--gate is nan"),
    ],
)
def test_what_cannot_be_made_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        VariantSettings(**settings)  # type: ignore[arg-type]


@needs_openvino
def test_weight_only_files_are_not_for_openvino() -> None:
    with pytest.raises(BadInput, match="--int8 weight-only is read by onnxruntime alone"):
        VariantSettings(int8="weight-only", runtime="openvino")
    assert VariantSettings(runtime="openvino").runs_in("int8") == "openvino"
    assert VariantSettings(runtime="openvino").runs_in("fp32") == "onnxruntime"
