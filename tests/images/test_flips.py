from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.errors import InputError
from lockstep.images.augment import HorizontalFlip
from lockstep.randomness import Draws


def draws(count: int, start: int = 0) -> Draws:
    return Draws(0, np.arange(start, start + count))


def images(count: int) -> torch.Tensor:
    return torch.arange(count * 3 * 2 * 4).reshape(count, 3, 2, 4)


def test_some_are_flipped_and_the_rest_are_not() -> None:
    before = images(1000)
    given = before.clone()
    after = HorizontalFlip()({"image": before}, draws(1000))["image"]
    flipped = [torch.equal(one, other.flip(-1)) for one, other in zip(after, before, strict=True)]
    kept = [torch.equal(one, other) for one, other in zip(after, before, strict=True)]
    assert all(one != other for one, other in zip(flipped, kept, strict=True))
    assert 430 < sum(flipped) < 570
    assert torch.equal(before, given)


@pytest.mark.parametrize(("p", "flips"), [(0, False), (1, True)])
def test_never_and_always(p: float, flips: bool) -> None:
    before = images(5)
    after = HorizontalFlip(p)({"image": before, "label": 3}, draws(5))
    assert torch.equal(after["image"], before.flip(-1) if flips else before)
    assert after["label"] == 3


def test_a_row_depends_on_its_own_draws_alone() -> None:
    whole = HorizontalFlip()({"image": images(20)}, draws(20))["image"]
    part = HorizontalFlip()({"image": images(20)[5:9]}, draws(4, start=5))["image"]
    assert torch.equal(part, whole[5:9])


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_no_probability_is_refused(p: float) -> None:
    with pytest.raises(InputError, match="p is out of range"):
        HorizontalFlip(p)


@pytest.mark.parametrize(
    ("batch", "found"),
    [({"label": 0}, "missing"), ({"image": [b""]}, "list"), ({"image": torch.zeros(2, 3)}, r"shape \(2, 3\)")],
)
def test_what_is_no_batch_of_images_is_refused(batch: dict[str, object], found: str) -> None:
    with pytest.raises(InputError, match=f"finds no images(.|\n)*{found}(.|\n)*crop or resize encoded images first"):
        HorizontalFlip()(batch, draws(2))
