"""BentoML around an ONNX classifier, with its adaptive batching.

MODEL=FOLDER bentoml serve bentoml_server:Classify --host 127.0.0.1 --port PORT
"""

import os
from typing import Any

import bentoml
from student import Student


# Two workers of one thread, one per core, without an access log.
@bentoml.service(workers=2, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Classify:
    def __init__(self) -> None:
        self.student = Student(os.environ["MODEL"])

    @bentoml.api(batchable=True, max_batch_size=int(os.environ.get("MAX_BATCH", "32")), max_latency_ms=1000)
    def classify(self, texts: list[str]) -> list[dict[str, Any]]:
        return self.student(texts)
