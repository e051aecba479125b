from __future__ import annotations

import pytest
import torch

from lockstep.doctor import compute
from lockstep.doctor.check_result import CheckResult, results_of
from lockstep.doctor.compute import compute_checks
from lockstep.images import decode
from lockstep.images.jpeg import TURBO


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_SECONDS", 0.01)


def look(name: str) -> list[CheckResult]:
    return list(results_of({name: compute_checks()[name]}))


def test_every_check_finds_something_here() -> None:
    found = {each.checked: each for each in results_of(compute_checks())}
    assert set(found) == {"torch build", "devices", "memory", "JPEG", "checksums"}
    assert found["devices"].numbers["accelerators"] == 0
    assert found["memory"].numbers["usable_bytes"] > 0
    assert found["JPEG"].numbers["images_per_second"] > 0
    assert found["checksums"].numbers["bytes_per_second"] > 0


def test_a_build_without_vector_instructions_and_one_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    [found] = look("torch build")
    assert (found.verdict, "ATEN_CPU_CAPABILITY" in found.mend) == ("warn", True)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert look("torch build")[0].mend.startswith("a torch with gloo")


def test_a_gpu_that_torch_cannot_use_and_one_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "unusable_gpu", lambda: "torch 2.13.0+cpu is built without CUDA")
    found, machine = look("devices")
    assert (found.verdict, machine.verdict) == ("warn", "OK")
    assert found.found.endswith("torch 2.13.0+cpu is built without CUDA")
    monkeypatch.setattr(compute, "unusable_gpu", lambda: None)
    monkeypatch.setattr(compute, "unused_kind", lambda: "mps")
    assert look("devices")[0].found.endswith("of the kind mps")


@pytest.mark.parametrize(
    ("free", "wrong", "verdict", "said"),
    [
        (75, 0, "OK", "75.0 GB free of 80.0 GB"),
        (40, 0, "warn", "nvidia-smi names the processes"),
        (75, 3, "fails", "3 of 65536 products are wrong"),
    ],
)
def test_accelerators_are_tried(
    monkeypatch: pytest.MonkeyPatch, free: int, wrong: int, verdict: str, said: str
) -> None:
    class Module:
        @staticmethod
        def mem_get_info(_: torch.device) -> tuple[int, int]:
            return free * 10**9, 80 * 10**9

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    monkeypatch.setattr(compute, "describe_accelerator", lambda _: {"gpu": "GPU X", "driver": "1.2"})
    monkeypatch.setattr(compute, "_wrong_products", lambda _: wrong)
    [found] = compute._device(torch.device("meta", 0))
    assert found.verdict == verdict
    assert found.found.startswith("gpu GPU X, driver 1.2; ")
    assert said in f"{found.found} {found.mend}"


def test_an_accelerator_that_does_not_compute_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(torch, "get_device_module", refuse)
    monkeypatch.setattr(compute, "describe_accelerator", lambda _: {"gpu": "GPU X"})
    [found] = compute._device(torch.device("meta", 0))
    assert (found.verdict, found.found) == ("fails", "gpu GPU X: CUDA error: an illegal memory access was encountered")


def test_products_are_right_on_the_cpu_and_a_wrong_one_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute._wrong_products(torch.device("cpu")) == 0
    to = torch.Tensor.to

    def damaged(tensor: torch.Tensor, *given: object) -> torch.Tensor:
        copy = to(tensor, *given).clone()  # type: ignore[call-overload]
        copy[0, 0] += 1
        return copy

    monkeypatch.setattr(torch.Tensor, "to", damaged)
    assert compute._wrong_products(torch.device("cpu")) > 0


@pytest.mark.parametrize(("usable", "verdict"), [(10**8, "fails"), (1.5 * 10**9, "warn"), (64 * 10**9, "OK")])
def test_memory_for_the_workers(monkeypatch: pytest.MonkeyPatch, usable: float, verdict: str) -> None:
    monkeypatch.setattr(compute, "usable_bytes", lambda _: usable)
    monkeypatch.setattr(compute, "usable_cores", lambda: 2)
    [found] = look("memory")
    assert (found.verdict, found.numbers) == (verdict, {"usable_bytes": usable, "workers": 2})


def test_a_slow_decoder_is_told_with_what_the_others_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = look("JPEG")
    assert (found.verdict == "OK") == (TURBO in found.found)
    monkeypatch.setattr(decode.Decoding, "chosen", "Pillow 13")
    [found] = look("JPEG")
    assert (found.verdict, "torchcodec: " in found.mend) == ("warn", True)


def test_slow_checksums_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_SLOW_CRC", 1e15)
    [found] = look("checksums")
    assert (found.verdict, "google-crc32c" in found.mend) == ("warn", True)
