"""Zooming in and out, as torchvision does it: objects go where the pixels go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from painted_scenes import batch_of, check_in_step, labels_of, pixels_of, scene

from lockstep.augmentations.zoom import FixedSizeCrop, RandomIoUCrop, RandomZoomOut, ScaleJitter
from lockstep.errors import InputError
from lockstep.images.decode import EncodedImage
from lockstep.randomness import Draws

Numbers = st.integers(0, 10_000)


def draws(seed: int, count: int) -> Draws:
    return Draws(seed, np.arange(count))


def some(first: int, count: int = 4, **options: Any) -> dict[str, Any]:
    return batch_of([scene(number) for number in range(first, first + count)], **options)


@settings(max_examples=25)
@given(Numbers, Numbers, st.booleans())
def test_everything_is_moved_together_and_objects_are_never_added(first: int, seed: int, files: bool) -> None:
    batch = some(first, files=files)
    for augment in (RandomZoomOut(), RandomIoUCrop(), FixedSizeCrop((20, 24)), FixedSizeCrop((9, 50), fill=(1, 2, 3))):
        found = augment(batch, draws(seed, 4))
        check_in_step(found)
        for before, after in zip(labels_of(batch), labels_of(found), strict=True):
            assert [label for label in before if label in after] == after
        batch = found if isinstance(augment, RandomZoomOut) else batch
    resized = ScaleJitter((30, 40))(batch, draws(seed, 4))
    check_in_step(resized, painted=False)
    assert labels_of(resized) == labels_of(batch)


def test_scale_jitter_keeps_the_aspect_and_draws_every_scale() -> None:
    batch = batch_of([scene(3, sides=(30, 20))] * 400)
    found = ScaleJitter((60, 60), scale_range=(0.5, 1.5))(batch, draws(1, 400))
    sides = np.array([image.shape[1:] for image in found["image"]])
    assert sides[:, 0].min() == 30
    assert sides[:, 0].max() == 89
    assert (np.abs(sides[:, 1] - sides[:, 0] * 2 / 3) <= 1).all()
    assert (np.histogram(sides[:, 0], 4, (30, 90))[0] > 70).all()


def test_a_fixed_size_is_cut_out_at_random_places_or_filled_up_at_the_end() -> None:
    batch = batch_of([scene(3, sides=(30, 20))] * 200)
    pixels = batch["image"][0].decode()
    found = FixedSizeCrop((28, 24), fill=(9, 8, 7))(batch, draws(1, 200))["image"]
    assert found.shape == (200, 3, 28, 24)
    assert (found[:, :, :, 20:] == torch.tensor([9, 8, 7], dtype=torch.uint8)[:, None, None]).all()
    tops = [next(top for top in range(3) if torch.equal(each[:, :, :20], pixels[:, top : top + 28])) for each in found]
    assert all(count > 40 for count in np.bincount(tops))


def test_zoomed_out_images_lie_on_a_canvas_of_one_to_four_times_their_sides() -> None:
    batch = batch_of([scene(3, sides=(12, 13))] * 150)
    found = RandomZoomOut(fill=(1, 2, 3))(batch, draws(5, 150))
    sides = np.array(
        [image.decode().shape[1:] if isinstance(image, EncodedImage) else image.shape[1:] for image in found["image"]]
    )
    is_same = np.array([image is given for image, given in zip(found["image"], batch["image"], strict=True)])
    assert 0.4 < is_same.mean() < 0.6
    assert (sides[is_same] == (12, 13)).all()
    assert sides[~is_same].min() >= 12
    assert sides.max() in range(48, 53)
    twice = RandomZoomOut(fill=(1, 2, 3), side_range=(2, 2), p=1.0)(batch, draws(5, 150))
    assert {tuple(image.shape[1:]) for image in twice["image"]} == {(24, 26)}
    assert torch.equal(twice["area"].values, batch["area"].values)
    for image in twice["image"][:20]:
        where = (image == torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]).all(0)
        assert int((~where).sum()) == 12 * 13


@pytest.mark.parametrize("least", [0.0, 0.3, 0.7])
def test_a_part_overlaps_an_object_whose_center_lies_in_it(least: float) -> None:
    count = 60
    batch = batch_of([scene(number, sides=(36, 30), count=3) for number in range(count)])
    crop = RandomIoUCrop(sampler_options=(least,))
    found = crop(batch, draws(2, count))
    boxes = batch["boxes"].values.double().numpy() * [36, 30, 36, 30]
    regions = crop.regions(np.tile([36, 30], (count, 1)), boxes, batch["boxes"].lengths.numpy(), draws(2, count))
    assert [tuple(image.shape[1:]) for image in pixels_of(found)] == [tuple(each[2:]) for each in regions.tolist()]
    for row, (top, left, height, width) in enumerate(regions.tolist()):
        if (height, width) == (36, 30):
            continue
        assert min(height / 36, width / 30) > 0.3 - 1 / 30
        assert 0.5 <= width / height <= 2
        best, kept = 0.0, []
        for box, label in zip(
            batch["boxes"][row].double() * torch.tensor([36, 30, 36, 30]), labels_of(batch)[row], strict=True
        ):
            row_middle, column_middle = (box[:2] + box[2:]).tolist()
            if top < row_middle / 2 < top + height and left < column_middle / 2 < left + width:
                kept.append(label)
                rows = min(box[2], top + height) - max(box[0], top)
                columns = min(box[3], left + width) - max(box[1], left)
                both = float(rows * columns)
                best = max(best, both / (float((box[2] - box[0]) * (box[3] - box[1])) + height * width - both))
        assert best >= least
        assert labels_of(found)[row] == kept


def test_options_are_drawn_alike_and_one_keeps_all_of_the_image() -> None:
    count = 300
    batch = batch_of([scene(3, sides=(30, 30), count=2)] * count)
    found = RandomIoUCrop(sampler_options=(0.0, 1.0))(batch, draws(2, count))
    is_same = [image is given for image, given in zip(found["image"], batch["image"], strict=True)]
    assert 0.42 < np.mean(is_same) < 0.58
    assert all(
        RandomIoUCrop(sampler_options=(2.0,))(batch, draws(2, count))["image"][row] is batch["image"][row]
        for row in range(3)
    )


def test_images_without_objects_and_those_that_no_part_fits_stay_whole() -> None:
    batch = batch_of([scene(1, count=0), scene(2, count=3)])
    found = RandomIoUCrop(sampler_options=(0.999,), trials=2)(batch, draws(0, 2))
    assert [image is given for image, given in zip(found["image"], batch["image"], strict=True)] == [True, True]
    assert labels_of(found) == labels_of(batch)


def test_encoded_images_are_not_decoded_by_the_crop() -> None:
    found = RandomIoUCrop()(some(0, 20), draws(1, 20))
    assert all(isinstance(image, EncodedImage) for image in found["image"])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: RandomIoUCrop(min_scale=0.9, max_scale=0.5), "min_scale is larger than max_scale"),
        (lambda: RandomIoUCrop(min_aspect_ratio=3.0), "min_aspect_ratio is larger than max_aspect_ratio"),
        (lambda: RandomIoUCrop(sampler_options=()), "no overlap to draw"),
        (lambda: RandomZoomOut(side_range=(0.5, 2.0)), "side_range"),
        (lambda: ScaleJitter(scale_range=(2.0, 1.0)), "scale_range"),
        (lambda: FixedSizeCrop(fill=(0, 0, 256)), "fill"),
    ],
)
def test_wrong_values_are_refused(make: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        make()
