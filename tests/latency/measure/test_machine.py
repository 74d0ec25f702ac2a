import mmap
import os
from pathlib import Path

import pytest

from latency.measure import machine
from latency.measure.machine import (
    EnergyCounter,
    energy_counters,
    free_memory_bytes,
    joules_between,
    last_level_cache_bytes,
    resident_bytes,
)

ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc here")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@ON_LINUX
def test_memory_that_was_given_back_stays_in_the_peak_and_leaves_the_steady_figure() -> None:
    with mmap.mmap(-1, 64 * 2**20) as held:  # past malloc, which may keep what is given back to it
        held.write(b"1" * len(held))
        during = resident_bytes()
    after = resident_bytes()
    assert during
    assert after
    assert during.steady_bytes
    assert after.steady_bytes
    assert during.steady_bytes > 64 * 2**20
    assert after.steady_bytes < during.steady_bytes - 32 * 2**20
    assert after.peak_bytes > after.steady_bytes + 32 * 2**20


def test_memory_is_read_in_bytes_and_is_none_where_the_system_is_silent(tmp_path: Path) -> None:
    root = write(tmp_path, {"status": "Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB"})
    assert resident_bytes(root / "status") == (2000 * 1024, 3000 * 1024)
    if os.uname().sysname == "Linux":
        assert resident_bytes(root / "gone") is None


def test_macos_tells_the_peak_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    found = resident_bytes(tmp_path / "gone")
    assert found
    assert found.steady_bytes is None
    assert found.peak_bytes > 0


def test_free_memory_is_no_more_than_the_container_may_take(tmp_path: Path) -> None:
    root = write(tmp_path, {"meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB", "group/memory.max": "max"})
    assert free_memory_bytes(root / "meminfo", root / "group") == 4000 * 1024
    write(tmp_path, {"group/memory.max": "1000000"})
    assert free_memory_bytes(root / "meminfo", root / "group") == 1_000_000
    write(tmp_path, {"older/memory/memory.limit_in_bytes": "2000000"})
    assert free_memory_bytes(root / "meminfo", root / "older") == 2_000_000
    assert free_memory_bytes(root / "gone", root / "group") is None


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    sizes = {"cpu0/cache/index0/size": "48K", "cpu0/cache/index2/size": "2048K", "cpu0/cache/index3/size": "307200K"}
    assert last_level_cache_bytes(write(tmp_path, sizes)) == 300 * 2**20
    assert last_level_cache_bytes(tmp_path / "gone") is None


def domain(name: str, label: str, energy_uj: str, range_uj: str = "1000000") -> dict[str, str]:
    return {f"{name}/name": label, f"{name}/energy_uj": energy_uj, f"{name}/max_energy_range_uj": range_uj}


def test_energy_is_that_of_the_packages_and_not_of_their_parts_or_the_board(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        domain("intel-rapl:0", "package-0", "400")
        | domain("intel-rapl:0:0", "core", "300")
        | domain("intel-rapl:1", "package-1", "500")
        | domain("intel-rapl:2", "psys", "9000")
        | domain("intel-rapl-mmio:0", "package-0", "400"),
    )
    before = energy_counters(root)
    assert before == {"intel-rapl:0": EnergyCounter(400, 1_000_000), "intel-rapl:1": EnergyCounter(500, 1_000_000)}
    write(root, {"intel-rapl:0/energy_uj": "600400", "intel-rapl:1/energy_uj": "200500"})
    after = energy_counters(root)
    assert after
    assert joules_between(before, after) == pytest.approx(0.8)


def test_a_counter_that_came_round_counts_on() -> None:
    before, after = (
        {"intel-rapl:0": EnergyCounter(900_000, 1_000_000)},
        {"intel-rapl:0": EnergyCounter(50_000, 1_000_000)},
    )
    assert joules_between(before, after) == pytest.approx(0.15)


def test_energy_is_unknown_without_packages_or_where_one_cannot_be_read(tmp_path: Path) -> None:
    assert energy_counters(tmp_path / "gone") is None
    root = write(tmp_path, domain("intel-rapl:0", "package-0", "400") | domain("intel-rapl:1", "package-1", "500"))
    (root / "intel-rapl:1/energy_uj").unlink()
    assert energy_counters(root) is None
