"""LitServe around an ONNX classifier.

MODEL=FOLDER python litserve_server.py PORT
"""

import os
import sys
from typing import Any

import litserve as ls
from student import Student


class Classify(ls.LitAPI):
    def setup(self, device: str) -> None:
        self.student = Student(os.environ["MODEL"])

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def predict(self, texts: list[str]) -> list[dict[str, Any]]:
        return self.student(texts)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    # Two workers of one thread, one per core. A batch takes the waiting requests at once.
    api = Classify(max_batch_size=int(os.environ.get("MAX_BATCH", "32")), batch_timeout=0.0)
    fast_queue = os.environ.get("FAST_QUEUE") == "1"  # ZeroMQ between the web server and the workers
    server = ls.LitServer(api, accelerator="cpu", devices=1, workers_per_device=2, fast_queue=fast_queue)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
