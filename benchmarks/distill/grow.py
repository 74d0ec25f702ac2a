"""Write a teacher twice as wide and twice as deep as another, to test large reductions where no large teacher is available.

    python benchmarks/distill/grow.py --teacher FOLDER --out FOLDER [--head ForSequenceClassification] [--noise 0.1]
        [--tokens 150000 --corpus text.txt]

A 6x384 teacher becomes a 12x768 teacher with four times the parameters per layer and nearly the same outputs
(`grown`). With `--head` the teacher's head for a task is grown too. `--noise` parts the twins, the two
copies of each unit. `--branch` gives new layers a share of the branches of the layer below, so that they live from the start.

With `--tokens` the grown model gets a masked-language-model head and trains on masked words of `--corpus`: a fifth of the tokens
for the head alone, then all of them for the whole model (the stages of `stillroom distill`). The same command resumes after a
kill. With `--corpus` it prints, as JSON, how much each layer changes its input, how alike twins are, and how near the last
hidden states are to those of the smaller teacher, before and after training, on texts of the corpus.
"""

import argparse
import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from compress.data.corpus import CorpusText, Piece, chunks, tokenised
from compress.data.encoded import pad_id_of
from compress.data.texts import TextFiles
from compress.methods.catalogue import METHODS, Sizes
from compress.models.activations import Part, active_layers, read, relative_changes
from compress.models.families import Family, layers_of, linear
from compress.models.initialise import shape_in
from compress.models.pretrained import Opened, load_encoder, open_model, open_tokenizer
from compress.runs.hardware import same_bits
from compress.runs.lineage import save_with_lineage
from compress.runs.method_chain import Link
from compress.runs.method_trainings import MethodInputs, fit_head, run_method
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.training.loop import StageSettings
from serve.errors import BadInput
from stillroom.console import show

LONGEST, BATCH, MEASURED, MOST_TOKENS = 128, 8, 32, 1_000_000  # MEASURED: pieces of the corpus
TWIN_PARTS = ("hidden", "queries", "keys", "values")
LEARNING_RATE = 1e-4  # BERT, section A.2
CHECKPOINT_S = 300.0  # a checkpoint of a 12x768 with its optimiser takes 1.3 GB

# Families with layers `LayerNorm(x + f(x))`, separate queries, keys and values, and embeddings as wide as the layers.
GROWABLE = ("bert", "roberta", "xlm-roberta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--head", default="", choices=["", "ForSequenceClassification", "ForTokenClassification"])
    parser.add_argument("--noise", type=float, default=0.0, help="share of each matrix's root mean square")
    parser.add_argument("--branch", type=float, default=0.0, help="share of the layer below's branches in a new layer")
    parser.add_argument("--tokens", type=int, default=0, help=f"for masked words, at most {MOST_TOKENS:,}")
    parser.add_argument("--corpus", action="append", default=[], type=Path)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"--out {given.out} is there already; give another folder")
    if not 0 <= given.tokens <= MOST_TOKENS or (given.tokens and (given.head or not given.corpus)):
        parser.error(f"--tokens is {given.tokens}; give at most {MOST_TOKENS}, with --corpus and without --head")
    same_bits(given.threads)
    opened = open_model(given.teacher)
    work = Workdir(given.out.with_name(given.out.name + ".work"))
    with work.locked():
        choices = {"noise": given.noise, "branch": given.branch, "seed": given.seed}
        run = fingerprint(folder_fingerprint(opened.folder), given.head, choices, trained_with("cpu"))
        last = start = work.stage("grown", run, partial(_grow, opened=opened, head=given.head, choices=choices))
        if given.tokens:
            last = _trained(work, run, start, given)
        if given.corpus:
            document: dict[str, Any] = {
                "choices": choices,
                "tokens": given.tokens,
                "smaller": _measured(opened, opened, given),
            }
            document["grown"] = _measured(opened, open_model(str(start)), given)
            if given.tokens:
                document["trained"] = _measured(opened, open_model(str(last)), given)
            print(json.dumps(document, indent=2))
        work.publish(last, given.out)


