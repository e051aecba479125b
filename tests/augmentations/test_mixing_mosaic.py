"""Four images around a point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from painted_scenes import batch_of, check_in_step, labels_of, scene

from lockstep.augmentations.mixing import Mosaic
from lockstep.errors import InputError
from lockstep.images.fields import decoded
from lockstep.images.moves import Region
from lockstep.images.resizing import resized
from lockstep.randomness import Draws

Numbers = st.integers(0, 10_000)


def draws(seed: int, count: int) -> Draws:
    return Draws(seed, np.arange(count))


def put_together(augment: Mosaic, first: int, seed: int, count: int = 3, **sides: Any) -> tuple[list[Any], Any]:
    """A batch and its partners, and what becomes of them."""
    with_partners = int(augment.needs_partners(draws(seed, count)).sum())
    batches = [
        batch_of([scene(first + 10 * part + row, **sides) for row in range(each)])
        for part, each in enumerate([count, *[with_partners] * 3])
        if each
    ]
    return batches, augment(batches[0], draws(seed, count), batches[1:])


@settings(max_examples=25)
@given(Numbers, Numbers, st.sampled_from([0.0, 0.6, 1.0]))
def test_everything_is_moved_together(first: int, seed: int, p: float) -> None:
    augment = Mosaic(size=20, p=p)
    (batch, *partners), found = put_together(augment, first, seed)
    check_in_step(found, painted=False)
    rows = augment.needs_partners(draws(seed, 3))
    places = np.cumsum(rows) - 1
    for row, (before, after) in enumerate(zip(labels_of(batch), labels_of(found), strict=True)):
        theirs = [labels_of(partner)[places[row]] for partner in partners] if rows[row] else []
        given_labels = [*before, *(label for each in theirs for label in each)]
        assert [label for label in given_labels if label in after] == after
        assert rows[row] or (found["image"][row] is batch["image"][row] and before == after)
        assert not rows[row] or found["image"][row].shape == (3, 40, 40)


@settings(max_examples=25)
@given(Numbers, Numbers)
def test_images_of_the_size_lie_around_the_point_pixel_by_pixel(first: int, seed: int) -> None:
    """Nothing is resized then, so that pixels, masks, boxes and keypoints agree to the pixel."""
    (batch, *partners), found = put_together(Mosaic(size=20, min_overlap=0.0), first, seed, sides=(20, 20))
    check_in_step(found)
    least, most = 10, 30
    for row, image in enumerate(found["image"]):
        four = [decoded(each["image"][row]) for each in (batch, *partners)]
        middles = [
            (y, x)
            for y in range(least, most)
            for x in range(least, most)
            if torch.equal(image[:, y : y + 1, x : min(x + 20, 40)], four[3][:, :1, : min(20, 40 - x)])
            and torch.equal(image[:, max(y - 20, 0) : y, x - 1], four[0][:, max(20 - y, 0) :, 19])
        ]
        assert middles
        y, x = middles[0]
        assert torch.equal(
            image[:, max(y - 20, 0) : y, max(x - 20, 0) : x], four[0][:, max(20 - y, 0) :, max(20 - x, 0) :]
        )
        assert torch.equal(image[:, y : y + 20, x : x + 20], four[3][:, : 40 - y, : 40 - x])
        covered = min(y, 20) + min(40 - y, 20), min(x, 20) + min(40 - x, 20)
        assert int((image == 114).all(0).sum()) >= 1600 - covered[0] * covered[1]


def test_the_long_side_gets_the_size_and_what_is_seen_alone_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Region] = []
    kind = type(batch_of([scene(0)])["image"][0])
    decode = kind.decode

    def noting(self: Any, region: Region | None = None, at_least: Any = None) -> Any:
        assert region is not None
        asked.append(region)
        return decode(self, region, at_least)

    monkeypatch.setattr(kind, "decode", noting)
    (batch, *_), found = put_together(Mosaic(size=20, center=(0.5, 0.5)), 4, 1, count=1, sides=(40, 20))
    # Of the image above and left of the point at (10, 10), scaled by a half: its last 10 of 20 rows, all 10 columns.
    assert asked[0] == Region(20, 0, 20, 20)
    monkeypatch.undo()
    part = batch["image"][0].decode(Region(20, 0, 20, 20))
    assert torch.equal(found["image"][0][:, :10, :10], resized(part, 10, 10))


def test_the_point_is_anywhere_in_the_middle() -> None:
    whites = [np.full((20, 20, 3), value, np.uint8) for value in (10, 20, 30, 40)]
    parts = [batch_of([{**scene(0, sides=(20, 20), count=0), "pixels": white}] * 300) for white in whites]
    found = Mosaic(size=20)(parts[0], draws(3, 300), parts[1:])
    tops = np.array([int(((image[0] == 10) | (image[0] == 20)).any(1).nonzero().max()) + 1 for image in found["image"]])
    assert (tops.min(), tops.max()) == (10, 29)
    assert (np.histogram(tops, 4, (10, 30))[0] > 45).all()


def test_objects_of_which_too_little_is_left_are_dropped() -> None:
    one = scene(3, sides=(20, 20), count=1)
    parts = [batch_of([one] * 50) for _ in range(4)]
    few, many = (
        sum(map(len, labels_of(Mosaic(size=20, min_overlap=least)(parts[0], draws(3, 50), parts[1:]))))
        for least in (0.99, 0.0)
    )
    assert few < many <= 200


def test_a_mosaic_without_partners_or_objects_is_refused() -> None:
    batch = batch_of([scene(0)])
    with pytest.raises(InputError, match="Mosaic needs other examples"):
        Mosaic()(batch, draws(0, 1))
    with pytest.raises(InputError, match="Mosaic finds no objects on the images"):
        Mosaic()({"image": batch["image"]}, draws(0, 1), [batch] * 3)
