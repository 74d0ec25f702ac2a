"""A checkpoint as an ONNX graph in float32: the same function, with free batch and sequence."""

import contextlib
import inspect
import io
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.graph.nodes import Wiring
from serve.bundle.manifest import Task
from serve.bundle.replaced_files import replacing
from serve.errors import BadInput
from serve.model.session import OUTPUT
from serve.text.labels import MULTI_LABEL

if TYPE_CHECKING:
    import torch
    from onnx import GraphProto, ModelProto
    from transformers import PretrainedConfig, PreTrainedModel

# Families that number positions from the padding's id plus one.
POSITIONS_FROM_PADDING = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"})

# onnxruntime 1.20, the oldest that the server takes, runs opset 21 and below; LayerNormalization and Gelu stand in 20.
OPSET = 20

# protobuf cannot hold a message of 2 GiB, and the graph itself needs a little of it.
MAX_WEIGHT_BYTES = 2**31 - 2**26


@dataclass(frozen=True)
class GraphInfo:
    """What was exported."""

    task: Task
    labels: tuple[str, ...]
    """Index -> name, from the checkpoint's `id2label`."""
    inputs: tuple[str, ...]
    """Names of the graph's inputs, in their order; each is int64 (batch, sequence)."""
    parameters: int
    size_bytes: int
    operators: dict[str, int]
    """How many nodes of each kind the graph has."""
    shapes: tuple[Any, ...] = field(repr=False, default=())
    """A ValueInfoProto of every value: its type and shape, which the file leaves out."""


def export_graph(checkpoint: Path, out: Path, max_length: int) -> GraphInfo:
    """Write the model in folder `checkpoint` to the file `out` as ONNX, and describe it.

    Inputs are `input_ids`, `attention_mask` and, where the model tells segments apart, `token_type_ids`, int64
    (batch, sequence), any batch and any sequence from 1 to `max_length` tokens. The output `logits` is float32:
    (batch, sequence, labels) when tokens are classified, (batch, labels) when texts are. Equal checkpoints give equal
    bytes. BadInput when the folder is no classifier that can be exported, or has fewer positions than `max_length`.
    """
    import torch

    model, task = load_classifier(checkpoint)
    inputs = graph_inputs(model)
    _check_size(checkpoint, model, max_length)
    # A batch of 2 and several tokens: sizes 0 and 1 would be taken for constants. One padded position keeps the mask.
    example = torch.full((2, min(7, max_length)), 2, dtype=torch.int64)  # (batch, sequence)
    attention_mask = torch.ones_like(example)
    attention_mask[1, -1] = 0
    example_inputs = {
        "input_ids": example,
        "attention_mask": attention_mask,
        "token_type_ids": torch.zeros_like(example),
    }
    axes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("sequence", min=1, max=max_length)}
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            _logits_of(model, inputs),
            tuple(example_inputs[name] for name in inputs),
            input_names=list(inputs),
            output_names=[OUTPUT],
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=((axes,) * len(inputs),),  # *args counts as one parameter that holds a tuple
            external_data=False,
            verbose=False,
        )
        assert program is not None  # None is what the older exporter returns
        graph = program.model_proto
    _name_products(graph)
    strip_provenance(graph)
    # Told these shapes, onnxruntime 1.31 joins Add and LayerNormalization into one kernel that is the slower: of a 3x384
    # model at 8 x 64 tokens, 66 ms of processor time against 53 without.
    shapes = type(graph.graph)()  # messages are gone with the list that they stand in: this copies them
    shapes.value_info.extend(graph.graph.value_info)
    del graph.graph.value_info[:]
    _keep_gelu_apart(graph)
    write_model(graph, out)
    return GraphInfo(
        task=task,
        labels=tuple(model.config.id2label[index] for index in range(model.config.num_labels)),
        inputs=inputs,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        size_bytes=out.stat().st_size,
        operators=dict(sorted(Counter(node.op_type for node in graph.graph.node).items())),
        shapes=tuple(shapes.value_info),
    )


def _name_products(model: "ModelProto") -> None:
    """Call each MatMul by the module that it is in, such as `bert.encoder.layer.0.output.dense`; a second use gets `#2`.

    Reports name products, and the exporter's own names (`node_MatMul_63`) say nothing to who trained the model.
    """
    uses: Counter[str] = Counter()
    for node in model.graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        # The modules from the outermost to the operator itself, as a printed list of strings.
        scopes = re.findall(r"'([^']*)'", metadata.get("pkg.torch.onnx.name_scopes", ""))
        if node.op_type == "MatMul" and len(scopes) > 1 and (module := scopes[-2].removeprefix("model.")):
            uses[module] += 1
            node.name = module if uses[module] == 1 else f"{module}#{uses[module]}"


def _keep_gelu_apart(model: "ModelProto") -> None:
    """Store each bias that is added right before a GELU as (1, features) and not as (features,).

    The sum is the same, but onnxruntime then leaves Add and Gelu two kernels: joined into BiasGelu (1.31, CPU) they take
    more time than apart, 2.6 ms against 1.7 of a 3x384 model at 8 x 64 tokens on one core.
    """
    from onnx import numpy_helper

    wiring = Wiring(model)
    for node in model.graph.node:
        add = wiring.made_by.get(node.input[0]) if node.op_type == "Gelu" else None
        for name in add.input if add is not None and add.op_type == "Add" else []:
            if name in wiring.constants and wiring.constants[name].ndim == 1 and len(wiring.read_by[name]) == 1:
                row = wiring.constants[name][None, :]
                wiring.initializers[name].CopyFrom(numpy_helper.from_array(row, name))


