"""The law of the stream: each example exactly once per epoch, whoever reads it, in how many parts, after any resume.

A new reader, order or augmentation is held to it by one more line in `CASES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.augment import RandomShift
from lockstep.data.loader import Loader
from lockstep.data.order import Sequential, Shuffled

MakeLoader = Callable[..., Loader]
Row = tuple[Any, ...]


def rows_of(batch: dict[str, Any]) -> list[Row]:
    """The examples of a batch, each as bits that can be compared and counted."""
    length = len(next(iter(batch.values())))
    return [tuple((name, _bits(value[row])) for name, value in batch.items()) for row in range(length)]


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).numpy().tobytes()
    return value


def stream_of(loader: Loader, num_rows: int, dealing: Iterable[range] = (range(1),)) -> list[Row]:
    """The first rows of the stream, put together from workers with these towers."""
    dealing = list(dealing)
    num_towers = dealing[-1].stop
    num_batches = -(-num_rows // loader.batch_size)
    parts = []
    for towers in dealing:
        batches = loader.batches(towers, num_towers)
        parts.append([rows_of(batch) for batch in islice(batches, num_batches)])
        batches.close()
    return [row for step in zip(*parts, strict=True) for part in step for row in part]


def assert_each_example_once(make_loader: MakeLoader) -> None:
    """Every epoch holds each example of the reader once, under its own name."""
    loader = make_loader(augment=None)
    size = loader.epoch_size
    indices = np.arange(size)
    ids = [loader.reader.example_id(int(index)) for index in indices]
    assert len(set(ids)) == size
    row_of = dict(zip(ids, rows_of(loader.reader.read_batch(indices)), strict=True))
    stream = stream_of(loader, 3 * size)
    for epoch in range(3):
        names = loader.example_ids(epoch * size, size)
        assert Counter(names) == Counter(ids)
        assert stream[epoch * size : (epoch + 1) * size] == [row_of[name] for name in names]


def assert_same_for_any_number_of_processes(make_loader: MakeLoader) -> None:
    """The stream does not depend on who reads it, nor on how far ahead."""
    num_rows = 2 * make_loader().epoch_size
    alone = stream_of(make_loader(num_processes=0), num_rows)
    for num_processes, prefetch in ((1, 1), (2, 2), (3, 4)):
        assert stream_of(make_loader(num_processes=num_processes, prefetch=prefetch), num_rows) == alone


def assert_same_for_any_dealing_of_towers(make_loader: MakeLoader) -> None:
    """The rows of the workers, put together, are the stream of one worker with one tower."""
    loader = make_loader(batch_size=8)
    num_rows = 2 * loader.epoch_size
    alone = stream_of(loader, num_rows)
    for dealing in (
        [range(8)],
        [range(4), range(4, 8)],
        [range(3), range(3, 6), range(6, 8)],
        [range(1), range(1, 4)],
        [range(tower, tower + 1) for tower in range(8)],
    ):
        assert stream_of(loader, num_rows, dealing) == alone


def assert_resumes_anywhere(make_loader: MakeLoader) -> None:
    """Stopped after any batch and resumed, also with another batch size, the rest of the stream comes."""
    whole = make_loader()
    num_batches = 2 * whole.epoch_size // whole.batch_size + 2
    num_rows = num_batches * whole.batch_size
    stream = stream_of(whole, num_rows)
    for batch in islice(whole.batches(range(1), 1), num_batches):
        for batch_size in (whole.batch_size, 5):
            resumed = make_loader(batch_size=batch_size)
            resumed.load_state(whole.state())
            rest = stream[batch.position :]
            assert stream_of(resumed, len(rest))[: len(rest)] == rest
        batch.attempted()
    assert whole.position == num_rows


def assert_stream_exact(make_loader: MakeLoader) -> None:
    """Hold a loader to the whole law; `make_loader(**changes)` makes it anew with some arguments changed."""
    assert_each_example_once(make_loader)
    assert_same_for_any_number_of_processes(make_loader)
    assert_same_for_any_dealing_of_towers(make_loader)
    assert_resumes_anywhere(make_loader)


class Pictures:
    """Small pictures and their numbers."""

    def __init__(self, size: int, cost: str) -> None:
        self.size, self.cost = size, cost

    def __len__(self) -> int:
        return self.size

    def read_batch(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
        number = torch.from_numpy(indices)
        pixels = (number[:, None] * 7 + torch.arange(12) + 1).to(torch.uint8)
        return {
            "image": pixels.view(-1, 1, 3, 4),
            "label": number % 3,
            "name": [f"picture {index}" for index in indices],
        }

    def example_id(self, index: int) -> str:
        return f"picture {index}"


# Sizes that divide by no batch size, that do, and below one batch.
CASES = {
    "memory shuffled": partial(Loader, Pictures(23, "memory"), batch_size=4, seed=3),
    "memory augmented": partial(Loader, Pictures(16, "memory"), batch_size=4, augment=RandomShift(2)),
    "memory sequential": partial(Loader, Pictures(3, "memory"), batch_size=4, order=Sequential()),
    "decoded augmented": partial(Loader, Pictures(11, "decode"), batch_size=4, num_processes=2, augment=RandomShift(1)),
    "one example": partial(Loader, Pictures(1, "memory"), batch_size=2, order=Shuffled(), augment=RandomShift(1)),
}


@pytest.mark.parametrize("make_loader", CASES.values(), ids=CASES)
def test_the_stream_is_exact(make_loader: MakeLoader) -> None:
    assert_stream_exact(make_loader)


def test_the_law_sees_a_draw_that_depends_on_the_process() -> None:
    class Forgetful:
        """Draws from a generator with a state, as the stream must not."""

        def __call__(self, batch: dict[str, Any], draws: Any) -> dict[str, Any]:
            return {**batch, "noise": torch.rand(len(batch["label"]))}

    with pytest.raises(AssertionError):
        assert_same_for_any_number_of_processes(partial(CASES["decoded augmented"], augment=Forgetful()))


def test_the_law_sees_an_order_that_repeats_an_example() -> None:
    class Stuck:
        def indices(self, positions: Any, size: int, seed: int) -> Any:
            return np.minimum(positions % size, size - 2)

    with pytest.raises(AssertionError):
        assert_each_example_once(partial(CASES["memory shuffled"], order=Stuck()))
