"""FastAPI around transformers' pipeline with optimum's onnxruntime model.

MODEL=FOLDER python fastapi_server.py PORT
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import onnxruntime as ort
import uvicorn
from fastapi import FastAPI
from optimum.onnxruntime import ORTModelForSequenceClassification
from pydantic import BaseModel
from transformers import AutoTokenizer, pipeline

WORKERS = 2  # one per core; texts of several callers are not batched


class Query(BaseModel):
    text: str


def opened() -> Any:
    """The pipeline of the folder MODEL, one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    folder = os.environ["MODEL"]
    model = ORTModelForSequenceClassification.from_pretrained(
        folder, subfolder="onnx", file_name="model_quantized.onnx", session_options=options
    )
    return pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.classify = opened()
    app.state.classify("warm")
    yield


app = FastAPI(lifespan=lifespan)


# Without a thread pool: a call of the model fills its core anyway, and threads add overhead.
@app.post("/classify")
async def classify(query: Query) -> dict[str, Any]:
    found: dict[str, Any] = app.state.classify(query.text, truncation=True)[0]
    return found


if __name__ == "__main__":
    uvicorn.run("fastapi_server:app", host="127.0.0.1", port=int(sys.argv[1]), workers=WORKERS, log_level="warning")
