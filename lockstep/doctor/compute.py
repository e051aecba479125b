"""What computes here, as torch sees it: its build, the devices, the memory, the decoder of JPEGs, checksums."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from lockstep.cores import usable_cores
from lockstep.doctor.check_result import Check, CheckResult, judged
from lockstep.images.decode import Decoding
from lockstep.images.jpeg import LIBRARIES, TURBO
from lockstep.records.tfrecord import masked_crc32c
from lockstep.training.memory import usable_bytes
from lockstep.workers.devices import (
    describe_accelerator,
    describe_cpu,
    describe_machine,
    num_accelerators,
    unusable_gpu,
    unused_kind,
)

_LEAST_BYTES, _BYTES_A_WORKER = 5e8, 1e9
"""What a worker of a small net takes with torch in it, and what it should have."""
_TAKEN = 0.1
"""Share of a GPU's memory that others hold worth a warning."""
_SIDE, _SECONDS = 256, 0.1
_SLOW_CRC = 2e8
_CPU = torch.device("cpu")


def compute_checks() -> dict[str, Check]:
    """Return the checks for which torch has to load, by name."""
    return {"torch build": _build, "devices": _devices, "memory": _memory, "JPEG": _jpeg, "checksums": _checksums}


def _build() -> Iterator[CheckResult]:
    cuda, hip = torch.version.cuda, torch.version.hip
    made_for = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "the CPU alone"
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available", bool)()]
    found = f"made for {made_for}; {describe_cpu()}; between workers {' and '.join(backends) or 'nothing'}"
    if "gloo" not in backends:
        yield CheckResult(
            "torch build", found, "warn", "a torch with gloo: without it workers on several hosts do not meet"
        )
    else:
        is_plain = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        mend = "a processor with AVX2, or unset ATEN_CPU_CAPABILITY: without vector instructions steps are slow"
        yield judged("torch build", found, is_bad=is_plain, mend=mend)


def _devices() -> Iterator[CheckResult]:
    count = num_accelerators()
    numbers = {"accelerators": count, "cores": usable_cores()}
    if why := unusable_gpu():
        mend = "a torch that fits the driver (https://pytorch.org/get-started), or a container that is given the GPU"
        yield CheckResult("devices", f"there is a GPU that torch cannot use: {why}", "warn", mend, numbers)
    elif kind := unused_kind():
        found = f"workers compute on the CPU: Lockstep does not use devices of the kind {kind}"
        yield CheckResult("devices", found, "warn", "a CUDA device, where the CPU is too slow", numbers)
    yield CheckResult("devices", describe_machine(), numbers=numbers)
    for index in range(count):
        current = torch.accelerator.current_accelerator()
        assert current is not None, "there are some"
        yield from _device(torch.device(current.type, index))


def _device(device: torch.device) -> Iterator[CheckResult]:
    """Compute a little on an accelerator, and look at what others leave of its memory."""
    about = ", ".join(f"{name} {value}" for name, value in describe_accelerator(device).items())
    try:
        free, total = torch.get_device_module(device).mem_get_info(device)
        wrong = _wrong_products(device)
    except RuntimeError as error:
        mend = "see what the driver says (nvidia-smi, dmesg); start anew what holds the device, or leave it out"
        yield CheckResult(f"device {device}", f"{about}: {str(error).partition(chr(10))[0]}", "fails", mend)
        return
    numbers = {"free_bytes": free, "bytes": total}
    found = f"{about}; {free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    if wrong:
        mend = "take it out of service: it computes wrong numbers"
        yield CheckResult(
            f"device {device}", f"{found}; {wrong} of {_SIDE**2} products are wrong", "fails", mend, numbers
        )
    else:
        mend = "end what else uses it: nvidia-smi names the processes"
        yield judged(f"device {device}", found, numbers, is_bad=free < (1 - _TAKEN) * total, mend=mend)


def _wrong_products(device: torch.device) -> int:
    """Multiply matrices of small whole numbers, exact in any order, there and on the CPU; count what differs."""
    left, right = torch.randint(-8, 9, (2, _SIDE, _SIDE), generator=torch.Generator().manual_seed(0)).float()
    return int((left.to(device) @ right.to(device)).cpu().ne(left @ right).sum())


def _memory() -> Iterator[CheckResult]:
    usable, workers = usable_bytes(_CPU), num_accelerators() or usable_cores()
    needed = _BYTES_A_WORKER * workers
    found = f"{usable / 1e9:.1f} GB for {workers} {'worker and its' if workers == 1 else 'workers and their'} loaders"
    numbers = {"usable_bytes": usable, "workers": workers}
    if usable < _LEAST_BYTES:
        mend = "more memory, or end what uses it: torch alone takes half a GB"
        yield CheckResult("memory", found, "fails", mend, numbers)
    else:
        mend = f"more memory, or fewer --workers: {needed / 1e9:.0f} GB are safe"
        yield judged("memory", found, numbers, is_bad=usable < needed, mend=mend)


def _jpeg() -> Iterator[CheckResult]:
    decoding, data = Decoding(), _photo()
    rate = _rate(lambda: decoding.decode(data, "a photo"))
    problems = "; ".join(f"{name}: {load().problem}" for name, load in LIBRARIES.items() if load().problem)
    yield judged(
        "JPEG",
        f"decoded by {decoding.chosen}, {rate:.0f} photos of 500 x 375 a second on a core",
        {"images_per_second": rate},
        is_bad=TURBO not in decoding.chosen,
        mend=f"pip install simplejpeg, or a system library of libjpeg-turbo 3.0 ({problems})",
    )


def _photo() -> bytes:
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (47, 63, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375)).save(file, "JPEG", quality=90)
    return file.getvalue()


def _checksums() -> Iterator[CheckResult]:
    data = bytes(1 << 20)
    rate = len(data) * _rate(lambda: masked_crc32c(data))
    yield judged(
        "checksums",
        f"{rate / 1e9:.2f} GB/s of records (CRC-32C)",
        {"bytes_per_second": rate},
        is_bad=rate < _SLOW_CRC,
        mend="pip install --force-reinstall google-crc32c: its compiled part does not load",
    )


def _rate(call: Callable[[], object]) -> float:
    """Return how often a function can be called in a second; the first call is not counted."""
    call()
    began, count, passed = time.perf_counter(), 0, 0.0
    while passed < _SECONDS:
        call()
        count, passed = count + 1, time.perf_counter() - began
    return count / passed