def _grow(folder: Path, opened: Opened, head: str, choices: dict[str, Any]) -> None:
    kind = getattr(transformers, f"AutoModel{head}")
    model = kind.from_pretrained(opened.folder, local_files_only=True, use_safetensors=True)
    save_with_lineage(grown(model, opened.family, **choices), opened, folder, {"role": "grown teacher", **choices})


def _trained(work: Workdir, run: str, start: Path, given: argparse.Namespace) -> Path:
    """The folder of the grown teacher after masked language modelling."""
    opened = open_model(str(start))
    tokenizer, texts = open_tokenizer(opened), TextFiles(tuple(given.corpus))
    of_texts = texts_fingerprint(texts)
    pieces = tokenised(texts, tokenizer, LONGEST, work.root / "corpus", fingerprint=of_texts)
    tokens = min(float(given.tokens), float(pieces.lengths.sum()))
    run = fingerprint(run, of_texts, tokens, given.learning_rate, given.threads)
    inputs = MethodInputs(
        opened,
        tokenizer,
        pieces,
        {},
        BATCH,
        StageSettings(0, given.seed, "fp32", CHECKPOINT_S, device="cpu"),
        tokens,
        lineage={"role": "grown teacher"},
        notify=show,
    )
    head = work.stage("teacher-head", fingerprint(run, "head"), partial(fit_head, given=inputs))
    shape = shape_in(opened)
    layers, width = opened.config.num_hidden_layers, opened.config.hidden_size
    link = Link(shape, METHODS["mlm"](Sizes(layers, layers, width, width)), (tokens,))
    settings = replace(inputs.settings, learning_rate=given.learning_rate)
    training = replace(inputs, start=str(head), settings=settings)
    return run_method(work, run, [link], training)[-1]


