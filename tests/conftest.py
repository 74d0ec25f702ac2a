"""Small real things that every test may use: a tiny teacher with a tokenizer, and a task that it can learn."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from graphs_once import graphs_made_once
from hypothesis import HealthCheck, settings
from small_task import examples, make_teacher, write_splits

# Read by OpenMP when torch is loaded, which nothing above does. These models are too small for a second thread, and one
# that waits by spinning makes a busy machine many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nor is any network asked: a name that is no folder is looked for in the hub's cache alone. Read when the hub's library is loaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU, kernels for one run in Triton's interpreter. Read when Triton is loaded, which torch does at times.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell that starts this in the background has it ignore Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No property is about time: on a busy machine an example, or the drawing of it, takes as long as it takes.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train, validation and test of a small task, good for entities and for classes."""
    return write_splits(tmp_path_factory.mktemp("data"), examples)


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 4 layers and width 32 with random weights, no head, and a tokenizer for the task's words."""
    return make_teacher(tmp_path_factory.mktemp("teacher") / "tiny")


@pytest.fixture(scope="session")
def shallow_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of 2 layers, for tests that export it: each layer takes torch almost 2 s."""
    return make_teacher(tmp_path_factory.mktemp("teacher") / "tiny", num_hidden_layers=2)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of the tests have."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def graphs_once(shared_folder: Path) -> Iterator[None]:
    """See `graphs_once.py`."""
    with graphs_made_once(shared_folder):
        yield
