from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from fake_streams import DEVICE, FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.data import device_copies
from lockstep.data.batch_reader import ReadRows
from lockstep.data.device_copies import copied_ahead
from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.ragged import Ragged
from lockstep.tracing import TimedResult

Int64s = np.ndarray[Any, np.dtype[np.int64]]
THREAD = "lockstep-copy_0"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    device_copies._copy_stream.cache_clear()
    yield FakeDevice(monkeypatch)
    device_copies._copy_stream.cache_clear()


class Source:
    """Rows 0, 1, ..., each of one number; `is_ready(k)` says whether row k is there as soon as it is asked for."""

    def __init__(self, size: int, is_ready: Callable[[int], bool] = lambda number: True) -> None:
        self.size, self.is_ready = size, is_ready
        self.num_taken = 0
        self.closed = False

    def __call__(self) -> Iterator[TimedResult[ReadRows]]:
        def next_is_ready() -> bool:
            return self.num_taken < self.size and self.is_ready(self.num_taken)

        try:
            while self.num_taken < self.size:
                number = torch.tensor([self.num_taken])
                self.num_taken += 1
                yield TimedResult(ReadRows({"number": number}, []), {"read": 1.0}, 0.5, next_is_ready)
        finally:
            self.closed = True


def copies(source: Source) -> Any:
    return copied_ahead(source(), DEVICE)  # type: ignore[arg-type]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def test_the_stream_that_computes_waits_for_the_copy(device: FakeDevice) -> None:
    seen: list[int] = []
    for rows in copies(Source(5)):
        number = rows.result.fields["number"]
        device.compute.launch(lambda number=number: seen.append(number.item()))
    assert seen == []  # the host has waited for nothing
    device.compute.synchronize()
    assert seen == [0, 1, 2, 3, 4]


def test_the_copies_have_a_stream_of_their_own(device: FakeDevice) -> None:
    with closing(copies(Source(5))) as batches:
        next(batches)
        next(batches)
    assert len(device.compute.work) == 2  # it waits for two batches
    stream: Any = device_copies._copy_stream(DEVICE)
    assert len(stream.work) == 6  # three are copied, each with an event


def test_the_next_one_is_copied_by_a_thread_while_the_one_before_is_used(device: FakeDevice) -> None:
    source = Source(3)
    with closing(copies(source)) as batches:
        next(batches)
        assert source.num_taken == 2
        next(batches)
        assert source.num_taken == 3
        next(batches)
        assert device.pinned_by == ["MainThread", THREAD, THREAD]


def test_the_thread_works_on_the_device_of_its_worker_alone(device: FakeDevice) -> None:
    """A new thread is on the first one, where torch would make a context, of half a GB, for each worker of the host."""
    device.set_device(DEVICE)
    assert len([*copies(Source(3))]) == 3
    assert THREAD in device.pinned_by
    assert device.contexts == {DEVICE}


def test_what_is_not_ready_is_taken_and_copied_when_it_is_due(device: FakeDevice) -> None:
    source = Source(3, is_ready=lambda number: False)
    for number, _ in enumerate(copies(source)):
        assert source.num_taken == number + 1
        assert threads() == []
    assert device.pinned_by == ["MainThread"] * 3


