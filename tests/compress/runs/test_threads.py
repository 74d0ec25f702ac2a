"""How OpenMP's threads wait: set by the verbs that train, in time for torch, unless the user did."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import started
from repository import ROOT

from compress.runs.threads import POLICY, SPINS, TRAINING_SPINS, busy_cores, training_spins, wait_for_work

ON_A_TASK = ("--task", "text-classification", "--data", "nowhere", "--out", "out")
TRAINING = {
    "run": ("--teacher", "nowhere", *ON_A_TASK),
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
    # Each starts a process that loads torch; all verbs that train take the same way.
    @pytest.mark.parametrize("verb", [pytest.param(v, marks=() if v == "run" else pytest.mark.slow) for v in TRAINING])
    def test_threads_of_a_training_verb_spin_shortly_or_sleep(self, verb: str, tmp_path: Path) -> None:
        assert spins_in(tmp_path, verb, *TRAINING[verb]) in (TRAINING_SPINS, 0)

    def test_a_busy_neighbour_is_seen(self) -> None:
        with started([sys.executable, "-c", "while True: pass"]):
            assert busy_cores(0.5) > 0.5
            assert training_spins() == 0

    @pytest.mark.slow
    def test_threads_of_another_verb_sleep_at_once(self, tmp_path: Path) -> None:
        assert spins_in(tmp_path, "export", "nowhere", "--out", "out") == 0

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "value"), [(POLICY, "ACTIVE"), (SPINS, "77")])
    def test_what_the_user_set_stays(self, name: str, value: str, tmp_path: Path) -> None:
        found = spins_in(tmp_path, "compare", *TRAINING["compare"], **{name: value})
        assert found == 77 if name == SPINS else found > 1_000_000


@pytest.mark.parametrize("own", [{POLICY: "active"}, {SPINS: "5"}, {POLICY: "passive", SPINS: "1"}])
def test_nothing_is_added_to_what_the_user_set(own: dict[str, str]) -> None:
    environment = dict(own)
    wait_for_work(TRAINING_SPINS, environment)
    assert environment == own


@pytest.mark.parametrize(("cores", "spins"), [(0.1, TRAINING_SPINS), (1.0, 0), (float("inf"), 0)])
def test_threads_spin_on_an_idle_machine_alone(cores: float, spins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.runs.threads.busy_cores", lambda: cores)
    assert training_spins() == spins


def test_deciding_loads_no_torch() -> None:
    code = "import sys, compress.runs.threads; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
