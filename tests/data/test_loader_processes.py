from __future__ import annotations

import gc
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_processes import HANG_SECONDS

from lockstep import cores
from lockstep.data import loader_processes, prefetch
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError, WorkerError
from lockstep.randomness import Draws
from lockstep.readers.reader import TorchDataset

pytestmark = pytest.mark.process

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Coded:
    """Example k has to be decoded: into many kinds of tensors, in a tree."""

    cost = "decode"

    def __len__(self) -> int:
        return 20

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        number = torch.from_numpy(indices)
        return {
            "number": number,
            "process": [os.getpid()] * len(indices),
            "image": number.to(torch.uint8)[:, None, None, None]
            .expand(-1, 3, 4, 5)
            .to(memory_format=torch.channels_last),
            "half": number.to(torch.bfloat16),
            "odd": number % 2 == 1,
            "nothing": torch.empty(len(indices), 0),
            "name": [self.example_id(int(index)) for index in indices],
            "boxes": [torch.full((int(index) % 3, 4), float(index)) for index in indices],
            "pair": [(index, {"deep": torch.tensor(index)}) for index in indices.tolist()],
        }

    def example_id(self, index: int) -> str:
        return f"coded {index}"


def batches(reader: Any, num_processes: int = 2, **arguments: Any) -> Any:
    loader = Loader(reader, batch_size=4, order="sequential", num_processes=num_processes, **arguments)
    return loader.batches(range(1), 1)


def open_files() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_tree_of_any_tensors_arrives_as_it_was_read(num_processes: int) -> None:
    here, there = batches(Coded(), 0), batches(Coded(), num_processes)
    for mine, theirs in zip(islice(here, 8), islice(there, 8), strict=True):
        assert set(mine.pop("process")) == {os.getpid()}
        assert os.getpid() not in theirs.pop("process")
        assert_same(dict(mine), dict(theirs))


def test_each_process_reads_its_share() -> None:
    stream = batches(Coded(), 3)
    readers = [batch["process"][0] for batch in islice(stream, 6)]
    assert len(set(readers)) == 3
    assert readers[:3] == readers[3:]


def test_a_batch_stays_as_it_is_while_later_ones_are_read() -> None:
    stream = batches(Coded(), 1)
    first = next(stream)
    first["number"] += 100
    for _ in islice(stream, 5):
        pass
    assert first["number"].tolist() == [100, 101, 102, 103]


def test_evaluation_ends_with_its_processes() -> None:
    loader = Loader(Coded(), batch_size=4, num_processes=2)
    seen = [number for batch in loader.evaluation_batches(6) for number in batch["number"][: batch.valid].tolist()]
    assert seen == list(range(20))
    assert not multiprocessing.active_children()


def test_more_processes_than_batches_do_no_harm() -> None:
    loader = Loader(Coded(), batch_size=4, num_processes=3)
    assert [batch.valid for batch in loader.evaluation_batches(16)] == [16, 4]


