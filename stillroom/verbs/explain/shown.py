"""The texts whose attention the page shows, with the attention of both models."""

import base64
from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding
from torch import Tensor

from compress.evaluation.attention_divergence import divergence, mean_divergence
from compress.models.attention_reading import Reader, TextRead, read_text
from stillroom.verbs.explain.document import TextFigures, encoded_for
from stillroom.verbs.explain.inputs import Inputs, LayerPair

SHOWN_TOKENS = 48  # of a text; the page grows with their square


def shown_texts(
    inputs: Inputs, teacher: Reader, student: Reader, figures: Sequence[TextFigures], most: int
) -> list[dict[str, Any]]:
    """At most so many texts: half of them those whose attention differs most, the others the first of the data.

    Texts longer than `SHOWN_TOKENS` are cut there and read again, so what is shown is a whole attention. Each is
    `{text, attention, cut, tokens, pairs}`. A pair has the `attention` of the shown tokens, `token`, whose attention differs most,
    and `weights`: for each model one string per head, base64 of (tokens, tokens) bytes, 255 for an attention of 1.
    """
    apart = sorted(range(len(figures)), key=lambda i: -figures[i].attention)[: -(-most // 2)]
    chosen = list(dict.fromkeys([*apart, *range(len(figures))]))[:most]
    examples = [inputs.examples[i] for i in chosen]
    encoded = encoded_for(inputs, examples, min(inputs.max_length, SHOWN_TOKENS))
    found = []
    for row, i in enumerate(chosen):
        reads = [read_text(reader, of, row) for reader, of in zip((teacher, student), encoded, strict=True)]
        encoding = encoded[0].encodings[row]
        found.append(
            {
                "text": examples[row].text_read,
                "attention": figures[i].attention,
                "cut": bool(encoding.overflowing),
                "tokens": _pieces(encoding, (examples[row].text_read, examples[row].text_pair or "")),
                "pairs": [_shown_pair(pair, *reads) for pair in inputs.pairs],
            }
        )
    return found


def _shown_pair(pair: LayerPair, teacher: TextRead, student: TextRead) -> dict[str, Any]:
    theirs, ours = teacher.attention(pair.teacher), student.attention(pair.student)
    # One query at a time, so that each has a divergence of its own.
    by_token = divergence(theirs.mean(dim=0).unsqueeze(1), ours.mean(dim=0).unsqueeze(1))
    return {
        "teacher_layer": pair.teacher,
        "student_layer": pair.student,
        "attention": mean_divergence(theirs, ours),
        "token": int(by_token.argmax()),
        "weights": {"teacher": _weights(theirs), "student": _weights(ours)},
    }


def _weights(attention: Tensor) -> list[str]:
    heads = (attention * 255).round().byte().numpy()
    return [base64.b64encode(head.tobytes()).decode() for head in heads]


def _pieces(encoding: Encoding, texts: tuple[str, str]) -> list[str]:
    """Each token as the piece of text that it stands for; a special token by its name."""
    return [
        token if sequence is None or start == end else texts[sequence][start:end]
        for token, sequence, (start, end) in zip(encoding.tokens, encoding.sequence_ids, encoding.offsets, strict=True)
    ]
