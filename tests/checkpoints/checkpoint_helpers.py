"""What the tests of checkpoints share: checkpoints that tell their step everywhere, and processes that may die."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from worker_processes import HANG_SECONDS

from lockstep.checkpoints.store import Checkpoint, Store

Sections = dict[str, dict[str, torch.Tensor]]


class Child:
    """A function in a forked process: it can be killed, and drop rights or resources, without harm to the tests."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=function, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def kill_after(self, seconds: float) -> None:
        self.process.join(seconds)
        self.process.kill()
        self.process.join()

    def said(self) -> list[Any]:
        """All that the process sent before it ended."""
        said = []
        try:
            while self.pipe.poll(HANG_SECONDS):
                said.append(self.pipe.recv())
        except EOFError:
            pass
        self.process.join(HANG_SECONDS)
        return said


def sections_of(step: int, numel: int = 64) -> Sections:
    """Tensors that tell which step they belong to, in every element."""
    return {
        "parameters": {"conv.weight": torch.full((numel,), float(step)), "conv.bias": torch.full((4,), float(step))},
        "buffers": {"num_batches": torch.tensor(step)},
        "average": {},
    }


def write(store: Store, *steps: int) -> None:
    for step in steps:
        store.write(step, sections_of(step), {"step": step})


def assert_consistent(checkpoint: Checkpoint | None) -> int:
    """The step of a checkpoint, all parts of which belong to that step."""
    assert checkpoint is not None
    step = checkpoint.step
    assert checkpoint.values == {"step": step}
    assert list(checkpoint.tensors) == ["parameters", "buffers", "average"]
    for tensors in checkpoint.tensors.values():
        assert all((tensor == step).all() for tensor in tensors.values())
    return step


def unfinished(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))


def count_or_kill(pipe: Connection, kill_at: int | None, action: Callable[[], None]) -> None:
    """Do it and send how often it asked the file system for something, or be killed before the `kill_at`-th time."""
    watched = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
    count = 0

    def hook(event: str, arguments: Any) -> None:
        nonlocal count
        if event in watched:
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), 9)

    sys.addaudithook(hook)
    action()
    pipe.send(count)
