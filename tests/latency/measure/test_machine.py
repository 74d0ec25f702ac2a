import getpass
import json
import mmap
import os
import platform
import time
from pathlib import Path

import pytest

from latency.measure import machine
from latency.measure.machine import (
    FLAGS_OF_INTEREST,
    EnergyCounter,
    busy_core_seconds,
    energy_counters,
    free_memory_bytes,
    joules_between,
    last_level_cache_bytes,
    machine_facts,
    resident_bytes,
)
from serve.bundle.cpu import HIDDEN_VARIABLE

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


def test_machine_facts_explain_a_number_and_name_no_host_user_or_path() -> None:
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert "onnxruntime" in facts["versions"]
    told = json.dumps(facts)
    assert platform.node() not in told.split()
    assert f'"{getpass.getuser()}"' not in told
    assert str(Path.home()) not in told


def test_machine_facts_tell_what_is_hidden_from_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels that were timed use it all the same.
    told = machine_facts()["flags"]
    monkeypatch.setenv(HIDDEN_VARIABLE, ",".join(FLAGS_OF_INTEREST))
    assert machine_facts()["flags"] == told


def test_machine_facts_leave_out_what_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_text", lambda file: "")  # there is no /proc
    monkeypatch.setattr(machine.os, "sysconf_names", {})
    monkeypatch.setattr(machine, "LIBRARIES", ("numpy", "a-library-that-is-not-there"))
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["memory_gib"] == 0
    assert list(facts["versions"]) == ["numpy"]
    assert busy_core_seconds() is None


@pytest.mark.skipif(busy_core_seconds() is None, reason="this system does not tell how busy its cores are")
def test_busy_core_seconds_grow_with_work() -> None:
    before_s = busy_core_seconds() or 0.0
    began_s = time.process_time()
    while time.process_time() - began_s < 0.2:
        pass
    assert (busy_core_seconds() or 0.0) - before_s >= 0.15
