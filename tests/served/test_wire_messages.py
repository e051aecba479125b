from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from lockstep.errors import InputError
from lockstep.served.wire import Frames, NoMessageError

Ends = tuple[Frames, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    frames = Frames(here)
    yield frames, there
    frames.close()
    there.close()


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def test_messages_and_blocks_come_as_they_were_sent() -> None:
    here, there = map(Frames, socket.socketpair())
    block = torch.randint(0, 256, (3_000_000,), dtype=torch.uint8)  # more than the sockets hold
    numbers = [0.1, 1e300, float("inf")]
    sending = threading.Thread(target=lambda: [here.send({"n": numbers}, block), here.send({"last": True})])
    sending.start()
    assert there.receive() == {"n": numbers}
    room = torch.zeros_like(block)
    there.receive_into(room)
    assert torch.equal(room, block)
    assert there.receive() == {"last": True}
    sending.join()
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("came", "said"),
    [
        (framed(b"[1]"), r"b'\[1\]'"),
        (framed(b'{"a": '), "a"),
        (framed(b"\xff\xfe"), "xff"),
        (framed(b"[" * 100_000), r"\[\["),
        (b"GET / HTTP/1.1\r\n\r\n", "a message of 542,393,671 bytes"),
    ],
)
def test_what_is_no_message_is_refused(ends: Ends, came: bytes, said: str) -> None:
    frames, there = ends
    there.sendall(came)
    with pytest.raises(NoMessageError, match=said):
        frames.receive()


def test_the_end_of_the_other_end_is_an_error_wherever_it_comes(ends: Ends) -> None:
    frames, there = ends
    there.sendall(framed(json.dumps({"a": 1}).encode()) + b"half")
    there.close()
    assert frames.receive() == {"a": 1}
    with pytest.raises(ConnectionError, match="closed"):
        frames.receive_into(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(ConnectionError, match="closed"):
        frames.receive()
    with pytest.raises(ConnectionError):
        frames.send({"a": 1}, torch.zeros(1 << 20, dtype=torch.uint8))


def test_a_wait_ends_with_what_the_check_raises() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    here, there = socket.socketpair()
    frames = Frames(here, check)
    with pytest.raises(KeyboardInterrupt):
        frames.receive()
    with pytest.raises(KeyboardInterrupt):  # nobody reads
        frames.send({}, torch.zeros(10 << 20, dtype=torch.uint8))
    frames.close()
    there.close()


def test_another_thread_can_end_a_wait(ends: Ends) -> None:
    frames, _ = ends
    threading.Timer(0.05, frames.shut_down).start()
    with pytest.raises(ConnectionError, match="closed"):
        frames.receive()


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(ends: Ends) -> None:
    frames, there = ends
    with pytest.raises(InputError, match="too large"):
        frames.send({"a": "b" * (17 << 20)})
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        there.recv(1)
