from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.augmentations.pixels import RandomErasing
from lockstep.errors import InputError
from lockstep.images.normalisation import normalize
from lockstep.randomness import Draws

HEIGHT, WIDTH = 40, 60


def draws(count: int, start: int = 0) -> Draws:
    return Draws(3, np.arange(start, start + count))


def white(count: int, height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    return torch.full((count, 3, height, width), 255, dtype=torch.uint8)


def erased_from(images: torch.Tensor, augment: RandomErasing) -> torch.Tensor:
    """Where the images are no longer white: bools of shape (batch, height, width)."""
    found = augment({"image": images}, draws(len(images)))["image"]
    return (found != images).any(1)


def test_a_rectangle_of_some_images_is_erased() -> None:
    images = white(1000)
    erased = erased_from(images, RandomErasing(fill="black"))
    rows, columns = erased.any(2).sum(1), erased.any(1).sum(1)
    assert torch.equal(rows * columns, erased.sum((1, 2)))
    assert 430 < (rows > 0).sum() < 570
    assert (images == 255).all()


def test_rectangles_have_the_area_and_the_aspect_of_the_law() -> None:
    erased = erased_from(white(1, 100, 100).expand(1500, -1, -1, -1), RandomErasing(1, (0.1, 0.3), fill="black"))
    rows, columns = erased.any(2).sum(1), erased.any(1).sum(1)
    share, logarithm = rows * columns / 1e4, torch.log(rows / columns)
    assert share.min() > 0.09
    assert share.max() < 0.31
    assert abs(share.mean() - 0.2) < 0.01
    assert abs(share.std() - 0.2 / 12**0.5) < 0.005
    # Those that do not fit are drawn again: both ends of the aspect are a little rarer, alike.
    assert logarithm.abs().max() < np.log(3.3) + 0.1
    assert abs(logarithm.mean()) < 0.05
    assert 0.55 < logarithm.std() < 2 * np.log(3.3) / 12**0.5 + 0.02
    assert erased.any(2)[:, 0].any()
    assert erased.any(2)[:, -1].any()
    middle = erased.float().mean(0)
    assert abs(middle[:50].mean() - middle[50:].mean()) < 0.02
    assert abs(middle[:, :50].mean() - middle[:, 50:].mean()) < 0.02


def test_where_no_rectangle_fits_the_image_stays() -> None:
    assert not erased_from(white(50), RandomErasing(1, (1.0, 1.0), (1.0, 1.0), "black")).any()
    assert not erased_from(white(50, 1, 1), RandomErasing(1, fill="black")).any()


@pytest.mark.parametrize(("p", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_images_are_erased_never_or_always(p: float, share: float) -> None:
    assert erased_from(white(50), RandomErasing(p, fill="black")).flatten(1).any(1).float().mean() == share


def test_the_mean_colour_becomes_nothing_once_it_is_normalised() -> None:
    images = white(20)
    found = RandomErasing(1)({"image": images}, draws(20))["image"]
    erased = (found != images).any(1)
    assert normalize(found).movedim(1, -1)[erased].abs().max() < 0.01


def test_noise_has_all_values_alike_and_is_its_own_in_each_image() -> None:
    images = white(60)
    found = RandomErasing(1, (0.3, 0.33), fill="noise")({"image": images}, draws(60))["image"]
    erased = (found != images).any(1)
    values = found.movedim(1, -1)[erased].flatten()
    counts = torch.bincount(values, minlength=256)
    assert counts.min() > 0.7 * len(values) / 256
    assert counts.max() < 1.3 * len(values) / 256
    firsts = {one.movedim(0, -1)[where][:4].numpy().tobytes() for one, where in zip(found, erased, strict=True)}
    assert len(firsts) == 60


@pytest.mark.parametrize("fill", ["mean", "black", "noise"])
def test_an_example_depends_on_its_own_draws_alone(fill: str) -> None:
    images = white(20)
    augment = RandomErasing(fill=fill)
    whole = augment({"image": images, "label": 3}, draws(20))
    assert whole["label"] == 3
    for row in range(20):
        alone = augment({"image": images[row : row + 1]}, draws(1, start=row))["image"]
        assert torch.equal(alone[0], whole["image"][row])


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"label": 0}, "missing; the fields are label"),
        ({"image": torch.zeros(2, 3, 4, 4)}, r"a tensor of shape \(2, 3, 4, 4\), torch.float32"),
    ],
)
def test_erasing_refuses_fields_without_decoded_images(batch: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=f"RandomErasing finds no decoded images(.|\n)*{found}"):
        RandomErasing()(batch, draws(2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomErasing(-0.1), "p is out of range"),
        (lambda: RandomErasing(scale=(0.1, 1.2)), r"scale\[1\] is out of range"),
        (lambda: RandomErasing(scale=(0.2, 0.1)), "scale is out of range"),
        (lambda: RandomErasing(ratio=(0, 1)), r"ratio\[0\] is out of range"),
        (lambda: RandomErasing(ratio=2), "ratio is of the wrong type"),  # type: ignore[arg-type]
        (lambda: RandomErasing(fill="white"), "fill cannot be 'white'"),
    ],
)
def test_parameters_of_erasing_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
