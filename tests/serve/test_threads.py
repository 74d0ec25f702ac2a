import os
from pathlib import Path

import pytest

from serve.threads import available_cores


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def cores_with(tmp_path: Path, groups: str, files: dict[str, str]) -> int:
    write(tmp_path / "own", groups)
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    return available_cores(tmp_path / "cgroup", tmp_path / "own")


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        pytest.param("", {}, 4, id="no-control-groups-leaves-the-affinity"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, 4, id="v2-without-a-quota"),
        pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, 2, id="v2-two-and-a-half-cores-are-two"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 1, id="v2-half-a-core-is-one"),
        pytest.param("0::/\n", {"cpu.max": "900000 100000\n"}, 4, id="v2-quota-above-the-affinity"),
        pytest.param(
            "0::/a/b\n",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"},
            2,
            id="v2-the-group-above-is-tighter",
        ),
        pytest.param(
            "4:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            1,
            id="v1-quota",
        ),
        pytest.param(
            "1:cpu:/seen/from/outside\n",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2,
            id="v1-container-that-sees-its-group-as-the-root",
        ),
        pytest.param(
            "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4, id="v1-without-a-quota"
        ),
        pytest.param("nonsense\n", {"cpu.max": "100000 100000"}, 4, id="a-line-of-another-form-is-passed-over"),
    ],
)
def test_cores_are_the_lesser_of_affinity_and_quota(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    assert cores_with(tmp_path, groups, files) == cores


def test_this_machine_has_at_least_one_core() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
