from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from lockstep.workers.channel import Channel


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pair(sockets: tuple[socket.socket, socket.socket]) -> tuple[Channel, Channel]:
    return Channel(sockets[0]), Channel(sockets[1])


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    sent = [{"step": step, "text": "ä\n" * 1000} for step in range(20)]
    for message in sent:
        theirs.send(message)
    assert ours.receive() == sent
    assert not ours.ended


def test_half_a_message_waits_for_its_other_half(sockets: tuple[socket.socket, socket.socket]) -> None:
    channel, theirs = Channel(sockets[0]), sockets[1]
    theirs.sendall(b'{"step": 1}\n{"st')
    assert channel.receive() == [{"step": 1}]
    theirs.sendall(b'ep": 2}\n')
    assert channel.receive() == [{"step": 2}]


def test_messages_that_came_with_the_first_are_left_for_the_next_call(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    for step in range(3):
        theirs.send({"step": step})
    assert ours.receive(1.0, most=1) == [{"step": 0}]
    assert ours.receive() == [{"step": 1}, {"step": 2}]


def test_what_was_sent_before_the_end_is_received(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    theirs.send({"failed": "why"})
    theirs.close()
    assert ours.receive() == [{"failed": "why"}]
    assert ours.ended
    assert ours.receive(timeout_seconds=60.0) == []
    ours.send({"stop": "SIGINT"})


def test_an_end_with_unread_data_is_an_end(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    ours.send({"stop": "SIGINT"})
    theirs.close()
    assert ours.receive() == []
    assert ours.ended