def test_the_callers_random_numbers_are_not_used() -> None:
    before = torch.get_rng_state()
    next(batches(Coded()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_an_ended_stream_leaves_no_process_no_file_and_no_memory(end: str) -> None:
    gc.collect()  # what other tests have left open
    before = open_files()
    stream = batches(Coded())
    batch = next(stream)
    assert len(multiprocessing.active_children()) == 2
    assert "lockstep-batch" in Path("/proc/self/maps").read_text()
    if end == "closed":
        stream.close()
    del stream
    gc.collect()
    assert not multiprocessing.active_children()
    del batch
    gc.collect()
    assert open_files() == before
    assert "lockstep-batch" not in Path("/proc/self/maps").read_text()


class Failing(Coded):
    """Example 9 fails in a way of its own."""

    def __init__(self, fail: Any) -> None:
        self.fail = fail

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        if 9 in indices:
            self.fail()
        return super().read_batch(indices)


def test_the_error_of_a_reader_is_the_same_in_the_trainer() -> None:
    def fail() -> None:
        raise DataError("Record 9 is cut off.", given="12 bytes", expected="40 bytes", hint="copy the file again")

    stream = batches(Failing(fail))
    assert [next(stream).position, next(stream).position] == [0, 4]
    with pytest.raises(DataError) as caught:
        next(stream)
    assert str(caught.value) == (
        "Record 9 is cut off.\n  given:    12 bytes\n  expected: 40 bytes\n  hint:     copy the file again"
    )
    (note,) = caught.value.__notes__
    assert note.startswith("In loader process 0:\nTraceback")
    assert "in fail" in note
    assert not multiprocessing.active_children()


def test_an_example_that_cannot_be_read_is_named_from_its_process() -> None:
    def fail() -> None:
        raise ValueError("not a JPEG")

    with pytest.raises(DataError) as caught:
        list(islice(batches(Failing(fail)), 3))
    assert str(caught.value) == (
        "Example coded 9 cannot be read.\n"
        "  given:    ValueError: not a JPEG\n"
        "  expected: an example that Failing can read\n"
        "  hint:     repair it, or leave it out of the data"
    )


def test_an_augmentation_that_fails_names_its_process_and_place() -> None:
    class Divide:
        def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
            return {"number": 1 / 0}

    with pytest.raises(WorkerError) as caught:
        next(batches(Coded(), augment=Divide()))
    assert str(caught.value) == (
        "Loader process 0 failed.\n"
        "  given:    ZeroDivisionError: division by zero\n"
        "  expected: a reader and augmentations that raise nothing but errors of Lockstep\n"
        "  hint:     the traceback below shows where; num_processes=0 runs the same in the trainer, under a debugger"
    )
    assert "1 / 0" in caught.value.__notes__[0]


DEAD = (
    r"Loader process {number} \(pid {pid}\) {end}\.\n"
    r"  given:    {doing}\n"
    r"  expected: loader processes that live as long as the run\n"
    r"  hint:     when the system's log shows the out-of-memory killer: fewer loader processes, or a smaller batch"
)


@pytest.mark.parametrize(
    ("fail", "end"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_process_that_dies_reading_is_named_with_what_it_read(fail: Any, end: str) -> None:
    pattern = DEAD.format(number=0, pid=r"\d+", end=end, doing="it was reading the batch at position 8")
    with pytest.raises(WorkerError, match=pattern):
        list(islice(batches(Failing(fail)), 3))
    assert not multiprocessing.active_children()


def test_a_process_that_dies_before_its_results_are_taken_is_named_with_what_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(ends: list[Any], timeout: float) -> list[Any]:
        wait(ends[1:2])  # for the end of the first process, which has finished the batch at position 0
        return wait(ends, timeout)

    monkeypatch.setattr(loader_processes, "wait", late)
    with pytest.raises(WorkerError, match="it was reading the batch at position 8"):
        next(batches(Failing(lambda: os.kill(os.getpid(), signal.SIGKILL))))


def test_a_process_that_dies_is_named_before_its_turn() -> None:
    stream = batches(Coded(), 3)
    next(stream)
    victim = next(child for child in multiprocessing.active_children() if child.name == "loader process 2")
    pid = victim.pid
    victim.kill()
    victim.join()
    with pytest.raises(WorkerError, match=rf"Loader process 2 \(pid {pid}\) was killed by SIGKILL"):
        next(stream)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_run_is_the_trainers_to_answer(asked: signal.Signals) -> None:
    stream = batches(Coded())
    next(stream)
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, asked)
    assert [batch.position for batch in islice(stream, 6)] == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize("end", ["killed", pytest.param("ended", marks=pytest.mark.slow)])
def test_processes_do_not_outlive_the_trainer(end: str) -> None:
    script = (
        "import multiprocessing, sys, test_loader_processes as here\n"
        "stream = here.batches(here.Coded())\n"
        "next(stream)\n"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        children = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        if end == "killed":
            trainer.kill()
        trainer.stdin.close()
        assert trainer.wait(HANG_SECONDS) == (-signal.SIGKILL if end == "killed" else 0)
    assert len(children) == 2
    for child in children:
        assert select.select([child], [], [], 10) == ([child], [], [])
        os.close(child)


@pytest.mark.parametrize(
    ("quota", "num_workers", "expected"),
    [("max 100000", 1, 8), ("max 100000", 4, 3), ("max 100000", 9, 1), ("600000 100000", 2, 2), ("50000 100000", 1, 1)],
)
def test_the_number_of_processes_follows_the_cores_that_are_free(
    quota: str, num_workers: int, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", quota + "\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read_quota = cores.cgroup_cores
    monkeypatch.setattr(cores, "cgroup_cores", lambda _: read_quota(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert prefetch.default_num_processes(num_workers) == expected


def test_fewer_than_no_processes_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        Loader(Coded(), batch_size=4, num_processes=-1)
    assert str(caught.value) == (
        "num_processes is out of range.\n"
        "  given:    num_processes=-1\n"
        "  expected: 0 or more\n"
        "  hint:     give num_processes a value in this range"
    )


def test_where_there_is_no_shared_memory_the_trainer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert prefetch.default_num_processes(1) == 0
    with pytest.raises(InputError) as caught:
        Loader(Coded(), batch_size=4, num_processes=1)
    assert str(caught.value) == (
        "Loader processes need Linux.\n"
        "  given:    num_processes=1\n"
        "  expected: 0 on this system, which has no memfd to share batches through\n"
        "  hint:     leave num_processes out, and the trainer's own process reads; or give num_threads"
    )


class Drawing:
    """A dataset whose items draw from the generators of the process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(2), "y": np.random.rand(), "z": random.random(), "index": index}


def drawn(**pool: int) -> list[Any]:
    loader = Loader(TorchDataset(Drawing()), batch_size=4, order="sequential", seed=3, **pool)
    stream = loader.batches(range(1), 1)
    found = [batch["x"].tolist() + batch["y"].tolist() + batch["z"].tolist() for batch in islice(stream, 6)]
    stream.close()
    return found


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_what_a_dataset_draws_does_not_depend_on_who_reads(num_processes: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    alone = drawn(num_processes=0)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generators are put back"
    assert len({str(each) for each in alone}) == 6, "each place of the stream has numbers of its own"
    assert drawn(num_processes=num_processes) == alone


def test_threads_read_a_dataset_that_says_that_it_draws_nothing() -> None:
    with pytest.raises(InputError, match="TorchDataset may draw from random generators"):
        Loader(TorchDataset(Drawing()), batch_size=4, num_threads=1)
    quiet = Loader(TorchDataset(Drawing(), draws=False), batch_size=4, num_threads=1, order="sequential")
    stream = quiet.batches(range(1), 1)
    assert next(stream)["index"].tolist() == [0, 1, 2, 3]
    stream.close()


def test_items_that_do_not_fit_are_named() -> None:
    class Uneven(Drawing):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.zeros(1 + index // 2)}

    with pytest.raises(DataError) as caught:
        next(Loader(TorchDataset(Uneven()), batch_size=4, order="sequential", num_processes=0).batches(range(1), 1))
    assert str(caught.value) == (
        "Item 2 of Uneven cannot be used.\n"
        "  given:    'x': float32 of shape (2,)\n"
        "  expected: float32 of shape (1,), as in item 0\n"
        "  hint:     fix __getitem__ of the dataset, or leave the item out"
    )


def test_a_batch_of_many_rows_with_long_lists_arrives() -> None:
    class Named(Coded):
        def __len__(self) -> int:
            return 100_000

        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            return {"name": [f"a rather long name of example {index}" for index in indices.tolist()]}

    loader = Loader(Named(), batch_size=30_000, num_processes=1, prefetch=4)
    stream = loader.batches(range(1), 1)
    assert [len(batch["name"]) for batch in islice(stream, 5)] == [30_000] * 5
    stream.close()


@dataclass
class Boxed:
    inside: torch.Tensor


def test_tensors_within_objects_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Objects(Coded):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            return {"boxed": [Boxed(torch.full((3,), float(index))) for index in indices.tolist()]}

    before = {path.name for path in Path(tempfile.gettempdir()).glob("pymp-*")}
    stream = Loader(Objects(), batch_size=4, num_processes=2, order="sequential").batches(range(1), 1)
    assert [each.inside.tolist() for each in next(stream)["boxed"]] == [[float(n)] * 3 for n in range(4)]
    stream.close()
    assert {path.name for path in Path(tempfile.gettempdir()).glob("pymp-*")} == before


class OwnError(DataError):
    def __init__(self, row: int) -> None:
        super().__init__(f"Row {row} is bad.", given="a", expected="b", hint="c")


def test_an_error_of_ones_own_class_arrives_as_the_one_that_it_is() -> None:
    def fail() -> None:
        raise OwnError(9)

    with pytest.raises(DataError, match=r"Row 9 is bad\."):
        list(islice(batches(Failing(fail)), 4))


def test_a_process_killed_while_it_sends_is_named() -> None:
    class Wordy(Coded):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return {"name": ["x" * 10_000_000] * len(indices)}

    stream = batches(Wordy(), 1)
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL"):
        for _ in stream:
            pass


def test_a_stream_that_is_never_closed_ends_without_a_word() -> None:
    script = """
import torch, numpy, lockstep as ls
class Slow:
    cost = "decode"
    def __len__(self): return 8
    def read_batch(self, indices): return {"x": torch.from_numpy(indices)}
    def example_id(self, index): return str(index)
batches = ls.data.Loader(Slow(), batch_size=2, num_processes=2).batches(range(1), 1)
next(batches)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
