"""What augmentations share that put several images together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from painted_scenes import batch_of, labels_of, scene

from lockstep.augmentations import CopyPaste, FixedSizeCrop, MixUp, Mosaic, RandomIoUCrop, RandomZoomOut, ScaleJitter
from lockstep.augmentations.augment import num_partners
from lockstep.augmentations.joining import join_objects, joined_masks
from lockstep.images.masks import dense_masks
from lockstep.randomness import Draws


def draws(seed: int, count: int) -> Draws:
    return Draws(seed, np.arange(count))


def test_objects_of_other_images_come_after_those_of_their_row() -> None:
    batch = batch_of([scene(number, sides=(12, 12)) for number in (1, 2, 3)])
    others = [batch_of([scene(number, sides=(12, 12)) for number in numbers]) for numbers in ((4, 5), (6, 7))]
    found = join_objects(batch, others, torch.tensor([2, 0]))
    own, first, second = (labels_of(each) for each in (batch, *others))
    assert labels_of(found) == [[*own[0], *first[1], *second[1]], own[1], [*own[2], *first[0], *second[0]]]
    assert [len(texts) for texts in found["class_text"]] == [len(each) for each in labels_of(found)]
    assert [len(masks) for masks in found["masks"]] == [len(each) for each in labels_of(found)]
    assert found["masks"][1] is batch["masks"][1]


@pytest.mark.parametrize("is_decoded", [False, True])
def test_joined_masks_are_selected_and_decoded_as_one(is_decoded: bool) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (6, 4, 5)).astype(np.float32)
    parts: list[Any] = [dense_masks(bits[first:end], 4, 5) for first, end in ((0, 2), (2, 2), (2, 6))]
    whole = torch.from_numpy(bits).to(torch.uint8)
    joined: Any = joined_masks([*parts[:2], parts[2].decode()] if is_decoded else parts)
    if is_decoded:
        assert torch.equal(joined, whole)
        return
    assert (len(joined), joined.height, joined.width) == (6, 4, 5)
    assert torch.equal(joined.decode(), whole)
    for places in ([0, 3, 5], [1], [], [2, 3, 4, 5]):
        assert torch.equal(joined.selected(places).decode(), whole[places])
    assert joined_masks(parts[:2]) is parts[0]


@pytest.mark.parametrize(
    "augment",
    [
        Mosaic(size=20),
        MixUp(),
        CopyPaste(),
        RandomZoomOut(p=1.0),
        FixedSizeCrop((20, 20)),
        RandomIoUCrop(),
        ScaleJitter((30, 30)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_colours_computed_before_stay_fractions(augment: Any) -> None:
    parts = [batch_of([scene(number), scene(number + 20)], files=False) for number in range(4)]
    floats = [{**part, "image": [image + 0.25 for image in part["image"]]} for part in parts]
    whole, found = (
        augment(each[0], draws(1, 2), *([each[1 : 1 + num_partners(augment)]] if num_partners(augment) else []))
        for each in (parts, floats)
    )
    for one, other in zip(whole["image"], found["image"], strict=True):
        assert (one.dtype, other.dtype) == (torch.uint8, torch.float32)
        assert (one.float() - other).abs().max() < 1.3
        assert (other % 1 != 0).any()
