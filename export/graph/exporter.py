"""Exports a checkpoint as a float32 ONNX graph: the same function, for any batch size and sequence length."""

import contextlib
import inspect
import io
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.models.configurations import CONFIG, loading_config, position_limit, read_json
from compress.models.heads import HEADS
from compress.models.sentence_pooling import pooling_in
from compress.tasks import FEATURE_EXTRACTION, task_of
from export.graph.nodes import Wiring, copied
from serve.errors import BadInput
from serve.files import replacing
from serve.model.session import OUTPUT
from serve.wording import one_of

if TYPE_CHECKING:
    import torch
    from onnx import GraphProto, ModelProto, ValueInfoProto
    from transformers import PreTrainedModel

    from compress.models.sentence_encoder import SentenceModel

# Opset 20 is the first with Gelu. Every onnxruntime that the server accepts runs it.
OPSET = 20

# A protobuf message must be smaller than 2 GiB, and the graph itself needs some of that.
MAX_WEIGHT_BYTES = 2**31 - 2**26


@dataclass(frozen=True)
class GraphInfo:
    """The exported graph, described."""

    labels: tuple[str, ...]
    """Index -> name, from the checkpoint's `id2label`."""
    inputs: tuple[str, ...]
    """Names of the graph's inputs, in their order; each is int64 (batch, sequence)."""
    parameters: int
    size_bytes: int
    operators: dict[str, int]
    """How many nodes of each kind the graph has."""
    shapes: tuple[Any, ...] = field(repr=False, default=())
    """A ValueInfoProto for each value: its type and shape. The file does not contain them."""


def export_graph(checkpoint: Path, out: Path, max_length: int) -> GraphInfo:
    """Write the model in folder `checkpoint` to the file `out` as ONNX, and describe it.

    Inputs are `input_ids`, `attention_mask` and, where the model has two or more segment types, `token_type_ids`, int64
    (batch, sequence), for any batch size and 1 to `max_length` tokens. The output `logits` is float32:
    (batch, sequence, labels) for token classification, (batch, sequence, 2) for question answering, (batch, labels) for text
    classification, and for an encoder of sentences (batch, width): the vector of each text. Before it are the task's `named_outputs`,
    made of the same values. Equal checkpoints give equal bytes.
    BadInput when the folder is not exportable, or has fewer positions than `max_length`.
    """
    import torch

    from compress.models.sentence_encoder import SentenceModel

    model = load_answering_model(checkpoint)
    inputs = graph_inputs(model)
    task = FEATURE_EXTRACTION if isinstance(model, SentenceModel) else task_of(model.config)
    outputs = (*(task.serving.named_outputs if task else ()), OUTPUT)
    _check_size(checkpoint, model, max_length)
    # torch.export takes sizes 0 and 1 for constants, so the example has 2 rows of several tokens. A padded position keeps the mask.
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
            _outputs_of(model, inputs, outputs),
            tuple(example_inputs[name] for name in inputs),
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=((axes,) * len(inputs),),  # *args is one parameter, a tuple
            external_data=False,
            verbose=False,
        )
        assert program is not None  # only the older exporter returns None
        graph = program.model_proto
    _name_products(graph)
    strip_provenance(graph)
    # With these shapes in the file, onnxruntime 1.31 joins Add and LayerNormalization into one slower kernel: a 3x384
    # model at 8 x 64 tokens takes 66 ms of processor time with them and 53 ms without.
    shapes = type(graph.graph)()  # a copy: deleting a list deletes its messages
    shapes.value_info.extend(graph.graph.value_info)
    del graph.graph.value_info[:]
    # onnxruntime does not join such an Add and Gelu into BiasGelu, which is slower (1.31, CPU): 2.6 ms against 1.7 ms for the
    # two kernels, in a 3x384 model at 8 x 64 tokens on one core.
    shape_biases_of_gelu(graph, (1, -1))
    write_model(graph, out)
    return GraphInfo(
        labels=()
        if isinstance(model, SentenceModel)
        else tuple(model.config.id2label[index] for index in range(model.config.num_labels)),
        inputs=inputs,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        size_bytes=out.stat().st_size,
        operators=dict(sorted(Counter(node.op_type for node in graph.graph.node).items())),
        shapes=tuple(shapes.value_info),
    )


