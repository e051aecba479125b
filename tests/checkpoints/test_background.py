from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoint_helpers import Child, assert_consistent, sections_of, unfinished
from worker_processes import HANG_SECONDS

from lockstep.checkpoints import Retention, Store, background
from lockstep.checkpoints.background import BackgroundWriter, wait_for_writers
from lockstep.errors import CheckpointError
from lockstep.workers.pulse import Pulse


class Gate:
    """A store whose writes wait until the gate is open."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.is_open = threading.Event()

    def write(self, *arguments: Any, **more: Any) -> None:
        self.is_open.wait(HANG_SECONDS)
        self.store.write(*arguments, **more)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_what_changes_after_the_copy_is_not_in_the_checkpoint(gate: Gate) -> None:
    writer, sections = BackgroundWriter(gate), sections_of(3)  # type: ignore[arg-type]
    values = {"step": 3, "more": [1]}
    writer.begin(3, sections, values)
    values["more"].append(2)  # type: ignore[union-attr]
    for members in sections.values():
        for tensor in members.values():
            tensor.fill_(99)
    gate.is_open.set()
    writer.wait()
    found = gate.store.read(3)
    assert found is not None
    assert found.values == {"step": 3, "more": [1]}
    assert list(found.tensors) == ["parameters", "buffers", "average"]
    assert all((tensor == 3).all() for tensors in found.tensors.values() for tensor in tensors.values())


def test_the_run_goes_on_while_it_is_written(gate: Gate) -> None:
    writer = BackgroundWriter(gate)  # type: ignore[arg-type]
    writer.begin(1, sections_of(1), {"step": 1})
    writer.check()
    assert gate.store.steps() == []
    gate.is_open.set()
    writer.wait()
    assert assert_consistent(gate.store.read()) == 1


def test_what_changes_the_tensors_calls_the_writer_as_long_as_it_is_in_flight(gate: Gate) -> None:
    hooks: list[Callable[[], None]] = [print]
    writer = BackgroundWriter(gate, hooks)  # type: ignore[arg-type]
    writer.begin(1, sections_of(1), {"step": 1})
    assert hooks == [print, writer.check]
    gate.is_open.set()
    writer.wait()
    assert hooks == [print]


def test_the_next_one_waits_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path, Retention(newest=2))
    writer = BackgroundWriter(store)
    for step in range(1, 6):
        writer.begin(step, sections_of(step, numel=100_000), {"step": step})
        assert set(store.steps()) <= set(range(1, step + 1))
        assert step == 1 or step - 1 in store.steps()
    writer.wait()
    assert store.steps() == [4, 5]
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("call", ["check", "wait", "begin"])
def test_an_error_of_the_thread_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = BackgroundWriter(Store(tmp_path / "file"))
    writer.begin(1, sections_of(1), {"step": 1})
    if call == "check":
        assert writer._thread is not None
        writer._thread.join()
    with pytest.raises(CheckpointError, match=r"The checkpoint of step 1 cannot be written"):
        writer.begin(2, sections_of(2), {"step": 2}) if call == "begin" else getattr(writer, call)()
    writer.wait()


def test_what_waits_for_a_save_or_fails_in_it_is_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse(launched=True)
    monkeypatch.setattr(background, "of_this_process", lambda: pulse)
    pulse.at(3, "exchange")
    writer = BackgroundWriter(Store(tmp_path / "fine"))
    writer.begin(3, sections_of(1), {"step": 1})
    writer.wait()
    assert (pulse.step, pulse.phase) == (3, "exchange")
    (tmp_path / "file").write_text("in the way")
    writer = BackgroundWriter(Store(tmp_path / "file"))
    writer.begin(4, sections_of(1), {"step": 1})
    with pytest.raises(CheckpointError):
        writer.wait()
    assert (pulse.step, pulse.phase) == (3, "save")


def test_what_cannot_be_saved_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of a kind that cannot be saved"):
        BackgroundWriter(Store(tmp_path)).begin(1, {"parameters": {"z": torch.zeros(1, dtype=torch.complex64)}}, {})


def save_for_ever(pipe: Connection, folder: Path, first: int) -> None:
    writer = BackgroundWriter(Store(folder, Retention(newest=2)))
    sections, step = sections_of(first, numel=100_000), first
    while True:
        writer.begin(step, sections, {"step": step})
        step += 1
        for members in sections.values():
            for tensor in members.values():
                tensor.fill_(step)
        pipe.send(step)


@pytest.mark.process
def test_killed_at_any_moment_of_a_save_in_the_background(tmp_path: Path) -> None:
    draw, store, reached = Random(1), Store(tmp_path, Retention(newest=2)), 0
    for kills in range(90):
        if kills >= 30 and reached > 10:  # a busy machine comes to fewer saves before a kill
            break
        child = Child(save_for_ever, tmp_path, reached + 1)
        child.pipe.poll(HANG_SECONDS)
        child.kill_after(draw.uniform(0, 0.15 if kills < 30 else 2))
        child.said()
        found = store.read()
        if found is not None:
            reached = assert_consistent(found)
            assert not [step for step in store.steps() if assert_consistent(store.read(step)) != step]
    assert reached > 10


def test_a_writer_that_could_not_begin_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[[], None]] = []
    writer = BackgroundWriter(Store(tmp_path), hooks)
    with monkeypatch.context() as context:
        context.setattr(
            threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no more threads"))
        )
        with pytest.raises(RuntimeError, match="no more threads"):
            writer.begin(1, sections_of(1), {"step": 1})
    assert hooks == []
    writer.begin(2, sections_of(2), {"step": 2})
    wait_for_writers()
    assert Store(tmp_path).steps() == [2]


def test_two_writers_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    for step in range(1, 16):
        writers = [BackgroundWriter(Store(tmp_path)) for _ in range(2)]
        for writer in writers:
            writer.begin(step, sections_of(step, numel=20_000), {"step": step})
        wait_for_writers()
        assert assert_consistent(Store(tmp_path).read()) == step
    assert unfinished(tmp_path) == []


def test_an_error_that_nobody_asks_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = BackgroundWriter(Store(tmp_path / "file"))
    writer.begin(1, sections_of(1), {"step": 1})
    assert writer._thread is not None
    writer._thread.join()
    assert caplog.messages[0].startswith("the checkpoint of step 1 is not written: The checkpoint of step 1 cannot be ")
    with pytest.raises(CheckpointError):
        wait_for_writers()


@pytest.mark.process
def test_the_number_of_threads_stays() -> None:
    script = """
import tempfile, threading, torch
from pathlib import Path
from lockstep.checkpoints import Store
from lockstep.checkpoints.background import BackgroundWriter, wait_for_writers
torch.set_num_threads(3)
writer = BackgroundWriter(Store(Path(tempfile.mkdtemp())))
writer.begin(1, {"parameters": {"w": torch.zeros(1_000_000)}}, {})
writer.wait()
found = []
thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
thread.start(); thread.join()
print(torch.get_num_threads(), *found)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ran.stdout == "3 3\n", ran.stderr


@pytest.mark.process
def test_a_checkpoint_is_whole_where_the_script_ends_while_it_is_written(tmp_path: Path) -> None:
    script = f"""
import torch
from pathlib import Path
from lockstep.checkpoints import Store
from lockstep.checkpoints.background import BackgroundWriter
tensors = {{"parameters": {{str(number): torch.ones(100_000) for number in range(100)}}}}
BackgroundWriter(Store(Path({str(tmp_path)!r}))).begin(1, tensors, {{}})
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert not ran.stderr
    found = Store(tmp_path).read()
    assert found is not None
    assert len(found.tensors["parameters"]) == 100
