"""How OpenMP's threads wait: set by the verbs that train, in time for torch, unless the user did."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from compress.engine.threads import POLICY, SPINS, TRAINING_SPINS, wait_for_work

ON_A_TASK = ("--task", "text-classification", "--data", "nowhere", "--out", "out")
TRAINING = {
    "run": ("--teacher", "nowhere", *ON_A_TASK),
    "distill": ("--teacher", "nowhere", "--corpus", "nowhere", "--out", "out"),
    "finetune": ("--model", "nowhere", *ON_A_TASK),
    "compare": ("--teacher", "nowhere", "--method", "labels", *ON_A_TASK),
}


def spins_in(folder: Path, *command: str, **more: str) -> int:
    """How long threads spin in the process of `command`, as libgomp itself says when torch loads it."""
    inherited = {name: value for name, value in os.environ.items() if name not in (POLICY, SPINS)}
    environment = inherited | {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT)} | more
    command = (sys.executable, "-P", "-m", "stillroom", *command)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr  # there is no such teacher, which is found out after torch is loaded
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert found, done.stderr
    return int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="torch comes with libgomp on Linux alone")
class TestLibgompIsTold:
    @pytest.mark.parametrize("verb", TRAINING)
    def test_threads_of_a_verb_that_trains_spin_shortly(self, verb: str, tmp_path: Path) -> None:
        assert spins_in(tmp_path, verb, *TRAINING[verb]) == TRAINING_SPINS

    def test_threads_of_another_verb_sleep_at_once(self, tmp_path: Path) -> None:
        assert spins_in(tmp_path, "export", "nowhere", "--out", "out") == 0

    @pytest.mark.parametrize(("name", "value"), [(POLICY, "ACTIVE"), (SPINS, "77")])
    def test_what_the_user_set_stays(self, name: str, value: str, tmp_path: Path) -> None:
        found = spins_in(tmp_path, "compare", *TRAINING["compare"], **{name: value})
        assert found == 77 if name == SPINS else found > 1_000_000


@pytest.mark.parametrize("own", [{POLICY: "active"}, {SPINS: "5"}, {POLICY: "passive", SPINS: "1"}])
def test_nothing_is_added_to_what_the_user_set(own: dict[str, str]) -> None:
    environment = dict(own)
    wait_for_work(TRAINING_SPINS, environment)
    assert environment == own


def test_deciding_loads_no_torch() -> None:
    code = "import sys, compress.engine.threads; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
