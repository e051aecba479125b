from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep import cores
from lockstep.cores import usable_cores
from lockstep.errors import InputError
from lockstep.workers import devices
from lockstep.workers.devices import choose_device, describe_machine, generators


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
    assert cores._cgroup_cores(write(tmp_path, files)) == 2.5


def test_a_quota_of_cgroup_v1_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert cores._cgroup_cores(write(tmp_path, files)) == 3.0


def test_inside_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/outside/of/here\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
    }
    assert cores._cgroup_cores(write(tmp_path, files)) == 4.0


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/\n"}], ids=["no cgroup", "no quota"])
def test_without_a_quota_all_cores_count(tmp_path: Path, files: dict[str, str]) -> None:
    assert cores._cgroup_cores(write(tmp_path, files)) == float("inf")


@pytest.mark.parametrize(("quota", "expected"), [(float("inf"), 3), (2.9, 2), (0.5, 1)])
def test_usable_cores_are_whole_and_at_least_one(monkeypatch: pytest.MonkeyPatch, quota: float, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    monkeypatch.setattr(cores, "_cgroup_cores", lambda _: quota)
    assert usable_cores() == expected


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there are two; returns the indices that are made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Accelerator X")
    return current


def test_each_worker_gets_the_accelerator_of_its_local_rank(two_accelerators: list[int]) -> None:
    assert choose_device(None, local_rank=1, num_local_workers=2) == torch.device("cuda", 1)
    assert two_accelerators == [1]


def test_the_cpu_can_be_forced(two_accelerators: list[int]) -> None:
    assert choose_device("cpu", local_rank=1, num_local_workers=8) == torch.device("cpu")
    assert two_accelerators == []


def test_fewer_devices_than_workers_is_refused(two_accelerators: list[int]) -> None:
    with pytest.raises(InputError) as caught:
        choose_device(None, local_rank=0, num_local_workers=3)
    assert caught.value.what == "There are fewer devices than workers on this host."
    assert caught.value.given == "3 workers and 2 devices (cuda)"
    assert "at most 2 workers" in caught.value.hint


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert devices.num_accelerators() == 0
    assert choose_device(None, local_rank=1, num_local_workers=2) == torch.device("cpu")


def test_other_devices_are_not_a_choice() -> None:
    with pytest.raises(InputError, match="'cuda:1' is not a device to choose"):
        choose_device("cuda:1", local_rank=0, num_local_workers=1)


def test_the_generators_of_the_cpu() -> None:
    assert generators(torch.device("cpu")) == [torch.default_generator]


def test_a_device_whose_stream_cannot_be_kept_is_refused() -> None:
    with pytest.raises(InputError, match="The random stream of mps devices cannot be set and put back"):
        generators(torch.device("mps"))


def test_the_machine_in_one_line(two_accelerators: list[int], tmp_path: Path) -> None:
    line = describe_machine()
    assert line.startswith(f"{usable_cores()} cores of ")
    assert line.endswith(", 2 x Accelerator X")
    assert devices._cpu_name(write(tmp_path, {"cpuinfo": "model name\t: Good CPU\n" * 2}) / "cpuinfo") == "Good CPU"
    assert devices._cpu_name(tmp_path / "missing")
