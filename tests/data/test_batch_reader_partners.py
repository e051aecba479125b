"""Augmentations that put several examples together: which are read for them, and what becomes of bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s, Shuffled, Weighted
from lockstep.data.rows import draw_partners
from lockstep.errors import DataError, InputError
from lockstep.randomness import Draws
from lockstep.runs.showing import Pipeline, examples
from lockstep.types import BadExample

SIZE, BATCH = 20, 5


class Image:
    """An image that is not decoded yet, and may be torn."""

    def __init__(self, number: int, torn: bool) -> None:
        self.number, self.torn = number, torn

    def decode(self) -> Tensor:
        if self.torn:
            raise DataError(f"file-{self.number} is torn.", given="half a file", expected="a whole one", hint="none")
        return torch.full((3, 2, 2), self.number, dtype=torch.uint8)


class Images:
    """Images of one number each; some cannot be read, others cannot be decoded."""

    cost = "memory"

    def __init__(self, unreadable: Sequence[int] = (), torn: Sequence[int] = ()) -> None:
        self.unreadable, self.torn = set(unreadable), set(torn)

    def __len__(self) -> int:
        return SIZE

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        for number in self.unreadable.intersection(indices.tolist()):
            Image(number, torn=True).decode()
        return {
            "number": torch.from_numpy(indices.copy()),
            "image": [Image(number, number in self.torn) for number in indices.tolist()],
        }

    def example_id(self, index: int) -> str:
        return f"file-{index}"


@dataclass(frozen=True)
class Joined:
    """Decodes images, and lists the numbers of those that are put together."""

    num_partners: int = 2
    p: float = 1.0
    into: str = "joined"

    def needs_partners(self, draws: Draws) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return draws.uniform(f"Joined {self.into}") < self.p

    def __call__(self, batch: dict[str, Any], draws: Draws, partners: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        joined = [[number] for number in batch["number"].tolist()]
        for partner in partners:
            for row, number, image in zip(
                np.flatnonzero(self.needs_partners(draws)), partner["number"].tolist(), partner["image"], strict=True
            ):
                image.decode()
                joined[row].append(number)
        for row, image in enumerate(batch["image"]):
            if len(joined[row]) > 1:
                image.decode()
        return {**batch, self.into: joined}


def drawn(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
    return {**batch, "drawn": torch.from_numpy(draws.uniform("drawn"))}


@dataclass(frozen=True)
class Compared(Joined):
    """Keeps the draws of an earlier augmentation, of the examples and of their partners."""

    def __call__(self, batch: dict[str, Any], draws: Draws, partners: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {**batch, "all drawn": torch.stack([each["drawn"] for each in (batch, *partners)], 1)}


def batches_of(reader: Images, *augment: Any, count: int = SIZE // BATCH, **arguments: Any) -> list[Any]:
    loader = Loader(reader, batch_size=BATCH, seed=3, augment=augment, num_processes=0, **arguments)
    batches = list(islice(loader.batches(range(1), 1), count))
    for batch in batches:
        loader.commit(batch)
    return batches


def joined(batches: list[Any], field: str = "joined") -> list[list[int]]:
    return [numbers for batch in batches for numbers in batch[field]]


def test_each_example_gets_others_of_its_epoch() -> None:
    for order in ("shuffled", "sequential"):
        for first, *others in joined(batches_of(Images(), Joined(), order=order)):
            assert len(others) == 2
            assert first not in others
    numbers = torch.tensor(joined(batches_of(Images(), Joined(), count=100)))
    assert all(set(numbers[:, column].tolist()) == set(range(SIZE)) for column in (1, 2))
    assert (numbers[:, 1] == numbers[:, 2]).float().mean() < 2 / SIZE


def test_partners_come_from_the_order() -> None:
    weights = [0.0, 1.0] * (SIZE // 2)
    assert all(
        number % 2 for numbers in joined(batches_of(Images(), Joined(), order=Weighted(weights))) for number in numbers
    )


def test_each_other_position_of_the_epoch_is_as_likely() -> None:
    rows = draw_partners(np.arange(400_000), 5, Shuffled(), 10, 0)
    assert (rows.places // 10 == rows.positions // 10).all()
    shifts = np.bincount((rows.places - rows.positions) % 10, minlength=10)
    assert shifts[0] == 0
    assert np.allclose(shifts[1:] / len(rows), 1 / 9, atol=2e-3)
    assert (rows.indices == Shuffled().indices(rows.places, 10, 0)).all()


def test_the_only_example_is_its_own_partner() -> None:
    rows = draw_partners(np.arange(3), 5, Shuffled(), 1, 0)
    assert (rows.places.tolist(), rows.indices.tolist()) == ([0, 1, 2], [0, 0, 0])


def test_earlier_augmentations_have_changed_them_with_draws_of_their_own() -> None:
    (batch,) = batches_of(Images(), drawn, Compared(), count=1)
    assert torch.equal(batch["all drawn"][:, 0], batch["drawn"])
    assert len(batch["all drawn"].unique()) == 3 * BATCH


def test_nothing_is_read_for_examples_that_need_no_partners() -> None:
    batches = batches_of(Images(), Joined(p=0.4), count=20)
    lengths = [len(numbers) for numbers in joined(batches)]
    assert set(lengths) == {1, 3}
    assert 0.3 < lengths.count(3) / len(lengths) < 0.5

    class Counting(Images):
        num_read = 0

        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            self.num_read += len(indices)
            return super().read_batch(indices)

    batches_of(reader := Counting(), Joined(p=0.4), count=20)
    assert reader.num_read == sum(lengths)
    batches_of(reader := Counting(), Joined(p=0.0), count=4)
    assert reader.num_read == SIZE


@pytest.mark.parametrize("kind", ["unreadable", "torn"])
@pytest.mark.parametrize("augment", [[Joined()], [Joined(into="first", num_partners=1), Joined()]])
def test_a_bad_partner_is_named_with_the_example_that_it_was_read_for(kind: str, augment: list[Any]) -> None:
    (first,) = batches_of(Images(), *augment, count=1)
    *_, bad = first["joined"][2]
    wanting = {numbers[0] for numbers in first["joined"] if bad in numbers}
    with pytest.raises(DataError) as caught:
        batches_of(Images(**{kind: [bad]}), *augment, count=1)
    assert caught.value.what == f"file-{bad} is torn."
    assert caught.value.given in {
        f"half a file; file-{bad} was read as a partner of file-{number}" for number in range(SIZE)
    }
    if len(augment) == 1:
        assert any(str(caught.value.given).endswith(f" of file-{number}") for number in wanting)


@pytest.mark.parametrize("kind", ["unreadable", "torn"])
def test_a_bad_example_is_not_taken_for_a_partner(kind: str) -> None:
    (first,) = batches_of(Images(), Joined(), count=1)
    partners = {number for _, *others in first["joined"] for number in others}
    bad = next(number for number, *_ in first["joined"] if number not in partners)
    with pytest.raises(DataError) as caught:
        batches_of(Images(**{kind: [bad]}), Joined(), count=1)
    assert (caught.value.what, caught.value.given) == (f"file-{bad} is torn.", "half a file")


def next_good_one(position: int, bad: set[int]) -> str:
    """The next readable example of the epoch after the one at a position, from its start on if there is none."""
    start = position - position % SIZE
    names = Loader(Images(), batch_size=BATCH, seed=3).example_ids(start, SIZE)
    following = names[position - start + 1 :] + names[: position - start]
    return next(name for name in following if int(name.removeprefix("file-")) not in bad)


@pytest.mark.parametrize("kind", ["unreadable", "torn"])
def test_bad_partners_are_replaced_and_reported(kind: str) -> None:
    bad = {2, 3, 11}
    whole, batches = (
        batches_of(Images(**files), drawn, Joined(p=0.8), count=12, bad_examples="skip")
        for files in ({}, {kind: sorted(bad)})
    )
    for due, read in zip(joined(whole), joined(batches), strict=True):
        assert len(read) == len(due)
        assert not bad.intersection(read[1:])
        assert bad.intersection(due) or read == due
    expected = [(number, due[0]) for due in joined(whole) for number in due[1:] if number in bad]
    reported = [example for batch in batches for example in batch.bad]
    found = [(example.example_id, example.partner_of) for example in reported if example.partner_of]
    assert sorted(found) == sorted((f"file-{number}", f"file-{wanted_by}") for number, wanted_by in expected)
    for example in reported:
        assert example.reason == f"{example.example_id} is torn. half a file"
        assert example.replaced_by == next_good_one(example.position, bad)


@pytest.mark.parametrize("kind", ["unreadable", "torn"])
def test_bad_partners_of_partners_are_replaced(kind: str) -> None:
    bad = {2, 3, 11}
    augment = [Joined(into="first", num_partners=1), Joined()]
    batches = batches_of(Images(**{kind: sorted(bad)}), *augment, count=12, bad_examples="skip")
    assert not bad.intersection(
        number for field in ("first", "joined") for row in joined(batches, field) for number in row
    )


@pytest.mark.parametrize("kind", ["unreadable", "torn"])
def test_what_stands_in_does_not_depend_on_the_batch(kind: str) -> None:
    augment = [Joined(into="first", num_partners=1, p=0.7), Joined(p=0.7)]
    make = partial(Loader, Images(**{kind: [2, 3, 11]}), seed=3, augment=augment, num_processes=0, bad_examples="skip")

    def stream(batch_size: int, start: int = 0) -> list[Any]:
        loader = make(batch_size=batch_size)
        loader.position = start
        batches = list(islice(loader.batches(range(1), 1), (60 - start) // batch_size))
        return [
            row
            for batch in batches
            for row in zip(batch["number"].tolist(), batch["first"], batch["joined"], strict=True)
        ]

    alone = stream(1)
    assert stream(5) == stream(12) == alone
    assert stream(4, start=20) == alone[20:]


def test_a_replaced_partner_does_not_rename_the_example_of_its_place() -> None:
    loader = Loader(Images(), batch_size=BATCH, seed=3)
    names = loader.example_ids(0, SIZE)
    assert loader.example_ids(0, SIZE, [BadExample(4, names[4], "torn", "file-0", partner_of=names[1])]) == names
    loader.add_bad([BadExample(4, names[4], "torn", "file-0", partner_of=names[1])])
    assert list(loader.quarantine.reasons) == [int(names[4].removeprefix("file-"))]


def test_an_evaluation_draws_no_partners() -> None:
    loader = Loader(Images(), batch_size=BATCH, augment=Joined(), num_processes=0)
    with pytest.raises(InputError, match="Examples that are scored have no partners"):
        next(loader.evaluation_batches(4))
    with pytest.raises(InputError, match="Joined needs other examples of the epoch"):
        IterableLoader([{"number": 1}], batch_size=1, augment=Joined())


def test_examples_are_shown_with_the_partners_that_they_have_in_a_run() -> None:
    def pixels(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return {**batch, "image": torch.stack([image.decode() for image in batch["image"]])}

    @dataclass(frozen=True)
    class Added(Joined):
        def __call__(
            self, batch: dict[str, Any], draws: Draws, partners: Sequence[dict[str, Any]] = ()
        ) -> dict[str, Any]:
            return {**batch, "image": batch["image"] + sum(each["image"] * 3 for each in partners)}

    class Decoded(Images):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            return pixels(super().read_batch(indices), Draws(0, indices))

    (batch,) = batches_of(Decoded(), Added(), count=1)
    shown = list(examples(Decoded(), range(BATCH), seed=3, pipeline=Pipeline([Added()], fields=("image",))))
    assert torch.equal(torch.stack([each.augmented[-1].pixels for each in shown]), batch["image"])
