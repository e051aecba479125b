"""Real worker processes for tests, forked from a server that has torch imported already."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import select
import socket
import sys
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

import torch

from lockstep import tensors

HANG_SECONDS = 600.0
"""For which processes may make no progress: however busy the machine is, only what hangs takes so long."""
PRELOAD = ["torch", "torch._dynamo", "pytest", "hypothesis", "lockstep.runs.run"]
"""What the server has imported before it forks: torch's optimizers import the second one when they are made."""
# The server forks, where no audit hook of this process sees it: this event of our own says so.
EVENT = "worker_processes.run_workers"
# Else, with PYTHONDONTWRITEBYTECODE, each of a thousand workers would compile the module of its test anew.
sys.dont_write_bytecode = False


def free_port() -> int:
    """A port of this host that is free, and stays so: the system gives those below 32768 to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_workers(
    function: Callable[..., Any], num_workers: int, *arguments: Any, lost: Collection[int] = ()
) -> list[Any]:
    """Call a module-level function in that many joined workers; returns what each returned, by rank.

    A worker that raises fails the test with its traceback. From those that are `lost` nothing is expected. Where this
    process takes the branches of an accelerator, the workers do too.
    """
    sys.audit(EVENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes, processes, port, waits = [], [], free_port(), tensors.reading_waits(torch.device("cpu"))
    for rank in range(num_workers):
        here, there = context.Pipe(duplex=False)
        seat = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": num_workers}
        process = context.Process(target=_work, args=(there, seat, port, waits, function, arguments))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        answers = [
            (True, None) if rank in lost else _answer(pipe, process)
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [f"worker {rank}:\n{said}" for rank, (ok, said) in enumerate(answers) if not ok]
    assert not failed, "\n".join(failed)
    return [said for _, said in answers]


def _answer(pipe: Connection, process: Any) -> tuple[bool, Any]:
    try:
        if not pipe.poll(HANG_SECONDS):
            return False, f"said nothing for {HANG_SECONDS:g} s"
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        process.join()
        return False, f"died with exit code {process.exitcode}"
    return answer


def _work(
    pipe: Connection, seat: dict[str, int], port: int, waits: bool, function: Callable[..., Any], arguments: Any
) -> None:
    if waits:
        tensors.READ_AT_ONCE = frozenset()
    gc.freeze()  # what the server has imported is no garbage
    os.environ.update({name: str(value) for name, value in seat.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Worker 0 holds the store, which must outlast what the others still ask of it; the test kills them all, or is gone.
    test_is_gone = select.poll()
    test_is_gone.register(pipe, 0)
    test_is_gone.poll()
