from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.doctor import machine
from lockstep.doctor.check_result import CheckResult, results_of
from lockstep.doctor.machine import machine_checks


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def look(name: str, root: Path = Path("/")) -> list[CheckResult]:
    return list(results_of({name: machine_checks(root)[name]}))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_all_checks_find_something_here_and_none_of_them_ends_the_others() -> None:
    found = list(results_of(machine_checks()))
    assert {each.checked for each in found} >= {"cores", "threads", "open files", "allocator", "clock"}
    assert all(each.mend for each in found if each.verdict != "OK")


def test_a_system_that_shows_nothing_is_survived(tmp_path: Path) -> None:
    found = {each.checked: each for each in results_of(machine_checks(tmp_path))}
    assert found["load"].verdict == "warn"
    assert "No such file" in found["load"].found
    assert found["cores"].numbers == {"usable": 4, "of_the_machine": 8}
    assert found["/dev/shm"].found.startswith("there is none")


def test_a_quota_of_half_cores_and_one_that_stops_the_processes(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/job/cpu.stat": "usage_usec 7\nnr_periods 200\nnr_throttled 50\n",
    }
    cores, quota = look("cores", write(tmp_path, files))
    assert (cores.found, cores.verdict) == ("4 usable of 8, 2.5 by the quota of its control group", "warn")
    assert cores.mend.startswith("give whole cores (3)")
    assert (quota.verdict, quota.numbers) == ("warn", {"throttled_share": 0.25})


@pytest.mark.parametrize(("load", "verdict"), [("0.50", "OK"), ("7.25", "warn")])
def test_others_that_compute_are_seen(tmp_path: Path, load: str, verdict: str) -> None:
    [found] = look("load", write(tmp_path, {"proc/loadavg": f"{load} 1.00 1.00 2/300 7\n"}))
    assert (found.verdict, found.numbers) == (verdict, {"load": float(load)})


@pytest.mark.parametrize(
    ("named", "verdict", "threads"), [(None, "OK", 4), ("2", "OK", 2), ("64", "warn", 64), ("x", "OK", 4)]
)
def test_threads_that_openmp_is_told(
    monkeypatch: pytest.MonkeyPatch, named: str | None, verdict: str, threads: int
) -> None:
    if named:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    [found] = look("threads")
    assert (found.verdict, found.numbers) == (verdict, {"threads_of_one_worker": threads})


@pytest.mark.parametrize(
    ("limits", "verdict", "mend"),
    [
        ((1 << 20, 1 << 20), "OK", ""),
        ((256, 1 << 20), "warn", "ulimit -n 65536"),
        ((256, 256), "warn", "--ulimit nofile=65536 of a container: a new limit"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "OK", ""),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], verdict: str, mend: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    [found] = look("open files")
    assert (found.verdict, found.mend) == (verdict, mend)


def test_processes_are_limited_by_the_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert look("processes", tmp_path)[0].found == "as many as are asked for"
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/pids.max": "100\n",
        "sys/fs/cgroup/pids.current": "90\n",
    }
    [found] = look("processes", write(tmp_path, files))
    assert (found.verdict, found.numbers["left"]) == ("warn", 10)


def test_a_limit_of_memory_or_of_files_is_named_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: (4 * 10**9, -1), resource.RLIMIT_FSIZE: (-1, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    [found] = look("limits")
    assert (found.found, found.verdict) == ("memory: at most 4.0 GB", "warn")
    assert found.mend.startswith("ulimit -v unlimited")


def test_a_small_dev_shm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts = SimpleNamespace(f_blocks=16384, f_bavail=16384, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)
    [found] = look("/dev/shm", tmp_path)
    assert (found.verdict, found.numbers["free_bytes"]) == ("warn", 16384 * 4096)
    assert "--shm-size=1g" in found.mend


def test_the_allocator_that_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "128")
    [found] = look("allocator")
    assert (found.verdict, found.mend) == ("warn", "unset MALLOC_TRIM_THRESHOLD_, if nothing else needs them")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert look("allocator") == [CheckResult("allocator", "LD_PRELOAD=libjemalloc.so.2")]
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("", ""))
    assert look("allocator")[0].verdict == "warn"


@pytest.mark.parametrize(
    ("variables", "is_alone", "verdict", "said"),
    [
        ({}, True, "OK", "GOMP_SPINCOUNT=10000 KMP_BLOCKTIME=1, as nothing else computes here"),
        ({}, False, "OK", "GOMP_SPINCOUNT=1000 KMP_BLOCKTIME=1, as something else computes here"),
        ({"OMP_WAIT_POLICY": "Active"}, True, "warn", "OMP_WAIT_POLICY=Active, of the environment"),
        ({"OMP_WAIT_POLICY": "passive"}, True, "OK", "OMP_WAIT_POLICY=passive, of the environment"),
    ],
)
def test_how_idle_threads_wait(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_alone: bool, verdict: str, said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "is_alone_here", lambda: is_alone)
    [found] = look("OpenMP waits")
    assert (found.verdict, found.found) == (verdict, said)


def test_a_clock_that_was_never_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    [found] = look("clock", write(tmp_path, {source: "hpet\n"}))
    assert (found.verdict, found.mend[:13]) == ("warn", "set the clock")
    assert "source hpet" in found.found
    assert found.numbers["look_ns"] > 0
