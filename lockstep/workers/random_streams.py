"""Random streams of a tower: the global generators of torch, numpy and Python, seeded for it and restored after it.

Each tower draws from streams seeded for it, so that its numbers depend neither on the worker that hosts it nor on what
was drawn before; then the caller's streams go on where they were. That happens in every step, and by the public
functions it is slow: `get_state` and `set_state` take 70 us in numpy and 11 us in Python. So numpy's functions are
given another generator meanwhile, and the state of Python's is copied as memory, where it lies as in CPython.
"""

from __future__ import annotations

import ctypes
import random
import struct
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.workers.devices import generators

_numpy: Any = np.random
"""Its stubs leave out `get_bit_generator` and `set_bit_generator`."""
_NUM_WORDS = 624
"""Numbers of 32 bits in the state of a Mersenne twister, which is what both numpy and Python use."""
_NUM_BYTES = 4 * (_NUM_WORDS + 1)
"""With the counter beside them."""


class RandomStreams:
    """The global generators of torch (of the CPU and of the towers' device), numpy and Python."""

    def __init__(self, device: torch.device) -> None:
        self._torch = generators(device)
        self._numpy, self._python = _NumpyStream(), _PythonStream()
        self._kept: list[Tensor] = []

    def set_aside(self) -> None:
        """Save the state of the streams."""
        self._kept = [generator.get_state() for generator in self._torch]
        self._python.set_aside()
        self._numpy.set_aside()

    def seed(self, key: int) -> None:
        """Seed all streams with a key of 64 bits, after they are set aside."""
        for generator in self._torch:
            generator.manual_seed(key)
        random.seed(key)
        # The high half: from the low one numpy would draw the same words as torch does on the CPU.
        np.random.seed(key >> 32)

    def marks(self) -> tuple[object, object] | None:
        """Return marks of numpy's and Python's streams, set aside, each another one once numbers are drawn from it.

        A mark is a word of the state with what counts the words used. None if they cannot be read.
        """
        numpy, python = self._numpy.mark(), self._python.mark()
        return None if numpy is None or python is None else (numpy, python)

    def put_back(self) -> None:
        """Restore the state of the streams."""
        self._numpy.put_back()
        self._python.put_back()
        for generator, state in zip(self._torch, self._kept, strict=True):
            generator.set_state(state)


class _NumpyStream:
    """The stream of numpy's global functions, which draw from another generator while the caller's is set aside."""

    def __init__(self) -> None:
        self._other = np.random.MT19937(0)
        self._other_words = _memory(self._other.ctypes.state_address).cast("I")
        self._callers: Any = None
        self._memory: memoryview | None = None
        self._second_normal: float | None = None

    def set_aside(self) -> None:
        """Let numpy's functions draw from the other generator."""
        callers = _numpy.get_bit_generator()
        if callers is not self._callers:
            is_twister = isinstance(callers, np.random.MT19937)
            self._memory = _memory(callers.ctypes.state_address) if is_twister else None
            self._callers = callers
        self._second_normal = self._kept_normal()
        _numpy.set_bit_generator(self._other)

    def mark(self) -> tuple[int, int] | None:
        """Return the first word and the counter of the other generator; None where they draw from another one."""
        words = self._other_words
        return (words[0], words[_NUM_WORDS]) if _numpy.get_bit_generator() is self._other else None

    def put_back(self) -> None:
        """Let them draw from the caller's again."""
        _numpy.set_bit_generator(self._callers)
        if self._second_normal is not None:
            state = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": self._second_normal})

    def _kept_normal(self) -> float | None:
        """Numpy makes normal numbers in pairs, keeps the second, and forgets it when the generator changes."""
        if self._memory is None:
            state: dict[str, Any] = np.random.get_state(legacy=False)
            return state["gauss"] if state["has_gauss"] else None
        # To ask for the state takes 30 us, to draw a number 1: one that was kept leaves the generator as it is.
        words = bytes(self._memory)
        normal = np.random.standard_normal()
        if bytes(self._memory) == words:
            return normal
        self._memory[:] = words
        return None


class _PythonStream:
    """The stream of the functions in `random`."""

    def __init__(self) -> None:
        self._memory = _memory_of_python()
        self._words = self._memory and self._memory.cast("I")
        self._kept: Any = None
        self._second_normal: float | None = None

    def set_aside(self) -> None:
        if self._memory is None:
            self._kept = random.getstate()
        else:
            self._kept, self._second_normal = bytes(self._memory), _python().gauss_next

    def mark(self) -> tuple[int, int, float | None] | None:
        """Return its counter, its last word and a number kept; None where it is not laid out as it is known to be."""
        words = self._words
        return None if words is None else (words[0], words[_NUM_WORDS], _python().gauss_next)

    def put_back(self) -> None:
        if self._memory is None:
            random.setstate(self._kept)
        else:
            self._memory[:], _python().gauss_next = self._kept, self._second_normal


def _python() -> Any:
    return random.getstate.__self__  # type: ignore[attr-defined]


@cache
def _memory_of_python() -> memoryview | None:
    """The state of Python's generator, in place; None where it is not laid out as it is known to be."""
    header = object.__basicsize__
    if random.Random.__basicsize__ < header + _NUM_BYTES:
        return None
    memory = _memory(id(_python()) + header)
    *words, count = random.getstate()[1]
    return memory if bytes(memory) == struct.pack(f"i{_NUM_WORDS}I", count, *words) else None


def _memory(address: int) -> memoryview:
    return memoryview((ctypes.c_char * _NUM_BYTES).from_address(address)).cast("B")
