from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep import cores
from lockstep.cores import openmp_threads_are_named, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_quota_of_cgroup_v2_counts_wherever_it_stands(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
        "sys/fs/cgroup/slice/cpu.max": "250000 100000\n",
    }
    assert cores.cgroup_cores(write(tmp_path, files)) == 2.5


def test_a_quota_of_cgroup_v1_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert cores.cgroup_cores(write(tmp_path, files)) == 3.0


def test_inside_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/outside/of/here\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
    }
    assert cores.cgroup_cores(write(tmp_path, files)) == 4.0


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/\n"}], ids=["no cgroup", "no quota"])
def test_without_a_quota_all_cores_count(tmp_path: Path, files: dict[str, str]) -> None:
    assert cores.cgroup_cores(write(tmp_path, files)) == float("inf")


@pytest.mark.parametrize(("quota", "expected"), [(float("inf"), 3), (2.9, 2), (0.5, 1)])
def test_usable_cores_are_whole_and_at_least_one(monkeypatch: pytest.MonkeyPatch, quota: float, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    monkeypatch.setattr(cores, "cgroup_cores", lambda _: quota)
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("value", "is_named"),
    [("3", True), (" 4 , 2", True), ("", False), ("0", False), ("-3", False), ("banana", False), ("1.5", False)],
)
def test_openmp_takes_positive_numbers_alone(value: str, is_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any other value it says that it is invalid: workers then have their share, as without one."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert openmp_threads_are_named() is is_named
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert not openmp_threads_are_named()
