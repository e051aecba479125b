"""Loader processes and threads that hang in a read: real ones, blocked on a pipe that nobody writes to."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_processes import HANG_SECONDS

from lockstep.data import loader as loader_module
from lockstep.data import loader_processes
from lockstep.data.loader import Loader
from lockstep.data.prefetch import LoaderStatus, StallTimeout
from lockstep.errors import InputError, WorkerError
from lockstep.readers.reader import Arrays

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent
WHO = {"processes": r"loader process 0 \(pid \d+\)", "threads": "loader thread 0"}


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The ends of the reader and of the test. The trainer's wait is counted from where the reader asks for a byte."""
    theirs, ours = socket.socketpair()

    class FromThere(StallTimeout):
        def wait(self, ready: Callable[[float], Any], status: Callable[[], LoaderStatus]) -> Any:
            """On a busy machine it takes longer to come there than the timeout is."""
            found = ready(0.0)
            while not (found or select.select([ours], [], [], 0.0)[0]):
                found = ready(0.05)
            return found or super().wait(ready, status)

    monkeypatch.setattr(loader_module, "StallTimeout", FromThere)
    with theirs, ours:
        yield theirs.fileno(), ours.fileno()
        ours.send(b"x")  # no thread of a test is left blocked
        for thread in threading.enumerate():
            if thread.name.startswith("loader thread"):
                thread.join(HANG_SECONDS)


class OneByOne:
    """Example 2 is there when a byte has come, for which it asks."""

    draws_globally = False

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> dict[str, Any]:
        if index == 2:
            os.write(self._pipe, b"x")
            os.read(self._pipe, 1)
        return {"index": index}

    def example_id(self, index: int) -> str:
        return f"cat/{index}.jpg"


class Whole(OneByOne):
    """Reads whole batches, and says nothing of its examples."""

    cost = "decode"

    def read_batch(self, indices: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"index": torch.tensor([self.read(index)["index"] for index in indices.tolist()])}


def batches(reader: Any, who: str, **arguments: Any) -> Any:
    loader = Loader(reader, batch_size=4, order="sequential", **{f"num_{who}": 1}, **arguments)
    return loader.batches(range(1), 1)


@pytest.mark.parametrize("who", ["processes", "threads"])
@pytest.mark.parametrize(
    ("kind", "example"),
    [(OneByOne, "cat/2.jpg"), (Whole, "one of cat/0.jpg, cat/1.jpg, cat/2.jpg, cat/3.jpg")],
)
def test_after_the_timeout_the_batch_and_the_example_are_named(
    kind: type[OneByOne], example: str, who: str, pipe: tuple[int, int]
) -> None:
    with pytest.raises(WorkerError) as caught:
        next(batches(kind(pipe[0]), who, timeout_seconds=0.3))
    lines = str(caught.value).split("\n")
    name = WHO[who].replace("loader", "Loader")
    assert re.fullmatch(name + " hangs: the trainer has waited 0.3 s for the batch at position 0.", lines[0])
    assert lines[1] == f"  given:    it is at {example}"
    assert "in read" in caught.value.__notes__[0], "the stack"
    assert not multiprocessing.active_children()


def test_the_seeded_reading_of_single_examples_names_them(pipe: tuple[int, int]) -> None:
    reader = OneByOne(pipe[0])
    reader.draws_globally = True
    with pytest.raises(WorkerError, match=r"it is at cat/2\.jpg"):
        next(batches(reader, "processes", timeout_seconds=0.3))


