"""Devices of this machine, and which one a worker uses. The only module that knows a kind of accelerator."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.cores import usable_cores
from lockstep.errors import InputError
from lockstep.listing import shorten


def num_accelerators() -> int:
    """Accelerators that workers can use here: CUDA devices, ROCm's among them; 0 where there is none."""
    return torch.accelerator.device_count() if _kind() == "cuda" else 0


def unused_kind() -> str | None:
    """The kind of the accelerators here that no worker uses, such as "mps"; None where there are none.

    Not every part of a step runs on them: Metal has no float64, in which losses are summed, and for none but CUDA
    devices are there fused updates, a transport between workers, and random streams that are set and put back.
    """
    return None if _kind() == "cuda" else _kind()


def unusable_gpu(modules: Path = Path("/sys/module")) -> str | None:
    """Why torch sees no GPU though there is a driver of NVIDIA's; None where it sees one, or was told to see none."""
    driver = _driver_version(modules, ["nvidia"])
    if num_accelerators() or driver is None or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"the driver ({driver}) is too old for CUDA {torch.version.cuda}, or this container is not given the GPU"


def _kind() -> str | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def describe_machine() -> str:
    """Describe the machine in one line, for logs and saved choices."""
    cores = f"{usable_cores()} cores of {_cpu_name(Path('/proc/cpuinfo'))}"
    names = [torch.cuda.get_device_name(index) for index in range(num_accelerators())]
    return ", ".join([cores, *(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))])


def choose_device(
    wish: str | None, local_rank: int, num_local_workers: int, workers_per_device: int = 1, num_serving: int = 0
) -> torch.device:
    """Choose a worker's device and make it current: the accelerator of its local rank, else the CPU.

    The first `num_serving` workers of a host compute no towers, and need no device of their own: they share those that
    are dealt among the others. A single accelerator that is visible is its own, as Slurm gives one to each task;
    `check_devices` tells whether others see the same one.
    """
    if wish not in (None, "cpu"):
        raise InputError(
            f"{wish!r} is not a device to choose.",
            given=f"device={wish!r}",
            expected="'cpu', or nothing for one accelerator a worker where there are any",
            hint="leave the device out; to use certain accelerators, make only those visible to the process",
        )
    count = num_accelerators()
    if wish == "cpu" or not count:
        return torch.device("cpu")
    num_computing = num_local_workers - num_serving
    if count > 1 and num_computing > (most := count * workers_per_device):
        needed = -(-num_computing // count)
        raise InputError(
            "There are fewer devices than workers on this host.",
            given=f"{num_local_workers} workers and {count} devices",
            expected=_sharing(workers_per_device),
            hint=f"start at most {most + num_serving} workers here; or let several share a device "
            f"(--workers-per-device {needed}, or ls.join(workers_per_device={needed})), or choose the device 'cpu'",
        )
    device = torch.device("cuda", max(0, local_rank - num_serving) % count)
    torch.accelerator.set_device_index(device.index)
    return device


def identity(device: torch.device) -> str:
    """A name that no other device has, on any host: the UUID of an accelerator; "cpu" for every CPU."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def check_devices(identities: Sequence[str], workers_per_device: int = 1, *, chief_serves: bool = False) -> bool:
    """Check the devices that all workers have chosen, by rank; returns whether some share one.

    A chief that serves may be one more on a device.

    Raises:
        InputError: more workers share an accelerator than may, or some have one and others the CPU.
    """
    of_device: dict[str, list[int]] = {}
    for rank, name in enumerate(identities):
        of_device.setdefault(name, []).append(rank)
    on_cpu = of_device.pop("cpu", [])
    if on_cpu and of_device:
        raise InputError(
            "Some workers have an accelerator, and others have none.",
            given=f"{_workers(on_cpu)} on the CPU, of {len(identities)} workers",
            expected="all workers on accelerators, or all of them on CPUs",
            hint="make an accelerator visible to each of them, or choose the device 'cpu' (--device cpu)",
        )
    for name, ranks in of_device.items():
        if len(ranks) - (chief_serves and 0 in ranks) > workers_per_device:
            raise InputError(
                "Several workers have the same device.",
                given=f"{_workers(ranks)}, each on the device with the UUID {name}",
                expected=_sharing(workers_per_device),
                hint="start fewer workers, or make another device visible to each (Slurm's --gpus-per-task=1); to "
                f"share it: --workers-per-device {len(ranks)}, or ls.join(workers_per_device={len(ranks)})",
            )
    return any(len(ranks) > 1 for ranks in of_device.values())


def _sharing(workers_per_device: int) -> str:
    return f"at most {workers_per_device} workers on a device" if workers_per_device > 1 else "a device for each worker"


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {shorten(list(map(str, ranks)), 8)}"


def describe_cpu() -> str:
    """The kind of processor, and the instruction set that torch uses on it."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def describe_accelerator(device: torch.device) -> dict[str, str]:
    """The name of an accelerator, and the versions of the software that it runs; empty for the CPU."""
    if device.type == "cpu":
        return {}
    hip = torch.version.hip
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _driver_version(Path("/sys/module"), ["nvidia", "amdgpu"]) or "unknown",
        "rocm" if hip else "cuda": str(hip or torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)) or "none",
    }


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


def _driver_version(modules: Path, names: Sequence[str]) -> str | None:
    """The version of the first of these kernel modules that Linux has loaded; None where it has none, or tells none."""
    files = [modules / name / "version" for name in names]
    return next((file.read_text().strip() for file in files if file.exists()), None)


def _cpu_name(cpuinfo: Path) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