def _measured(smaller: Opened, opened: Opened, given: argparse.Namespace) -> dict[str, Any]:
    """What is measured of the model in `opened`, on the first pieces of the corpus."""
    model, teacher = load_encoder(opened, seed=0).eval(), load_encoder(smaller, seed=0).eval()
    inputs = _sample(smaller, given)
    real = inputs["attention_mask"].bool()
    ends = (Part("hidden", model.config.num_hidden_layers), Part("hidden", teacher.config.num_hidden_layers))
    changes = relative_changes(model, inputs)
    with torch.no_grad():
        ours, theirs = (read(m, inputs, [end])[end][real] for m, end in zip((model, teacher), ends, strict=True))
    theirs = theirs.repeat_interleave(ours.shape[1] // theirs.shape[1], dim=1)
    return {
        "relative_changes": _rounded(changes),
        "with_scale": _rounded(relative_changes(model, inputs, rescaled=False)),
        "living": active_layers(changes),
        "twin_correlation": {of: round(r, 3) for of, r in twin_correlation(model, inputs).items()},
        "cosine_to_smaller": round(float(torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean()), 3),
    }


def _sample(opened: Opened, given: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The first `MEASURED` pieces of the corpus."""
    tokenizer = open_tokenizer(opened)
    first: list[Piece] = []
    for text in TextFiles(tuple(given.corpus)):
        first += chunks([text], tokenizer, LONGEST)
        if len(first) >= MEASURED:
            break
    return CorpusText(first[:MEASURED], pad_id_of(tokenizer), MEASURED, 0).at(0).inputs


def _rounded(values: tuple[float, ...]) -> list[float]:
    return [round(value, 3) for value in values]


def twin_correlation(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean correlation over real tokens of units `2 i` and `2 i + 1`, which a grown model starts as copies of one.

    By part of the layers (hidden states, queries, keys, values), averaged over units and layers. 1 means that the twins say the
    same, 0 that they say no more alike than any two units. Arguments as of `relative_changes`.
    """
    numbers = range(1, len(layers_of(model)) + 1)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        found = read(model, inputs, [Part(of, number) for of in TWIN_PARTS for number in numbers])
        return {
            of: float(torch.stack([_correlation(found[of, number][real].double()) for number in numbers]).mean())
            for of in TWIN_PARTS
        }


def _correlation(units: Tensor) -> Tensor:
    """The mean over pairs of neighbours of their Pearson correlation; `units` (tokens, width). A constant unit counts 0."""
    centred = units - units.mean(dim=0)
    scaled = torch.nn.functional.normalize(centred, dim=0)
    return (scaled[:, ::2] * scaled[:, 1::2]).sum(dim=0).mean()


def grown(model: Any, family: Family, *, noise: float = 0.0, branch: float = 0.0, seed: int = 0) -> Any:
    """A model twice as wide and twice as deep as `model` that computes nearly the same function.

    Every unit occurs twice: embeddings and outputs are repeated and incoming weights halved, which keeps the function. Heads
    are twice as wide, so queries are divided by sqrt(2). After each layer comes a new layer whose two branches end in zeros:
    it passes its input on, except for its LayerNorms, which are set to the average mean and spread of the layer below.

    Twins, the two copies of a unit, get equal gradients and never part by training. `noise` parts them.

    Args:
        model: an encoder, with or without a head for a task.
        family: the model's module paths.
        noise: normal noise added to every matrix, as a share of the root mean square of the matrix. 0 adds none.
        branch: the share of the layer below's branches that a new layer adds, in place of zeros.
        seed: of the noise.

    Returns:
        A model of the same class whose hidden states (batch, tokens, 2 width) hold each unit's value twice; it has as many
        labels as `model`.

    Raises:
        BadInput: a family whose layers are of another kind, or a masked-language-model head.
    """
    config = copy.deepcopy(model.config)
    guesses = type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel"))
    if config.model_type not in GROWABLE or guesses:
        raise BadInput(
            f"A {config.model_type} model with this head cannot be grown. Give one of {', '.join(GROWABLE)}, with a head for a task "
            "or without a head."
        )
    config.hidden_size *= 2
    config.intermediate_size *= 2
    config.num_hidden_layers *= 2
    larger = type(model)(config)
    theirs, ours = layers_of(model), layers_of(larger)
    with torch.no_grad():
        of_layers = {id(module) for layer in ours for module in layer.modules()}
        for name, module in larger.named_modules():
            if id(module) not in of_layers:
                _double(model.get_submodule(name), module)
        for number, layer in enumerate(theirs):
            own, new = ours[2 * number], ours[2 * number + 1]
            for target in (own, new):
                for name, module in target.named_modules():
                    _double(layer.get_submodule(name), module)
                query: Any = linear(target, family.query)
                query.weight /= 2**0.5
                query.bias /= 2**0.5
            _pass_on(new, own, family, branch)
        _add_noise(larger, noise, seed)
    return larger.eval()


def _double(module: nn.Module, larger: nn.Module) -> None:
    """Set the own parameters of `larger` to those of `module`, with every unit repeated next to itself.

    A matrix whose inputs occur twice is halved; a table of words or positions has no inputs.
    """
    for name, parameter in larger.named_parameters(recurse=False):
        value: Tensor = module.get_parameter(name)
        for axis in range(value.ndim):
            value = value.repeat_interleave(parameter.shape[axis] // value.shape[axis], dim=axis)
        halved = (
            isinstance(larger, nn.Linear)
            and value.ndim == 2
            and value.shape[1] == 2 * module.get_parameter(name).shape[1]
        )
        parameter.copy_(value / 2 if halved else value)


def _pass_on(new: nn.Module, below: nn.Module, family: Family, branch: float) -> None:
    """Make `new` pass on the output of the layer `below`, and add `branch` of its two branches, which are those of `below`."""
    for path in (family.attention_output, family.ffn_out):
        projection: Any = linear(new, path)
        projection.weight *= branch
        projection.bias *= branch
    norms: list[Any] = [module for module in below.modules() if isinstance(module, nn.LayerNorm)]
    last: Any = norms[-1]  # its output is `weight * n + bias` with n of mean 0 and spread 1
    spread = (last.weight.square().mean() + last.bias.var(unbiased=False)).sqrt()
    theirs: list[Any] = [module for module in new.modules() if isinstance(module, nn.LayerNorm)]
    for norm in theirs:
        norm.weight.fill_(spread)
        norm.bias.fill_(last.bias.mean())


def _add_noise(model: nn.Module, noise: float, seed: int) -> None:
    """Add normal noise to every matrix and table of `model`, `noise` times its root mean square; zeros stay zeros."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if noise and parameter.ndim == 2:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * parameter.square().mean().sqrt() * drawn)


if __name__ == "__main__":
    main()
