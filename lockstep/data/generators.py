"""The random generators of the process, seeded for each example: for code that draws from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lockstep.randomness import key_of, mix

_KEY = key_of("global generators")


def seed_generators(seed: int, position: int) -> None:
    """Seed Python's, numpy's and torch's generators by a hash of the seed and the position of an example."""
    key = mix(seed, position, _KEY)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Leave the three generators as they were."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(of_torch)