@given(st.integers(0, 6), st.sets(st.integers(0, 5)), st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_all_come_in_order_whatever_is_ready(size: int, ready: set[int], num_used: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        device_copies._copy_stream.cache_clear()
        fake, source, seen = FakeDevice(monkeypatch), Source(size, ready.__contains__), []
        with closing(copies(source)) as batches:
            for rows in islice(batches, num_used):
                assert source.num_taken <= len(seen) + 2
                number = rows.result.fields["number"]
                fake.compute.synchronize()
                seen.append(number.item())
        assert seen == [*range(min(size, num_used))]
        assert threads() == []
        assert source.closed or not num_used
    device_copies._copy_stream.cache_clear()


def test_the_allocator_is_told_of_all_that_is_on_the_device(device: FakeDevice) -> None:
    boxes = Ragged.of([torch.zeros(number, 4) for number in range(3)])
    fields = {"boxes": boxes, "name": ["a", "b", "c"], "pair": [(1, {"deep": torch.ones(2)})]}
    rows = next(copied_ahead((TimedResult(ReadRows(fields, []), {}) for _ in range(1)), DEVICE))
    on_device = [rows.result.fields["boxes"].values, rows.result.fields["pair"][0][1]["deep"]]
    assert device.recorded == [(tensor.data_ptr(), device.compute) for tensor in on_device]
    assert len(device.pinned_by) == 3  # the lengths too, which stay on the CPU
    assert rows.result.fields["boxes"].lengths.tolist() == [0, 1, 2]
    assert rows.result.fields["name"] == ["a", "b", "c"]


def test_what_comes_with_the_rows_goes_on_and_the_copy_is_a_stage(device: FakeDevice) -> None:
    rows, *_ = copies(Source(2))
    assert rows.queue_fill == 0.5
    assert [*rows.seconds] == ["read", "copy"]
    assert rows.seconds["copy"] > 0


def test_what_is_left_to_do_is_done_beside_the_copies(device: FakeDevice) -> None:
    done: list[tuple[str, int, bool]] = []

    def finish(fields: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
        is_copy = fields["number"].data_ptr() != here["number"].data_ptr()
        done.append((threading.current_thread().name, int(here["number"]), is_copy))
        return {"finished": torch.zeros(2)}

    with closing(copied_ahead(Source(3)(), DEVICE, finish)) as batches:  # type: ignore[arg-type]
        fields = next(batches).result.fields
        assert [*fields] == ["finished"]
        assert device.recorded == [(fields["finished"].data_ptr(), device.compute)]
        next(batches)
    assert done == [("MainThread", 0, True), (THREAD, 1, True), (THREAD, 2, True)]


def test_a_loader_finishes_what_its_augmentations_leave(device: FakeDevice) -> None:
    class Later:
        def __call__(self, batch: dict[str, Any], draws: Any) -> dict[str, Any]:
            return batch

        def on_device(self, batch: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "later": here["number"] + 1}

    for place in (torch.device("cpu"), DEVICE):
        stream = loader(Decoded(), augment=[Later()], num_processes=0)
        with closing(stream.batches(range(1), 1, place)) as batches:
            assert next(batches)["later"].tolist() == [1, 2]
        [batch] = stream.evaluation_batches(10, device=place)
        assert batch["later"].tolist() == [*range(1, 11)]
        with closing(stream.slices(1, 2).reader(0, 1, place)) as slices:
            assert [slices.read(start)["later"].tolist() for start in (0, 3)] == [[1], [4]]


def test_an_error_of_the_thread_comes_with_its_batch(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = torch.Tensor.pin_memory

    def full(tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == THREAD:
            raise torch.OutOfMemoryError("no room")
        return pin(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", full)
    source = Source(3)
    batches = copies(source)
    next(batches)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        next(batches)
    assert source.closed
    assert threads() == []


def test_an_interrupt_in_the_loop_ends_the_thread_and_the_source(device: FakeDevice) -> None:
    source = Source(3)
    batches = copies(source)
    next(batches)
    assert threads() == [THREAD]
    with pytest.raises(KeyboardInterrupt):
        batches.throw(KeyboardInterrupt)
    assert source.closed
    assert threads() == []


def test_ctrl_c_comes_while_a_copy_is_waited_for(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pin, may_end = torch.Tensor.pin_memory, threading.Event()

    def slow(tensor: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread().name != THREAD or may_end.wait(HANG_SECONDS)
        return pin(tensor)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        may_end.set()

    monkeypatch.setattr(torch.Tensor, "pin_memory", slow)
    source = Source(3)
    batches = copies(source)
    next(batches)
    threading.Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert source.closed
    assert threads() == []


def test_threads_that_begin_later_take_as_many_cores_as_before(device: FakeDevice) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with closing(copies(Source(3))) as batches:
            next(batches)
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert (torch.get_num_threads(), *found) == (3, 3)
    finally:
        torch.set_num_threads(before)


class Decoded:
    """Example k is the number k, and has to be decoded; `bad` cannot be."""

    cost = "decode"

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        if self.bad in indices:
            raise OSError("no such block")
        return {"number": torch.from_numpy(indices)}

    def example_id(self, index: int) -> str:
        return f"number {index}"


def loader(reader: Any, **arguments: Any) -> Loader:
    return Loader(reader, batch_size=2, order="sequential", **arguments)


POOLS = [
    pytest.param({"num_threads": 1}, id="a thread"),
    pytest.param({"num_threads": 2, "prefetch": 1}, id="two threads"),
    pytest.param({"num_processes": 1}, id="a process", marks=pytest.mark.process),
    pytest.param({"num_processes": 2}, id="two processes", marks=pytest.mark.process),
    pytest.param({"num_processes": 0}, id="the trainer"),
]


@pytest.mark.parametrize("pool", POOLS)
def test_the_stream_is_the_same_as_on_the_cpu(device: FakeDevice, pool: dict[str, int]) -> None:
    stream = loader(Decoded(), **pool)
    with closing(stream.batches(range(1), 1, DEVICE)) as batches:
        taken = [*islice(batches, 8)]
    device.compute.synchronize()
    found = [(batch.position, batch["number"].tolist()) for batch in taken]
    assert found == [(2 * k, [2 * k % 10, 2 * k % 10 + 1]) for k in range(8)]
    assert stream.position == 0  # what is read ahead is not committed
    scored = [*stream.evaluation_batches(4, device=DEVICE)]
    device.compute.synchronize()
    assert [batch["number"].tolist() for batch in scored] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert threads() == []


@pytest.mark.parametrize("pool", POOLS)
def test_an_example_that_cannot_be_read_fails_when_its_batch_is_due(device: FakeDevice, pool: dict[str, int]) -> None:
    with closing(loader(Decoded(bad=5), **pool).batches(range(1), 1, DEVICE)) as batches:
        for number in range(2):
            assert next(batches).position == 2 * number
            threading.Event().wait(0.1)  # by now all of them are read
        with pytest.raises(DataError, match="Example number 5 cannot be read"):
            next(batches)


def test_a_stop_ends_the_stream_before_its_batch(device: FakeDevice) -> None:
    stream = loader(Decoded(), num_threads=1)
    batches = [*stream.batches(range(1), 1, DEVICE, stop=lambda position: position >= 4)]
    assert [batch.position for batch in batches] == [0, 2]
    assert threads() == []


def test_a_stream_that_is_set_elsewhere_ends_with_what_was_read_ahead(device: FakeDevice) -> None:
    stream = loader(Decoded(), num_threads=1)
    batches = stream.batches(range(1), 1, DEVICE)
    for _ in islice(batches, 3):
        threading.Event().wait(0.05)
    stream.load_state({**stream.state(), "position": 8})
    with pytest.raises(InputError, match="The stream was set to another place"):
        next(batches)
    assert threads() == []
    assert next(stream.batches(range(1), 1, DEVICE)).position == 8


def test_an_iterable_dataset_goes_on_in_the_next_loop(device: FakeDevice) -> None:
    stream = IterableLoader([(torch.tensor(k), k) for k in range(10)], batch_size=2)
    seen = []
    for _ in range(3):
        with closing(stream.batches(range(1), 1, DEVICE)) as batches:
            batch = next(batches)
            device.compute.synchronize()
            seen += batch["label"].tolist()
            stream.commit(batch)
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_batches_are_whole_while_the_device_is_behind() -> None:
    class Images(Decoded):
        def __len__(self) -> int:
            return 4000

        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            numbers = torch.from_numpy(indices)
            return {"number": numbers, "image": numbers.float()[:, None].expand(-1, 500_000).contiguous()}

    place = torch.accelerator.current_accelerator()
    assert place is not None
    here = torch.device(place.type, 0)
    busy, wrong = torch.ones(4000, 4000, device=here), torch.zeros((), device=here)
    with closing(loader(Images(), num_processes=2).batches(range(1), 1, here)) as batches:
        for batch in islice(batches, 200):
            busy = (busy @ busy).clamp(max=1)  # the device is behind the host, by more than a batch
            wrong += (batch["image"] != batch["number"][:, None]).sum()
            del batch
    assert wrong.item() == 0
