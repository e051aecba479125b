from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.cores import usable_cores
from lockstep.errors import InputError
from lockstep.workers import devices
from lockstep.workers.devices import (
    check_devices,
    choose_device,
    describe_accelerator,
    describe_machine,
    generators,
    identity,
)


def pretend(monkeypatch: pytest.MonkeyPatch, count: int, kind: str = "cuda") -> list[int]:
    """Pretend that there are accelerators; returns the indices that are made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Accelerator X")
    return current


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return pretend(monkeypatch, 2)


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
    assert caught.value.given == "3 workers and 2 devices"
    assert "at most 2 workers" in caught.value.hint


def test_workers_that_share_are_spread_over_the_devices(two_accelerators: list[int]) -> None:
    chosen = [choose_device(None, rank, num_local_workers=4, workers_per_device=2).index for rank in range(4)]
    assert chosen == two_accelerators == [0, 1, 0, 1]
    with pytest.raises(InputError, match="fewer devices than workers") as caught:
        choose_device(None, local_rank=0, num_local_workers=5, workers_per_device=2)
    assert caught.value.expected == "at most 2 workers on a device"
    assert "at most 4 workers" in caught.value.hint
    assert "--workers-per-device 3" in caught.value.hint


def test_a_chief_that_serves_shares_the_device_of_the_first_worker_that_computes(two_accelerators: list[int]) -> None:
    chosen = [choose_device(None, rank, num_local_workers=3, num_serving=1).index for rank in range(3)]
    assert chosen == two_accelerators == [0, 0, 1]
    with pytest.raises(InputError, match="fewer devices than workers") as caught:
        choose_device(None, local_rank=0, num_local_workers=4, num_serving=1)
    assert "at most 3 workers" in caught.value.hint


def test_the_only_device_that_slurm_shows_a_task_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend(monkeypatch, 1)
    assert choose_device(None, local_rank=3, num_local_workers=8) == torch.device("cuda", 0)
    assert current == [0]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_accelerators_on_which_a_step_cannot_run_are_left_alone(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    current = pretend(monkeypatch, 1, kind)
    assert choose_device(None, local_rank=0, num_local_workers=1) == torch.device("cpu")
    assert (devices.num_accelerators(), devices.unused_kind(), current) == (0, kind, [])
    assert "Accelerator" not in describe_machine()


def test_cuda_devices_are_used(two_accelerators: list[int]) -> None:
    assert (devices.num_accelerators(), devices.unused_kind()) == (2, None)


class TestCheckDevices:
    def test_devices_with_other_uuids_are_apart(self) -> None:
        assert not check_devices(["GPU-a", "GPU-b", "GPU-c"])
        assert not check_devices(["cpu", "cpu"])

    def test_the_same_device_twice_is_refused(self) -> None:
        with pytest.raises(InputError) as caught:
            check_devices(["GPU-a", "GPU-b", "GPU-a"])
        assert str(caught.value) == (
            "Several workers have the same device.\n"
            "  given:    workers 0, 2, each on the device with the UUID GPU-a\n"
            "  expected: a device for each worker\n"
            "  hint:     start fewer workers, or make another device visible to each (Slurm's --gpus-per-task=1); "
            "to share it: --workers-per-device 2, or ls.join(workers_per_device=2)"
        )

    def test_a_device_is_shared_where_that_was_asked_for(self) -> None:
        assert check_devices(["GPU-a", "GPU-a", "GPU-b"], workers_per_device=2)
        assert not check_devices(["GPU-a", "GPU-b"], workers_per_device=2)
        with pytest.raises(InputError, match="at most 2 workers on a device"):
            check_devices(["GPU-a", "GPU-a", "GPU-a"], workers_per_device=2)

    def test_a_chief_that_serves_may_be_one_more_on_a_device(self) -> None:
        assert check_devices(["GPU-a", "GPU-a", "GPU-b"], chief_serves=True)
        assert not check_devices(["GPU-a", "GPU-b"], chief_serves=True)
        for others in (["GPU-b", "GPU-b"], ["GPU-a", "GPU-a"]):
            with pytest.raises(InputError, match="Several workers have the same device"):
                check_devices(["GPU-a", *others], chief_serves=True)

    def test_a_worker_without_one_among_others_with_one_is_named(self) -> None:
        with pytest.raises(InputError) as caught:
            check_devices(["GPU-a", "cpu", "GPU-b"], workers_per_device=2)
        assert caught.value.what == "Some workers have an accelerator, and others have none."
        assert caught.value.given == "worker 1 on the CPU, of 3 workers"


def test_an_accelerator_is_known_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    assert identity(torch.device("cuda", 1)) == "GPU-1"
    assert identity(torch.device("cpu")) == "cpu"


def test_an_accelerator_is_described_with_its_software(two_accelerators: list[int]) -> None:
    assert describe_accelerator(torch.device("cpu")) == {}
    described = describe_accelerator(torch.device("cuda", 0))
    assert list(described) == ["gpu", "driver", "cuda", "cudnn", "nccl"]
    assert described["gpu"] == "Accelerator X"


def test_the_driver_is_the_version_of_its_kernel_module(tmp_path: Path) -> None:
    assert devices._driver_version(tmp_path, ["nvidia"]) is None
    load_driver(tmp_path)
    assert devices._driver_version(tmp_path, ["amdgpu", "nvidia"]) == "570.86.15"


def load_driver(modules: Path) -> None:
    (modules / "nvidia").mkdir()
    (modules / "nvidia" / "version").write_text("570.86.15\n")


def test_a_gpu_that_torch_does_not_see_is_told_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert devices.unusable_gpu(tmp_path) is None
    load_driver(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.unusable_gpu(tmp_path) == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert str(devices.unusable_gpu(tmp_path)).startswith("the driver (570.86.15) is too old for CUDA 13.0, or ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.unusable_gpu(tmp_path) is None


def test_a_gpu_that_torch_sees_is_not_missed(two_accelerators: list[int], tmp_path: Path) -> None:
    load_driver(tmp_path)
    assert devices.unusable_gpu(tmp_path) is None


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
