import os
import subprocess
import sys
from pathlib import Path

import pytest
from limited_group import inside, limited_group
from repository import ROOT

from serve.bundle.cpu import Cores, available_cores, one_cpu_a_core, read_cores, why


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def v1_quota(folder: str, quota_us: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota_us}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


def cores_with(tmp_path: Path, groups: str, files: dict[str, str]) -> int:
    write(tmp_path / "own", groups + "\n" * bool(groups))
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    return read_cores(tmp_path / "cgroup", tmp_path / "own", tmp_path / "cpus").chosen


GROUPS = {
    "no-control-groups-leaves-the-affinity": ("", {}, 4),
    "v2-without-a-quota": ("0::/", {"cpu.max": "max 100000\n"}, 4),
    "v2-two-and-a-half-cores-are-two": ("0::/", {"cpu.max": "250000 100000\n"}, 2),
    "v2-half-a-core-is-one": ("0::/", {"cpu.max": "50000 100000\n"}, 1),
    "v2-quota-above-the-affinity": ("0::/", {"cpu.max": "900000 100000\n"}, 4),
    "v2-the-group-above-is-tighter": ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, 2),
    "v1-quota": ("4:cpu,cpuacct:/job", v1_quota("cpu,cpuacct/job", 100_000), 1),
    "v1-container-that-sees-its-group-as-the-root": ("1:cpu:/seen/from/outside", v1_quota("cpu", 200_000), 2),
    "v1-without-a-quota": ("1:cpu:/", v1_quota("cpu", -1), 4),
    "a-line-of-another-form-is-passed-over": ("nonsense", {"cpu.max": "100000 100000"}, 4),
}


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("groups", "files", "cores"), GROUPS.values(), ids=GROUPS)
def test_cores_are_the_least_of_affinity_and_quota(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    assert cores_with(tmp_path, groups, files) == cores


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("siblings", "physical"),
    [
        pytest.param({}, 4, id="nothing-is-told"),
        pytest.param({"0": "0\n", "1": "1\n", "2": "2\n", "3": "3\n"}, 4, id="a-cpu-a-core"),
        pytest.param({"0": "0-1\n", "1": "0-1\n", "2": "2-3\n", "3": "2-3\n"}, 2, id="two-cores-of-two"),
        pytest.param({"0": "0,2", "1": "1,3", "2": "0,2", "3": "1,3"}, 2, id="siblings-that-are-no-neighbours"),
        pytest.param({"0": "0-3", "1": "0-3", "2": "0-3", "3": "0-3"}, 1, id="one-core-of-four"),
        pytest.param(
            {"0": "0,64", "1": "1,65", "2": "2,66", "3": "3,67"}, 4, id="siblings-that-this-process-may-not-use"
        ),
        pytest.param({"0": "0-1", "1": "0-1"}, 3, id="nothing-is-told-of-some"),
    ],
)
@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hyperthreads_of_a_core_count_once(tmp_path: Path, siblings: dict[str, str], physical: int, name: str) -> None:
    for cpu, text in siblings.items():
        write(tmp_path / f"cpu{cpu}" / "topology" / name, text)
    cores = read_cores(tmp_path, tmp_path / "absent", tmp_path)
    assert cores == Cores(affinity=4, physical=physical, quota_cores=None)
    assert cores.chosen == physical


@pytest.mark.parametrize(
    ("cores", "sentence"),
    [
        (Cores(2, 2, None), "2 threads: this process may use 2 cores"),
        (Cores(1, 1, 4.0), "1 thread: this process may use 1 core"),
        (Cores(8, 4, None), "4 threads: the 8 CPUs of this process are hyperthreads of 4 cores"),
        (Cores(2, 1, 1.5), "1 thread: the 2 CPUs of this process are hyperthreads of 1 core"),
        (Cores(2, 2, 1.0), "1 thread: the control group's quota is 1.0 of 2 cores"),
        (Cores(8, 4, 2.5), "2 threads: the control group's quota is 2.5 of 4 cores"),
        (Cores(2, 1, 0.25), "1 thread: the control group's quota is 0.25 of 1 core"),
    ],
)
def test_the_reason_for_the_threads_is_a_sentence(cores: Cores, sentence: str) -> None:
    assert why(cores) == sentence


@pytest.mark.parametrize("quota_cores", [1.0, 0.5])
def test_a_process_in_a_limited_group_of_this_machine_runs_one_thread(quota_cores: float) -> None:
    physical = read_cores().physical
    told = "from serve.bundle.cpu import read_cores, why; print(read_cores().chosen); print(why(read_cores()))"
    with limited_group(quota_cores) as group:
        if group is None:
            pytest.skip("this process may not make a control group with a quota of CPU time")
        done = subprocess.run(
            inside(group, [sys.executable, "-c", told]), capture_output=True, text=True, check=True, cwd=ROOT
        )
    chosen, sentence = done.stdout.splitlines()
    assert int(chosen) == 1
    if quota_cores < physical:
        assert sentence.startswith(f"1 thread: the control group's quota is {quota_cores} of {physical} core")
    assert not group.exists()


@pytest.mark.usefixtures("four_cores")
def test_one_cpu_is_taken_of_each_core(tmp_path: Path) -> None:
    assert one_cpu_a_core(tmp_path) == [0, 1, 2, 3]  # nothing is told of siblings
    for cpu, siblings in enumerate(["0,1", "0,1", "2,3", "2,3"]):  # as many virtual machines number them
        write(tmp_path / f"cpu{cpu}" / "topology" / "core_cpus_list", siblings)
    assert one_cpu_a_core(tmp_path) == [0, 2]


def test_without_affinity_every_cpu_counts_and_none_is_bound_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert read_cores(tmp_path, tmp_path / "groups", tmp_path) == Cores(6, 6, None)
    assert one_cpu_a_core(tmp_path) == []


def test_this_machine_has_at_least_one_core() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
