"""Devices of this machine, and which one a worker uses. The only module that knows a kind of accelerator."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from lockstep.cores import usable_cores
from lockstep.errors import InputError


def num_accelerators() -> int:
    """Accelerators that torch can use here; 0 where there is none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def describe_machine() -> str:
    """Describe the machine in one line, for logs and saved choices."""
    cores = f"{usable_cores()} cores of {_cpu_name(Path('/proc/cpuinfo'))}"
    names = [_accelerator_name(index) for index in range(num_accelerators())]
    return ", ".join([cores, *(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))])


def choose_device(wish: str | None, local_rank: int, num_local_workers: int) -> torch.device:
    """Choose a worker's device and make it current: the accelerator of its local rank, else the CPU."""
    if wish not in (None, "cpu"):
        raise InputError(
            f"{wish!r} is not a device to choose.",
            given=f"device={wish!r}",
            expected="'cpu', or nothing for one accelerator a worker where there are any",
            hint="leave the device out; to use certain accelerators, make only those visible to the process",
        )
    accelerator = torch.accelerator.current_accelerator() if wish is None and num_accelerators() else None
    if accelerator is None:
        return torch.device("cpu")
    if num_accelerators() < num_local_workers:
        raise InputError(
            "There are fewer devices than workers on this host.",
            given=f"{num_local_workers} workers and {num_accelerators()} devices ({accelerator.type})",
            expected="a device for each worker",
            hint=f"start at most {num_accelerators()} workers here, or choose the device 'cpu'",
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators that a model on this device may draw from: the CPU's, and the device's own."""
    if device.type == "cpu":
        return [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]
    raise InputError(
        f"The random stream of {device.type} devices cannot be set and put back.",
        given=f"device {device}",
        expected="the CPU or a CUDA device",
        hint="choose the device 'cpu'",
    )


def _accelerator_name(index: int) -> str:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "only called for accelerators that were counted"
    return torch.cuda.get_device_name(index) if accelerator.type == "cuda" else accelerator.type


def _cpu_name(cpuinfo: Path) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
