"""Partitions: hosts that reach that of the chief, but not each other; found by connections that their workers try.

A launcher hears from host 0 alone, so nobody is missed; the workers of all hosts wait in the exchange, for packets that
do not come. When all of them have waited for some seconds, one worker of each host listens at a port of no meaning, and
connects to the ports of the others, as gloo and NCCL do. `lockstep.workers.network` has their part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.workers.channel import Message

_ANSWER_SECONDS = 10.0
"""In which workers say what they have reached: twice as long as they try."""

Orders = list[tuple[int, Mapping[str, object]]]
"""Messages, each with the number of the worker that is to get it."""


class Gap(NamedTuple):
    """One worker does not reach another one."""

    number: int
    other: int
    why: str


class ConnectionTrial:
    """One trial of all connections between the hosts.

    Args:
        numbers: of a worker on each host, that of the chief's host first.
        now: seconds of a clock that only grows.
    """

    def __init__(self, numbers: Sequence[int], now: float) -> None:
        self.numbers, self._deadline = list(numbers), now + _ANSWER_SECONDS
        self._places: dict[int, Sequence[object]] = {}
        self._unreached: dict[int, list[Gap]] = {}

    def begin(self) -> Orders:
        """What the workers are told first: to listen."""
        return [(number, {"trial": "listen"}) for number in self.numbers]

    def take(self, number: int, message: Message) -> Orders:
        """Take in an answer of a worker; returns what they are told by then."""
        if "listens" in message:
            self._places[number] = [number, *message["listens"]]
            if len(self._places) < len(self.numbers):
                return []
            others = {each: [self._places[other] for other in self.numbers if other != each] for each in self.numbers}
            return [(each, {"trial": "connect", "places": places}) for each, places in others.items()]
        self._unreached[number] = [Gap(number, int(other), str(why)) for other, why in message["unreached"]]
        return []

    def is_over(self, now: float) -> bool:
        """Whether all have answered, or have had the time to."""
        return len(self._unreached) == len(self.numbers) or now > self._deadline

    def end(self) -> Orders:
        """What the workers are told last: to listen no longer."""
        return [(number, {"trial": "end"}) for number in self.numbers]

    @property
    def gaps(self) -> list[Gap]:
        """Who does not reach whom, as far as it is known."""
        return [gap for number in self.numbers for gap in self._unreached.get(number, ())]


def left_out(gaps: Sequence[Gap], numbers: Sequence[int]) -> list[int]:
    """Choose the workers to go on without, so that the others reach each other: few, and never the first.

    Args:
        gaps: between workers of different hosts.
        numbers: of a worker on each host, that of the chief's host first.
    """
    pairs = {frozenset((gap.number, gap.other)) for gap in gaps}
    chosen: list[int] = []
    while pairs:
        counts = Counter(number for pair in pairs for number in pair if number != numbers[0])
        chosen.append(max(counts, key=lambda number: (counts[number], numbers.index(number))))
        pairs = {pair for pair in pairs if chosen[-1] not in pair}
    return chosen