def _name_products(model: "ModelProto") -> None:
    """Name each MatMul after its module, such as `bert.encoder.layer.0.output.dense`; a second use gets `#2`.

    Reports show these names. The exporter's own names (`node_MatMul_63`) do not show the module.
    """
    uses: Counter[str] = Counter()
    for node in model.graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        # A printed list of strings: the modules from the outermost to the innermost, then the operator.
        scopes = re.findall(r"'([^']*)'", metadata.get("pkg.torch.onnx.name_scopes", ""))
        if node.op_type == "MatMul" and len(scopes) > 1 and (module := re.sub(r"^(model\.)+", "", scopes[-2])):
            uses[module] += 1
            node.name = module if uses[module] == 1 else f"{module}#{uses[module]}"


def shape_biases_of_gelu(model: "ModelProto", shape: tuple[int, ...]) -> None:
    """Store each bias that is added right before a GELU as (1, features), or with the `shape` (-1,) as (features,); the sum is the same."""
    from onnx import numpy_helper

    wiring = Wiring(model)
    for node in model.graph.node:
        add = wiring.made_by.get(node.input[0]) if node.op_type == "Gelu" else None
        for name in add.input if add is not None and add.op_type == "Add" else []:
            bias = wiring.constants.get(name)
            if bias is not None and bias.ndim == 3 - len(shape) and len(wiring.read_by[name]) == 1:
                wiring.initializers[name].CopyFrom(numpy_helper.from_array(bias.reshape(shape), name))


def load_answering_model(checkpoint: Path) -> "PreTrainedModel | SentenceModel":
    """The model in folder `checkpoint`, in float32 and evaluation mode, by `config.architectures`.

    Without a head for a task it is an encoder of sentences, if its folder says how vectors are made. BadInput when it is neither.
    """
    import torch

    architecture = " ".join(read_json(checkpoint, CONFIG, str(checkpoint)).get("architectures") or [])
    head = next((head for head in HEADS if architecture.endswith(head.suffix)), None)
    if head is None and (how := pooling_in(checkpoint)):
        from compress.models.sentence_encoder import load_sentence_model

        with quiet():
            return load_sentence_model(how, checkpoint, attn_implementation="eager", dtype=torch.float32)
    if head is None:
        raise BadInput(
            f"{checkpoint} holds a {architecture or 'model that names no architecture'}; export needs a "
            "...ForTokenClassification, ...ForSequenceClassification or ...ForQuestionAnswering: fine-tune it for the task first; or an "
            "encoder of sentences, whose folder has a modules.json"
        )
    # "eager" writes attention as two products and a softmax, which onnxruntime optimises best: a 3x384 model takes about
    # 0.9 times as long as its "sdpa" graph, which adds NaN guards and slices.
    with quiet():
        model: PreTrainedModel = head.model_class.from_pretrained(
            checkpoint,
            config=loading_config(checkpoint),
            attn_implementation="eager",
            dtype=torch.float32,
            local_files_only=True,
        )
    return head.ready(model).eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, prints and warnings of transformers and torch's exporter; exceptions still pass.

    Their warnings (axis names that merge, missing torchvision) need no action from the user.
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
    """Write `model` to the file `out` in one step, so that a reader never sees a partial file."""
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