@pytest.mark.parametrize("who", ["processes", "threads"])
def test_a_long_wait_is_told_once_and_then_the_stream_goes_on(
    who: str, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "StallTimeout", partial(loader_module.StallTimeout, warn_seconds=0.2))
    with told(lambda: os.write(pipe[1], b"x")) as messages:
        loader = Loader(OneByOne(pipe[0]), batch_size=4, **{f"num_{who}": 1})  # type: ignore[arg-type]
        assert [batch["index"].tolist() for batch in loader.evaluation_batches(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (message,) = messages
    first, stack = message.split("\n", 1)
    expected = rf"the trainer has waited 0\.2 s for the batch at position 0: {WHO[who]} is at cat/2\.jpg"
    assert re.fullmatch(expected, first)
    assert "Stack (most recent call" in stack
    assert re.search(r'File ".*test_loader_threads.py", line \d+,? in read\b', stack)


class told:  # noqa: N801
    """The warnings within the block; something is done at each."""

    def __init__(self, do: Callable[[], object] = lambda: None) -> None:
        self._do = do
        self.messages: list[str] = []
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._do()

    def __enter__(self) -> list[str]:
        logging.getLogger("lockstep").addHandler(self._handler)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("lockstep").removeHandler(self._handler)


def test_a_stopped_process_is_said_to_be_stopped(pipe: tuple[int, int]) -> None:
    stream = batches(Whole(pipe[0]), "processes", timeout_seconds=1.0)
    os.write(pipe[1], b"x")
    next(stream)
    (child,) = multiprocessing.active_children()
    os.kill(child.pid or 0, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="hangs: the trainer has waited 1 s") as caught:
        list(islice(stream, 3))
    assert caught.value.__notes__ == ["it is stopped (SIGSTOP)"]
    assert not multiprocessing.active_children()


def test_a_process_that_cannot_be_killed_is_left_behind(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that waits for a disk; here the signal is kept back."""
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "kill", lambda self: None)
    stream = batches(Whole(pipe[0]), "processes", timeout_seconds=0.3)
    with told() as messages, pytest.raises(WorkerError, match="hangs") as caught:
        next(stream)
    (pid,) = re.findall(r"pid (\d+)", str(caught.value))
    assert messages == [
        f"loader process 0 (pid {pid}) cannot be killed, and is left behind: it waits for the system, perhaps a disk"
    ]
    assert not multiprocessing.active_children(), "nobody waits for it at the end of the interpreter"
    os.kill(int(pid), signal.SIGKILL)
    os.waitpid(int(pid), 0)


SCRIPT = """
import os, torch, lockstep as ls
class Blocked:
    draws_globally = False
    def __len__(self): return 8
    def read(self, index):
        if index == 5: os.read(os.pipe()[0], 1)
        return {"x": torch.zeros(2), "index": index}
    def example_id(self, index): return f"cat/{index}.jpg"
worker = ls.join()
loader = ls.data.Loader(Blocked(), batch_size=4, order="sequential", NUM=1, timeout_seconds=0.5)
state = ls.TrainState(torch.nn.Linear(2, 1), ls.optim.SGD(0.1))
ls.train(state, lambda m, b: {"loss": m(b["x"]).mean()}, loader, until=ls.Steps(5))
"""


@pytest.mark.parametrize(
    ("who", "num_workers"),
    [
        ("threads", 0),
        pytest.param("processes", 0, marks=pytest.mark.slow),
        pytest.param("processes", 2, marks=pytest.mark.slow),
        pytest.param("threads", 2, marks=pytest.mark.slow),
    ],
)
def test_a_script_ends_with_its_hung_reader_named(who: str, num_workers: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("NUM", f"num_{who}"))
    launcher = ["-m", "lockstep", "run"] if num_workers else []
    more = ["--workers", str(num_workers), "--device", "cpu"] if num_workers else []
    ended = subprocess.run(
        [sys.executable, *launcher, str(script), *more], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ended.returncode == 1
    name = WHO[who].replace("loader", "Loader")
    assert re.search(name + " hangs: the trainer has waited 0.5 s for the batch at position 4.", ended.stderr)
    assert "it is at cat/5.jpg" in ended.stderr


def test_closing_waits_for_the_job_that_a_thread_is_at(pipe: tuple[int, int]) -> None:
    class Slow(Whole):
        def read(self, index: int) -> dict[str, Any]:
            if index == 6:
                began.set()
                os.read(self._pipe, 1)
                finished.append(index)
            return {"index": index}

    began, finished = threading.Event(), list[int]()
    stream = batches(Slow(pipe[0]), "threads")
    next(stream)
    assert began.wait(HANG_SECONDS)
    os.write(pipe[1], b"x")
    stream.close()
    assert finished == [6]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader thread")]


def test_a_long_name_keeps_its_end() -> None:
    notes = loader_processes._Notes()
    notes.reading = "a/" * 1000 + "\udcff7.jpg"
    assert notes.reading.endswith(r"a/\udcff7.jpg")
    assert len(notes.reading) == 1000
    notes.reading = ""
    assert notes.reading == ""
    notes.num_finished = 3
    assert notes.num_finished == 3


def test_a_timeout_below_nothing_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        Loader(Arrays({"x": torch.zeros(8)}), batch_size=4, timeout_seconds=-1)
    assert str(caught.value) == (
        "timeout_seconds is out of range.\n"
        "  given:    timeout_seconds=-1\n"
        "  expected: 0 or more, finite\n"
        "  hint:     give timeout_seconds a value in this range"
    )
