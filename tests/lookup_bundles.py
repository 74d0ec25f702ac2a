"""Small real bundles: a graph built by hand (an embedding, then a linear head), a WordPiece tokenizer, a true manifest.

The model is a lookup table: a token's logits depend on that token alone, so a test can say what the answer must be.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from serve.bundle.manifest import SCHEMA_VERSION, canonical_json, digest, sha256_file
from serve.tasks import task_named
from serve.text.entity_markers import MARKERS
from serve.text.labels import bio_tags

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CITIES = ["rome", "oslo", "paris", "münchen"]
WORDS = ["fly", "to", "from", "please", "refund", "i", "love", "it", "new", "york", "##s", "##er", "a", "b", "warm"]
VOCABULARY = [*SPECIAL, *CITIES, *WORDS]
TAGS = list(bio_tags(["city"]))
INTENTS = ["book", "praise", "refund"]
RELATIONS = ["none", "from", "to"]


def write_tokenizer(folder: Path, special: Sequence[str] = ()) -> None:
    """A cased WordPiece tokenizer that, like some on the Hub, comes with padding and truncation switched on.

    `special` tokens get the ids behind the vocabulary's.
    """
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_padding(length=128)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_graph(file: Path, table: np.ndarray, *, per_text: bool, layers: int = 0) -> None:
    """logits = table[input_ids] + 0 * mask and types; with `per_text`, the mean over the tokens that are not padding.

    `table` has shape (vocabulary, labels). `layers` products of matrices change no logit and take their time.
    """
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["looked_up"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["types", "type_weight"], ["shift"]),
        helper.make_node("Unsqueeze", ["shift", "last"], ["shift_3d"]),
        helper.make_node("Add", ["looked_up", "shift_3d"], ["shifted" if per_text else "logits"]),
    ]
    if layers:
        nodes[0].output[0] = "looked_up_alone"
        nodes[1:1] = [
            helper.make_node("Gather", ["idle", "input_ids"], ["idle_0"]),
            *(helper.make_node("MatMul", [f"idle_{i}", "weight"], [f"idle_{i + 1}"]) for i in range(layers)),
            helper.make_node("ReduceMean", [f"idle_{layers}", "last"], ["nothing"], keepdims=1),
            helper.make_node("Add", ["looked_up_alone", "nothing"], ["looked_up"]),
        ]
    if per_text:
        nodes += [
            helper.make_node("Unsqueeze", ["mask", "last"], ["mask_3d"]),
            helper.make_node("Mul", ["shifted", "mask_3d"], ["masked"]),
            helper.make_node("ReduceSum", ["masked", "one"], ["total"], keepdims=0),
            helper.make_node("ReduceSum", ["mask_3d", "one"], ["count"], keepdims=0),
            helper.make_node("Div", ["total", "count"], ["logits"]),
        ]
    shape = ["batch", "labels"] if per_text else ["batch", "sequence", "labels"]
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    graph = helper.make_graph(
        nodes,
        "lookup",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(table.astype(np.float32), "table"),
            numpy_helper.from_array(np.array([0.25], dtype=np.float32), "type_weight"),
            numpy_helper.from_array(np.array([-1], dtype=np.int64), "last"),
            *([numpy_helper.from_array(np.array([1], dtype=np.int64), "one")] if per_text else []),
            *(_idle_weights() if layers else []),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, file)


def _idle_weights() -> list[onnx.TensorProto]:
    """What the layers that change nothing multiply: zeros, 256 wide."""
    return [
        numpy_helper.from_array(np.zeros((rows, 256), dtype=np.float32), name)
        for name, rows in (("idle", len(VOCABULARY)), ("weight", 256))
    ]


def write_bundle(folder: Path, table: np.ndarray, *, layers: int = 0, **changes: object) -> Path:
    """A whole bundle with one graph of `table`; `changes` are its manifest's, whose task says what logits are of."""
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    per_text = not task_named(str(changes.get("task", "token-classification"))).per_token
    write_graph(folder / "onnx" / "model.onnx", table, per_text=per_text, layers=layers)
    write_manifest(folder, **changes)
    return folder