def load_classifier(checkpoint: Path) -> tuple["PreTrainedModel", Task]:
    """The model in folder `checkpoint`, in float32 and evaluation mode, and its task, from `config.architectures`.

    BadInput when the folder is not a checkpoint of a token or text classifier.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    architecture = _architecture(checkpoint)
    classes: dict[Task, type] = {
        "token-classification": AutoModelForTokenClassification,
        "text-classification": AutoModelForSequenceClassification,
    }
    task: Task
    if architecture.endswith("ForTokenClassification"):
        task = "token-classification"
    elif architecture.endswith("ForSequenceClassification"):
        task = "text-classification"
    else:
        raise BadInput(
            f"{checkpoint} holds a {architecture or 'model that names no architecture'}; export needs a "
            "...ForTokenClassification or ...ForSequenceClassification: fine-tune it for the task first"
        )
    # "eager" spells attention out as two products and a softmax, which onnxruntime fuses best: of the same 3x384 model
    # it takes about 0.9 of the time of the "sdpa" graph, which adds NaN guards and slices.
    with quiet():
        model: PreTrainedModel = classes[task].from_pretrained(  # type: ignore[attr-defined]
            checkpoint, attn_implementation="eager", dtype=torch.float32, local_files_only=True
        )
    return model.eval(), task


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the progress bars, prints and warnings of transformers and torch's exporter off the terminal.

    Their exceptions still pass. What they warn of (axis names that merge, absent torchvision) asks nothing of a user.
    """
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    disabled_below = logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_below)
        if bars:
            transformers_logging.enable_progress_bar()


def write_model(model: "ModelProto", out: Path) -> None:
    """Write `model` to the file `out` in one step, so that a reader never sees half of it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as beside:
        beside.write_bytes(model.SerializeToString(deterministic=True))


def strip_provenance(model: "ModelProto") -> None:
    """Remove doc strings and metadata: stack traces with this machine's paths, which no runtime reads."""
    model.doc_string = ""
    del model.metadata_props[:]
    _strip_graph(model.graph)
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]


def _strip_graph(graph: "GraphProto") -> None:
    graph.doc_string = ""
    del graph.metadata_props[:]
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.doc_string = ""
        del part.metadata_props[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _strip_graph(attribute.g)


def _logits_of(model: "PreTrainedModel", inputs: tuple[str, ...]) -> "torch.nn.Module":
    """`model` as a module of positional tensors, in the order of `inputs`, that gives only the logits."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            # return_dict: a checkpoint may ask for tuples.
            output = self.model(**dict(zip(inputs, tensors, strict=True)), return_dict=True)
            logits: torch.Tensor = output.logits
            return logits

    return Logits().eval()


def graph_inputs(model: "PreTrainedModel") -> tuple[str, ...]:
    """The inputs that the answer depends on. A model with one segment type or none takes no `token_type_ids`."""
    takes_segments = "token_type_ids" in inspect.signature(model.forward).parameters
    segments = ("token_type_ids",) if takes_segments and getattr(model.config, "type_vocab_size", 0) > 1 else ()
    return ("input_ids", "attention_mask", *segments)


def position_limit(config: "PretrainedConfig") -> int | None:
    """The most tokens that the model has positions for, special tokens included; None when nothing limits them."""
    table = getattr(config, "max_position_embeddings", None)
    if table is None:
        return None
    # As many rows are never used: RoBERTa's table of 514 serves 512 tokens.
    return int(table) - (config.pad_token_id + 1 if config.model_type in POSITIONS_FROM_PADDING else 0)


def _check_size(checkpoint: Path, model: "PreTrainedModel", max_length: int) -> None:
    limit = position_limit(model.config)
    if max_length < 3:
        raise BadInput(f"max_length {max_length}: a text needs at least 3 tokens, two of them special; give 3 or more")
    if limit is not None and max_length > limit:
        raise BadInput(f"max_length {max_length}: {checkpoint} has positions for {limit} tokens; give at most {limit}")
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if weight_bytes > MAX_WEIGHT_BYTES:
        raise BadInput(
            f"{checkpoint} has {weight_bytes / 2**30:.1f} GiB of float32 weights; one ONNX file holds less than 2 GiB: "
            "distil a smaller student"
        )


def is_multi_label(checkpoint: Path) -> bool:
    """Whether the model in folder `checkpoint` says of each label apart whether it applies. BadInput as `export_graph`."""
    return _config(checkpoint).get("problem_type") == MULTI_LABEL


def _architecture(checkpoint: Path) -> str:
    """The first of the checkpoint's `architectures`, or nothing."""
    architectures = _config(checkpoint).get("architectures")
    return str(architectures[0]) if architectures else ""


def _config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's configuration. BadInput when there is no readable `config.json`."""
    file = checkpoint / "config.json"
    if not file.is_file():
        raise BadInput(f"{checkpoint} has no config.json; export needs a folder that `save_pretrained` wrote")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{file} is not JSON ({error}); save the checkpoint again") from error
    return config if isinstance(config, dict) else {}
