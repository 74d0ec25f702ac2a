"""Runs in optimum's environment: reads texts from standard input, writes the answers as its last line. See interop.py."""

import json
import sys
from importlib.metadata import version
from typing import Any

import onnxruntime
from optimum.onnxruntime import ORTModelForSequenceClassification, ORTModelForTokenClassification
from transformers import AutoTokenizer, pipeline

FILES = {"fp32": "model.onnx", "int8": "model_quantized.onnx"}
LIBRARIES = ("optimum", "optimum-onnx", "transformers", "onnxruntime", "tokenizers")


def answers(asked: dict[str, Any], variant: str) -> list[list[tuple[int, str, float]]]:
    tokens = asked["task"] == "token-classification"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = (ORTModelForTokenClassification if tokens else ORTModelForSequenceClassification).from_pretrained(
        asked["bundle"], subfolder="onnx", file_name=FILES[variant], session_options=options
    )
    tokenizer = AutoTokenizer.from_pretrained(asked["bundle"])
    if tokens:
        classify = pipeline(
            asked["task"], model=model, tokenizer=tokenizer, aggregation_strategy="none", ignore_labels=[]
        )
        return [[(each["index"], each["entity"], float(each["score"])) for each in classify(t)] for t in asked["texts"]]
    classify = pipeline(asked["task"], model=model, tokenizer=tokenizer, truncation=True)
    return [[(0, each["label"], each["score"]) for each in classify(text)] for text in asked["texts"]]


if __name__ == "__main__":
    question = json.load(sys.stdin)
    told = {variant: answers(question, variant) for variant in question["variants"]}
    print(json.dumps({"versions": {name: version(name) for name in LIBRARIES}, "answers": told}))
