"""A batch that is computed and forgotten before step 1: what it leaves as it was, and what is said without memory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_detector import TinyDetector, make_loader, make_task
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.training.memory import (
    describe_batch,
    forget_peak,
    is_lack_of_memory,
    peak_bytes,
    snapshot_of_lack,
    usable_bytes,
)

TASK = make_task()


def make_state() -> ls.TrainState:
    return ls.TrainState(
        TinyDetector(coupled=True), ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.9)
    )


def contents(state: ls.TrainState) -> list[Any]:
    numbers = {f"{s}/{n}": t.tolist() for s, members in state.sections().items() for n, t in members.items()}
    return [numbers, state.values()]


def batch_of(num_towers: int = 2) -> ls.Batch:
    return next(iter(ls.batches(make_loader(TASK), ls.Towers(num_towers))))


def probe(state: ls.TrainState, losses: Any = TASK.losses, num_towers: int = 2) -> int:
    return ls.probe_memory(
        state, losses, batch_of(num_towers), ls.Towers(num_towers), counts=TASK.counts(state.model), hint="mend it"
    )


def test_nothing_changes() -> None:
    state, loader = make_state(), make_loader(TASK)
    before = contents(state)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert probe(state) > 10_000_000, "the process has more than 10 MB"
    assert contents(state) == before
    assert loader.position == 0
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[1:]  # type: ignore[index]


def trained(*, probed: bool) -> list[Any]:
    state, loader = make_state(), make_loader(TASK)
    if probed:
        probe(state)
    counts = TASK.counts(state.model)
    reports = ls.train_steps(state, TASK.losses, loader, ls.Towers(2), counts=counts, until=ls.Steps(4))
    return [*[each.total for each in reports], *contents(state)]


def test_the_steps_after_it_have_the_bits_of_those_without_it() -> None:
    assert trained(probed=True) == trained(probed=False)


@pytest.mark.process
def test_two_workers_probe_together(run_workers: Callable[..., list[Any]]) -> None:
    alone = trained(probed=False)
    assert run_workers(probed_losses, 2) == [alone[:4]] * 2


def probed_losses() -> list[float]:
    state = make_state()
    counts, exchange = TASK.counts(state.model), ls.AllReduce(exact=True)
    ls.probe_memory(state, TASK.losses, batch_of(), ls.Towers(2), exchange, counts=counts)
    loader = make_loader(TASK)
    steps = ls.train_steps(state, TASK.losses, loader, ls.Towers(2), exchange, counts=counts, until=ls.Steps(4))
    return [each.total for each in steps]


def needs_too_much(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"loss": model.head.weight.new_empty(2**50).sum()}  # type: ignore[union-attr, operator]


def raises_on_accelerator(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")


@pytest.mark.parametrize(
    ("losses", "reason"),
    [(needs_too_much, "can't allocate memory"), (raises_on_accelerator, "Tried to allocate 9 GiB.)")],
)
def test_a_lack_of_memory_is_told_with_what_needs_it(losses: Any, reason: str) -> None:
    state = make_state()
    before = contents(state)
    with pytest.raises(InputError) as caught:
        probe(state, losses)
    error = caught.value
    assert error.what == "The memory is not enough for the largest batch of this run."
    assert str(error.given).startswith("8 examples over 2 towers, image 3 x 24 x 24, up to 2 boxes each (")
    assert reason in str(error.given)
    assert error.hint == "mend it"
    assert contents(state) == before


def test_other_errors_are_not_taken_for_it() -> None:
    def fails(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        probe(make_state(), fails)


@pytest.mark.parametrize(
    ("said", "is_lack"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("CUDA error: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", False),
    ],
)
def test_libraries_say_it_in_their_own_words(said: str, is_lack: bool) -> None:
    assert is_lack_of_memory(RuntimeError(said)) == is_lack


def test_images_of_several_sizes_count_by_their_largest_sides() -> None:
    images = [torch.zeros(3, 8, 20), torch.zeros(3, 16, 10)]
    batch = ls.Batch({"image": images, "name": ["a", "b"]}, position=0, batch_size=2, towers=range(1))
    assert describe_batch(batch, ls.Towers(1)) == "2 examples over 1 tower, image 3 x 16 x 20"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_without_memory_says_for_which_tower_and_what_needs_less(error: Exception) -> None:
    calls = 0

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise error
        return {"square": model(batch["image"]).square().mean()}

    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"image": torch.randn(8, 5, 3)}), batch_size=8)
    with pytest.raises(type(error)) as caught:
        ls.train(state, losses, loader, ls.Towers(4))
    (note,) = caught.value.__notes__
    assert note.startswith(
        "Lockstep: tower 1 of 4 had no memory for its part of 8 examples over 4 towers, image 5 x 3;"
    )
    assert "batch_size, more towers, towers.activation_checkpointing" in note
    assert state.step == 1


def test_another_error_has_no_note() -> None:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        raise RuntimeError("shapes cannot be multiplied")

    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"image": torch.randn(8, 5, 3)}), batch_size=8)
    with pytest.raises(RuntimeError) as caught:
        ls.train(state, losses, loader)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 999 kB\nMemAvailable:    300 kB\n", "proc/self/statm": "9 0 1"}, 300 * 1024),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "5000\n"}, 5000),
        ({"proc/self/cgroup": "4:memory:/job\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n"}, 7000),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "9000\n",
                "sys/fs/cgroup/job/memory.current": "4000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 3000\ninactive_file 1000\n",
            },
            6000,
        ),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "max\n"}, None),
        ({}, None),
    ],
    ids=["available", "cgroup v2", "cgroup v1", "others in the group", "no limit", "another system"],
)
def test_the_memory_of_a_cpu_is_what_its_groups_and_others_leave(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_bytes(torch.device("cpu"), tmp_path) == (physical if expected is None else expected)


def test_the_memory_of_this_machine_is_more_than_this_process_has() -> None:
    assert usable_bytes(torch.device("cpu")) > peak_bytes(torch.device("cpu")) // 2


def test_a_snapshot_is_left_where_an_allocation_fails_in_the_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    observers: list[Callable[..., None]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("all of it"))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    path = tmp_path / "run" / "memory" / "worker-0.pickle"
    with snapshot_of_lack(path, torch.device("cuda", 0)):
        assert calls == [{"stacks": "python", "max_entries": 100_000}]
        assert not path.parent.exists(), "nothing is written without need"
        observers[0](0, 2**30, 2**36, 2**20)
        assert path.read_text() == "all of it"
        path.write_text("the first")
        observers[0](0, 2**30, 2**36, 2**20)
        assert path.read_text() == "the first", "one a minute"
    assert f"what was allocated then is in {path}" in caplog.text
    assert calls[1:] == [{"enabled": None}]
    path.unlink()
    observers[0](0, 2**30, 2**36, 2**20)
    assert not path.exists()
    with snapshot_of_lack(path, torch.device("cpu")):
        assert len(calls) == 2


def test_a_snapshot_that_cannot_be_written_is_told_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    observers: list[Callable[..., None]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: None)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    (tmp_path / "memory").write_text("a file in the way")
    with snapshot_of_lack(tmp_path / "memory" / "worker-0.pickle", torch.device("cuda", 0)):
        observers[0](0, 2**30, 2**36, 2**20)
    assert "torch's snapshot cannot be written: " in caplog.text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system counts from the start of a process")
def test_the_peak_is_counted_anew() -> None:
    device = torch.device("cpu")
    torch.ones(2**26)  # 256 MB, freed
    before = peak_bytes(device)
    forget_peak(device)
    assert peak_bytes(device) < before - 2**27
