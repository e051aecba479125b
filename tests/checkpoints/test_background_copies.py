from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import assert_consistent, sections_of
from fake_streams import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.checkpoints import Store, background
from lockstep.checkpoints.background import BackgroundWriter, Copies


@pytest.fixture(autouse=True)
def reading_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have tensors on the CPU taken for those of an accelerator, whose streams do all at once."""
    monkeypatch.setattr("lockstep.tensors.READ_AT_ONCE", frozenset())
    for function in (background._copy_stream, background._tell_no_room):
        function.cache_clear()
    yield
    background._copy_stream.cache_clear()


def state() -> dict[str, dict[str, Tensor]]:
    kernel = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return {
        "parameters": {"kernel": kernel, "bias": torch.ones(3, dtype=torch.bfloat16), "scale": torch.tensor(2.5)},
        "buffers": {"count": torch.tensor(7), "mean": torch.arange(5.0).double(), "none": torch.empty(0, 4)},
        "slots": {"mask": torch.tensor([True, False]), "row": torch.arange(24.0).view(4, 6)[:, 1]},
    }


def overwrite(tensors: dict[str, dict[str, Tensor]]) -> None:
    for members in tensors.values():
        for tensor in members.values():
            tensor.fill_(1)


def assert_equal(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert [(section, [*members]) for section, members in found.items()] == [
        (section, [*members]) for section, members in expected.items()
    ]
    for section, members in expected.items():
        for name, tensor in members.items():
            assert found[section][name].dtype == tensor.dtype
            assert torch.equal(found[section][name], tensor)


def test_the_tensors_may_change_as_soon_as_they_are_cloned() -> None:
    tensors = state()
    taken = Copies(tensors)
    overwrite(tensors)
    assert_equal(taken.on_host(), state())


def test_a_clone_is_made_between_the_kernels_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tensors = FakeDevice(monkeypatch), state()
    overwrite(tensors)
    device.compute.launch(
        lambda: [t.copy_(state()[s][n]) for s, members in tensors.items() for n, t in members.items()]
    )
    taken = Copies(tensors)
    device.compute.launch(lambda: overwrite(tensors))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(taken.on_host()))
    thread.start()
    thread.join()
    device.compute.synchronize()
    assert_equal(found[0], state())


def test_the_thread_that_writes_works_on_the_device_of_the_state_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new thread is on the first one, where torch would make a context, of half a GB."""
    device, writer = FakeDevice(monkeypatch), BackgroundWriter(Store(tmp_path))
    writer.begin(3, sections_of(3), {"step": 3})
    writer.wait()
    assert device.contexts == {torch.device("cpu")}


def test_tensors_of_one_dtype_and_dense_layout_are_cloned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[Any] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda clones, tensors: lists.append((clones, tensors)))
    Copies(state())
    assert len(lists) == len({tensor.dtype for members in state().values() for tensor in members.values()})
    for clones, tensors in lists:
        assert len({tensor.dtype for tensor in (*clones, *tensors)}) == 1
        is_row = [tensor.stride() == (6,) for tensor in tensors]
        assert [clone.stride() for clone in clones] == [
            (1,) if row else tensor.stride() for tensor, row in zip(tensors, is_row, strict=True)
        ]


DTYPES = [torch.float32, torch.float16, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 64, 1000]),
)
@settings(max_examples=40, deadline=None)
def test_all_come_to_the_host_whatever_the_size_of_the_pieces(
    kinds: list[tuple[torch.dtype, list[int]]], piece: int
) -> None:
    tensors = {
        "all": {
            str(number): torch.randint(0, 2, shape).to(dtype).transpose(0, -1) if shape else torch.ones((), dtype=dtype)
            for number, (dtype, shape) in enumerate(kinds)
        }
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(background, "_PINNED_BYTES", piece)
        found = Copies(tensors).on_host()
    for name, tensor in tensors["all"].items():
        assert found["all"][name].dtype == tensor.dtype
        assert found["all"][name].tolist() == tensor.tolist()


def test_what_the_device_has_no_room_to_clone_is_copied_to_the_host_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "_foreach_copy_", full)
    for _ in range(2):
        tensors = state()
        taken = Copies(tensors)
        overwrite(tensors)
        assert_equal(taken.on_host(), state())
    assert caplog.messages == [
        "cpu has no room for a copy of the state: each save waits until all of it is copied to the host"
    ]


def test_a_run_does_not_wait_for_the_thread_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin, on_host = threading.Event(), Copies.on_host
    monkeypatch.setattr(Copies, "on_host", lambda taken: may_begin.wait() and on_host(taken))
    writer, tensors = BackgroundWriter(Store(tmp_path)), sections_of(3)
    writer.begin(3, tensors, {"step": 3})
    overwrite(tensors)
    assert not may_begin.is_set()
    may_begin.set()
    writer.wait()
    assert assert_consistent(Store(tmp_path).read()) == 3


@pytest.mark.parametrize(("free", "reserved"), [(10_000, 0), (1_000, 9_000)])
def test_memory_that_steps_have_needed_is_left_to_them(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int
) -> None:
    device: Any = FakeDevice(monkeypatch)
    device.mem_get_info = lambda place: (free, 50_000)
    device.memory_reserved = lambda place: reserved
    device.max_memory_allocated = lambda place: 8_040
    for size, has_room in ((960, True), (961, False)):
        taken = Copies({"parameters": {"bytes": torch.zeros(size, dtype=torch.uint8)}})
        assert bool(taken._clones) == has_room


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_save_beside_the_updates_of_another_stream_is_whole(tmp_path: Path) -> None:
    place = torch.accelerator.current_accelerator()
    assert place is not None
    device = torch.device(place.type, 0)
    module = torch.get_device_module(device)
    tensors = [torch.zeros(1_000_000, device=device) for _ in range(40)]
    sections = {"parameters": {str(number): tensor for number, tensor in enumerate(tensors)}}
    writer, busy = BackgroundWriter(Store(tmp_path)), torch.ones(4000, 4000, device=device)
    with module.stream(module.Stream(device)):
        for step in range(1, 30):
            busy = (busy @ busy).clamp(max=1)
            torch._foreach_add_(tensors, 1.0)
            writer.begin(step, sections, {"step": step})
    writer.wait()
    for step in Store(tmp_path).steps():
        found = Store(tmp_path).read(step)
        assert found is not None
        assert all((tensor == step).all() for tensor in found.tensors["parameters"].values())