def _outputs_of(
    model: "PreTrainedModel | SentenceModel", inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> "torch.nn.Module":
    """`model` as a module that takes tensors in the order of `inputs` and returns those of `outputs`."""
    import torch

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # return_dict: the checkpoint's configuration may ask for tuples.
            output = self.model(**dict(zip(inputs, tensors, strict=True)), return_dict=True)
            return tuple(getattr(output, name) for name in outputs)

    return Outputs().eval()


def graph_inputs(model: "PreTrainedModel | SentenceModel") -> tuple[str, ...]:
    """The inputs that the logits depend on. `token_type_ids` is one only for a model with two or more segment types."""
    takes_segments = "token_type_ids" in inspect.signature(model.forward).parameters
    segments = ("token_type_ids",) if takes_segments and getattr(model.config, "type_vocab_size", 0) > 1 else ()
    return ("input_ids", "attention_mask", *segments)


def _check_size(checkpoint: Path, model: "PreTrainedModel | SentenceModel", max_length: int) -> None:
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


# Kernel -> the operators of a session that count as one.
KERNELS: Mapping[str, frozenset[str]] = {
    "layer-norm": frozenset({"LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"}),
    "gelu": frozenset({"Gelu", "BiasGelu", "FastGelu", "QuickGelu"}),
    "integer products": frozenset(
        {"MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "MatMulNBits"}
    ),
    "attention": frozenset({"Attention", "MultiHeadAttention", "QAttention"}),
    "skip-layer-norm": frozenset({"SkipLayerNormalization"}),
    "bias-gelu": frozenset({"BiasGelu"}),
}
JOINED = ("attention", "skip-layer-norm", "bias-gelu")


def session_operators(onnx_file: Path) -> dict[str, int]:
    """How many nodes of each kind onnxruntime runs for `onnx_file` on this processor, after its own optimisation."""
    import onnx
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # suppresses the warning that the optimised file is for this machine only
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
        return operators_of(onnx.load(options.optimized_model_filepath))


def operators_of(model: "ModelProto") -> dict[str, int]:
    """How many nodes of each kind `model` has."""
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def fused(operators: Mapping[str, int]) -> dict[str, int]:
    """The kernels of `KERNELS` among a session's operators."""
    return {name: sum(operators.get(kind, 0) for kind in kinds) for name, kinds in KERNELS.items()}


def missing(found: Mapping[str, int], promised: Mapping[str, int]) -> list[str]:
    """A sentence for each kernel with fewer operators in `found` than in `promised`."""
    return [
        f"{name}: the loaded session has {found.get(name, 0)}, expected {count}"
        for name, count in promised.items()
        if found.get(name, 0) < count
    ]


def joined(model: "ModelProto", shapes: "Iterable[ValueInfoProto]") -> tuple["ModelProto", dict[str, int]]:
    """A copy of `model` with the kernels of `JOINED` joined by onnxscript, and how many of each there are.

    `shapes` are `GraphInfo.shapes` of the exporter: the rules compare shapes, and ONNX's own inference loses the number
    of heads. Remaining values keep their names, and a joined kernel's output has the name of the last value that it
    replaces. BadInput for a model with nothing to join.
    """
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    copy = copied(model)
    copy.graph.value_info.extend(shapes)
    shape_biases_of_gelu(copy, (-1,))  # the exporter writes (1, features) to prevent joining
    rewritten, _ = optimize_for_ort(onnx_ir.from_proto(copy))
    made: ModelProto = onnx_ir.to_proto(rewritten)
    # A joined kernel writes each named output to memory, such as a residual's sum: those that no node reads are removed.
    read = {name for node in made.graph.node for name in node.input} | {value.name for value in made.graph.output}
    for node in made.graph.node:
        if node.domain == "com.microsoft":
            wanted = [name if name in read else "" for name in node.output]
            while not wanted[-1]:
                wanted.pop()
            node.output[:] = wanted
    strip_provenance(made)
    del made.graph.value_info[:]
    kernels = fused(operators_of(made))
    counts = {name: kernels[name] for name in JOINED if kernels[name]}
    if not counts:
        raise BadInput(f"--fuse: the graph has no {one_of(JOINED)} to join; leave --fuse out.")
    return made, counts