def write_manifest(folder: Path, **changes: object) -> None:
    """The manifest of what lies in `folder` now; `changes` replace keys, and None leaves a key out."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json")
    manifest: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "name": folder.name,
        "task": "token-classification",
        "labels": TAGS,
        "max_length": 32,
        "default_variant": "fp32",
        "variants": {"fp32": {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime"}},
        "files": {
            file.relative_to(folder).as_posix(): {"sha256": sha256_file(file), "bytes": file.stat().st_size}
            for file in files
        },
        "inputs": ["input_ids", "attention_mask", "token_type_ids"],
        "lineage": {},
        "metrics": {},
        "parity": {"fp32": {"company_differences": 0}},
        "cpu": [],
        **changes,
    }
    manifest = {key: value for key, value in manifest.items() if value is not None}
    manifest["digest"] = digest(manifest)
    (folder / "manifest.json").write_bytes(canonical_json(manifest))


def city_table() -> np.ndarray:
    """(vocabulary, tags): cities are `B-city`, `york` is `I-city` (so `new york` needs `new` to be `B-city`)."""
    table = np.zeros((len(VOCABULARY), len(TAGS)))
    table[:, TAGS.index("O")] = 3.0
    for token in [*CITIES, "new"]:
        table[VOCABULARY.index(token)] = [0.0, 4.0, 1.0]
    table[VOCABULARY.index("york")] = [0.0, 1.0, 4.0]
    return table


def intent_table() -> np.ndarray:
    """(vocabulary, intents): `fly` books, `love` praises, `refund` refunds."""
    table = np.zeros((len(VOCABULARY), len(INTENTS)))
    for intent, token in enumerate(["fly", "love", "refund"]):
        table[VOCABULARY.index(token), intent] = 9.0
    return table


def relation_table() -> np.ndarray:
    """(vocabulary and markers, relations): `from` and `to` say which it is, and the markers that there is one."""
    table = np.zeros((len(VOCABULARY) + len(MARKERS), len(RELATIONS)))
    table[: len(VOCABULARY), RELATIONS.index("none")] = 1.0
    table[len(VOCABULARY) :, RELATIONS.index("none")] = -2.0
    for relation in ("from", "to"):
        table[VOCABULARY.index(relation), RELATIONS.index(relation)] = 9.0
    return table


def write_relations_bundle(folder: Path) -> Path:
    """A bundle of relations."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, MARKERS)
    write_graph(folder / "onnx" / "model.onnx", relation_table(), per_text=True)
    write_manifest(folder, task="text-classification", labels=RELATIONS, relations=True)
    return folder


def number_table() -> np.ndarray:
    """(vocabulary, 1): what each word adds to a text's number, which is the mean over its tokens."""
    table = np.zeros((len(VOCABULARY), 1))
    for token, adds in (("love", 12.0), ("refund", -6.5), ("fly", 1.0)):
        table[VOCABULARY.index(token)] = adds
    return table


def answer_table() -> np.ndarray:
    """(vocabulary, 2): an answer starts with a city and ends with one, or with `york`; `[CLS]` stands for no answer."""
    table = np.zeros((len(VOCABULARY), 2))
    table[VOCABULARY.index("[CLS]")] = [2.0, 1.0]
    for token in CITIES:
        table[VOCABULARY.index(token)] = [4.0, 2.0]
    table[VOCABULARY.index("new")] = [5.0, 0.0]
    table[VOCABULARY.index("york")] = [0.0, 3.0]
    return table


def write_answers_bundle(folder: Path) -> Path:
    """A bundle of answers to questions."""
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", "cpu": [], "abstain_below": 0.6}
    return write_bundle(
        folder,
        answer_table(),
        task="question-answering",
        labels=["start", "end"],
        pairs=True,
        variants={"fp32": variant},
    )


def vector_table() -> np.ndarray:
    """(vocabulary, 4): what each word adds to a text's vector, which is the mean over its tokens."""
    table = np.zeros((len(VOCABULARY), 4))
    for token, adds in (
        ("love", [3, 4, 0, 0]),
        ("refund", [-6, 0, 8, 0]),
        ("fly", [0, 0, 0, 2]),
        ("rome", [0, 1, 0, 2]),
    ):
        table[VOCABULARY.index(token)] = adds
    return table


def write_vectors_bundle(folder: Path) -> Path:
    """A bundle of vectors."""
    return write_bundle(folder, vector_table(), task="feature-extraction", labels=[], vector_width=4, normalised=True)
