"""mosec around an ONNX classifier.

MODEL=FOLDER python mosec_server.py --address 127.0.0.1 --port PORT --log-level warning
"""

import os
from typing import Any

from mosec import Server, Worker
from student import Student


class Classify(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.student = Student(os.environ["MODEL"])

    def forward(self, data: list[dict[str, str]]) -> list[dict[str, Any]]:
        return self.student([each["text"] for each in data])


if __name__ == "__main__":
    server = Server()
    # Two workers of one thread, one per core. 1 ms is the shortest wait for a batch to fill that mosec accepts.
    server.append_worker(Classify, num=2, max_batch_size=int(os.environ.get("MAX_BATCH", "32")), max_wait_time=1)
    server.run()
