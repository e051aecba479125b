"""Blocks of bytes from one process to another and back: our frames, ZeroMQ, and gloo, over TCP on one host.

    python benchmarks/wire.py [--rounds 7] [--quick]

What a worker on another host sends the chief that serves it is a block of the size of the model, and so is what comes
back. A turn is some such trips; the receiver has the bytes in memory that was there before, as a tensor needs them.
ZeroMQ (`pip install pyzmq`) is left out where it is not installed. The result is printed and appended to
benchmarks/results/wire.jsonl.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from measuring import compared, record, show, take_turns
from torch import Tensor

from lockstep.served.wire import Frames

MEGABYTES, NUM_TRIPS = (1, 25), {1: 50, 25: 5}
OURS = "frames of Lockstep"

Ends = tuple[Callable[[Tensor], None], Callable[[Tensor], None]]
"""Sends a block; fills a block with one that has come."""


def frames(is_first: bool, pipe: Connection) -> Ends:
    ends = Frames(_connected(is_first, pipe), check=lambda: None)

    def send(block: Tensor) -> None:
        ends.send({"bytes": len(block)}, block)

    def receive(block: Tensor) -> None:
        assert ends.receive() == {"bytes": len(block)}
        ends.receive_into(block)

    return send, receive


def zeromq(is_first: bool, pipe: Connection) -> Ends:
    import zmq

    ends = zmq.Context().socket(zmq.PAIR)
    if is_first:
        pipe.send(ends.bind_to_random_port("tcp://127.0.0.1"))
    else:
        ends.connect(f"tcp://127.0.0.1:{pipe.recv()}")

    def receive(block: Tensor) -> None:
        block.copy_(torch.frombuffer(ends.recv(copy=False).buffer, dtype=torch.uint8))

    return lambda block: ends.send(block.numpy(), copy=False), receive


def gloo(is_first: bool, pipe: Connection) -> Ends:
    if is_first:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), 2, is_master=False)
    group = dist.ProcessGroupGloo(store, int(not is_first), 2, timedelta(seconds=60))
    other = int(is_first)

    def send(block: Tensor) -> None:
        group.send([block], other, 0).wait()

    def receive(block: Tensor) -> None:
        group.recv([block], other, 0).wait()

    return send, receive


def _connected(is_first: bool, pipe: Connection) -> socket.socket:
    if is_first:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
            connection, _ = listener.accept()
    else:
        connection = socket.create_connection(("127.0.0.1", pipe.recv()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `lockstep.workers.connections` has it
    return connection


CONTENDERS = {OURS: frames, "ZeroMQ": zeromq, "gloo": gloo}


def answer(names: list[str], pipe: Connection) -> None:
    """Give each block back that has come, in a process of its own."""
    torch.set_num_threads(1)
    ends = {name: CONTENDERS[name](False, pipe) for name in names}
    while asked := pipe.recv():
        name, size, num_trips = asked
        send, receive = ends[name]
        block = torch.empty(size, dtype=torch.uint8)
        for _ in range(num_trips):
            receive(block)
            send(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in CONTENDERS if name != "ZeroMQ" or find_spec("zmq")]
    here, there = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=answer, args=(names, there), daemon=True)
    other.start()
    ends = {name: CONTENDERS[name](True, here) for name in names}

    def trips(size: int, num_trips: int, name: str) -> float:
        send, receive = ends[name]
        block, back = torch.randint(256, (size,), dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        here.send((name, size, num_trips))
        began = time.perf_counter()
        for _ in range(num_trips):
            send(block)
            receive(back)
        seconds = time.perf_counter() - began
        assert torch.equal(block, back), f"{name} gave other bytes back"
        return 1000 * seconds / num_trips

    lines = []
    for megabytes in MEGABYTES:
        trip = partial(trips, megabytes * 1_000_000, NUM_TRIPS[megabytes])
        turns = take_turns(names, 1 if arguments.quick else arguments.rounds, trip)
        for name in names[1:]:
            line = compared({"ours": turns[OURS], "theirs": turns[name]})
            lines.append({"comparison": f"{megabytes} MB there and back, beside {name}", **line})
    here.send(None)
    for line in lines:
        show(line)
    if not arguments.quick:
        record(__file__, lines)


if __name__ == "__main__":
    main()
