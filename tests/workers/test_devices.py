from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.cores import usable_cores
from lockstep.errors import InputError
from lockstep.workers import devices
from lockstep.workers.devices import choose_device, describe_machine, generators


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
    (tmp_path / "cpuinfo").write_text("model name\t: Good CPU\n" * 2)
    assert devices._cpu_name(tmp_path / "cpuinfo") == "Good CPU"
    assert devices._cpu_name(tmp_path / "missing")
