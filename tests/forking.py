"""Processes forked from one that has loaded what most of them need and does nothing else: loading it takes each of them seconds."""

import multiprocessing

FORKING = multiprocessing.get_context("forkserver")
# All users of it in a process of tests share one such process.
FORKING.set_forkserver_preload([
    "torch", "torch.distributed", "transformers", "stillroom.verbs.annotate.annotator", "serve.model.session", "onnxruntime", "pyarrow",
])  # fmt: skip
