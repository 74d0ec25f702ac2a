"""The model without a server: tokenise, run and decode in one process, with requests on standard input.

    python benchmarks/serve/bare.py BUNDLE TEXTS THREADS SHARE OF

Each request and each answer is a line of JSON. {"seconds": S, "batch_tokens": N} runs its share of the texts, sorted by length, in
batches of at most N padded tokens, repeatedly for S seconds: {"texts", "seconds"}; with "unsorted" in a random order.
{"alone": [places]} times single texts: {"ms": [...]}.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from compress.data.texts import read_texts
from serve.model.pipeline import Pipeline, length_batches
from serve.tasks.served_task import ReadText
from serve.text.answers import AnswerOptions
from serve.text.inputs import TextWork


def main() -> None:
    bundle, texts_file, threads, share, of = sys.argv[1:]
    pipeline = Pipeline(bundle, threads=int(threads))
    pipeline.warm_up()
    texts = read_texts(Path(texts_file))
    lengths = [len(encoding) for encoding in pipeline.encode(texts)]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "alone" in asked:
            said: dict[str, Any] = {"ms": [alone_ms(pipeline, texts[place]) for place in asked["alone"]]}
        else:
            most = asked["batch_tokens"]
            batches = unsorted_batches(lengths, most) if asked.get("unsorted") else length_batches(lengths, most)
            batches = batches[int(share) :: int(of)]
            said = whole_passes(pipeline, [[texts[place] for place in batch] for batch in batches], asked["seconds"])
        print(json.dumps(said), flush=True)


def unsorted_batches(lengths: list[int], most_tokens: int) -> list[list[int]]:
    """All places in a random order, in batches of at most `most_tokens` with their padding."""
    batches: list[list[int]] = [[]]
    longest = 0
    for place in random.Random(0).sample(range(len(lengths)), len(lengths)):
        longest = max(longest, lengths[place])
        if batches[-1] and longest * (len(batches[-1]) + 1) > most_tokens:
            batches.append([])
            longest = lengths[place]
        batches[-1].append(place)
    return batches


def whole_passes(pipeline: Pipeline, batches: list[list[str]], seconds: float) -> dict[str, float]:
    """Runs whole passes, since the last batches of a pass have its longest texts."""
    done = 0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        for batch in batches:
            answered(pipeline, batch)
            done += len(batch)
    return {"texts": done, "seconds": time.perf_counter() - began_s}


def alone_ms(pipeline: Pipeline, text: str) -> float:
    began_s = time.perf_counter()
    answered(pipeline, [text])
    return (time.perf_counter() - began_s) * 1000


def answered(pipeline: Pipeline, texts: list[str]) -> None:
    encodings = pipeline.encode(texts)
    for text, encoding, logits in zip(texts, encodings, pipeline.session.run(encodings), strict=True):
        words = pipeline.task.words(text, encoding)
        pipeline.task.answer(ReadText(TextWork(text, None, OPTIONS), encoding, words), logits, pipeline.facts)


OPTIONS = AnswerOptions()

if __name__ == "__main__":
    main()
