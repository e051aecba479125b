"""The options of the object detection API beside what TensorFlow made of the same images, objects and draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lockstep.augmentations import (
    RandomCropToAspectRatio,
    RandomImageScale,
    RandomJitterBoxes,
    RandomPadImage,
    RandomPadToAspectRatio,
    RandomRotation90,
    RandomVerticalFlip,
    ResizeImage,
    ResizeToMinDimension,
    RetainBoxesAboveThreshold,
    ScaleBoxesToPixelCoordinates,
)
from lockstep.augmentations.augment import Augment
from lockstep.augmentations.crops import Windows
from lockstep.augmentations.random_crops import cropped
from lockstep.augmentations.resizers import KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

GOLDEN = np.load(Path(__file__).parent / "augmentations_golden.npz")
WINDOWS = ((0, 0, 11, 13), (2, 3, 6, 7), (4, 0, 7, 5), (0, 6, 3, 7))
SIDES = ((60, 40), (15, 30), (15, 50), (312, 320), (299, 299), (333, 500), (1, 7), (427, 640))


class Given(Draws):
    """Draws of one example that are given by the ends of the names of their columns."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__(0, np.zeros(1, np.int64))
        self.numbers = numbers

    def uniform(self, column: str) -> npt.NDArray[np.float64]:
        (found,) = [number for end, number in self.numbers.items() if column.endswith(end)]
        return np.array([found])

    def uniforms(self, column: str, count: int) -> npt.NDArray[np.float64]:
        return np.asarray(self.uniform(column))


def batch() -> dict[str, Any]:
    columns = {"boxes": GOLDEN["boxes"], "keypoints": GOLDEN["points"], "label_scores": GOLDEN["scores"]}
    return {
        "image": [torch.from_numpy(GOLDEN["image"]).permute(2, 0, 1)],
        "masks": [torch.from_numpy(GOLDEN["masks"])],
        "labels": Ragged.of([torch.arange(7)]),
        **{name: Ragged.of([torch.from_numpy(values)]) for name, values in columns.items()},
    }


def assert_golden(after: Mapping[str, Any], name: str, *, pixels: float = 0.0) -> None:
    """Compare what TensorFlow recorded by this name; pixels to so much of 255."""
    found = {
        "image": after["image"][0].permute(1, 2, 0),
        "boxes": after["boxes"][0],
        "masks": after["masks"][0],
        "points": after["keypoints"][0],
        "places": after["labels"][0],
    }
    names = [key for key in found if f"{name} {key}" in GOLDEN]
    assert "image" in names
    for key in names:
        expected = torch.from_numpy(GOLDEN[f"{name} {key}"])
        tolerance = pixels if key == "image" else 1e-6
        torch.testing.assert_close(found[key], expected, rtol=0, atol=tolerance, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "augment"),
    [
        ("left right", HorizontalFlip(1, keypoint_flip_permutation=(2, 0, 1))),
        ("up down", RandomVerticalFlip(1, keypoint_flip_permutation=(2, 0, 1))),
        ("rot90", RandomRotation90(1)),
    ],
)
def test_turns(name: str, augment: Augment) -> None:
    assert_golden(augment(batch(), Draws(0, np.zeros(1, np.int64))), name)


@pytest.mark.parametrize("number", range(len(WINDOWS)))
@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.7])
def test_crops(number: int, overlap: float) -> None:
    before, windows = batch(), Windows(*np.array(WINDOWS[number])[:, None])
    after = cropped(before, before["image"], windows, np.array([overlap]), np.array([True]))
    assert_golden(after, f"crop {number} {overlap}")


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.7])
def test_crops_to_an_aspect(ratio: float) -> None:
    assert_golden(RandomCropToAspectRatio(ratio)(batch(), Given(top=0.4, left=0.7)), f"aspect crop {ratio}")


@pytest.mark.parametrize(
    ("number", "augment", "shares"),
    [
        (0, RandomPadImage(), (0.0, 0.0, 0.0, 0.0)),
        (1, RandomPadImage(pad_color=(3.0, 100.0, 250.0)), (0.99, 0.5, 0.99, 0.2)),
        (2, RandomPadImage(14, 5, 30, 12), (0.5, 0.5, 0.6, 0.9)),
        (3, RandomPadImage(40, 40, 20, 30), (0.5, 0.5, 0.0, 0.5)),
    ],
)
def test_padding(number: int, augment: Augment, shares: tuple[float, ...]) -> None:
    columns = "size rows", "size columns", "offset rows", "offset columns"
    assert_golden(augment(batch(), Given(**dict(zip(columns, shares, strict=True)))), f"pad {number}", pixels=1e-4)


@pytest.mark.parametrize(
    ("number", "augment", "share"),
    [
        (0, RandomPadToAspectRatio(), 0.5),
        (1, RandomPadToAspectRatio(2.0, (1.0, 1.0), (1.0, 1.0)), 0.7),
        (2, RandomPadToAspectRatio(0.6, (4.0, 4.0), (4.0, 4.0)), 0.1),
    ],
)
def test_padding_to_an_aspect(number: int, augment: Augment, share: float) -> None:
    assert_golden(augment(batch(), Given(scale=share)), f"aspect pad {number}")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_scales(share: float) -> None:
    assert_golden(RandomImageScale()(batch(), Given(factor=share)), f"scale {share}", pixels=2e-3)


@pytest.mark.parametrize("method", ["bilinear", "nearest", "bicubic", "area"])
def test_sizes(method: str) -> None:
    assert_golden(ResizeImage(17, 9, method)(batch(), Given()), f"resize {method}", pixels=2e-3)


@pytest.mark.parametrize("side", [9, 20])
def test_the_least_side(side: int) -> None:
    assert_golden(ResizeToMinDimension(side)(batch(), Given()), f"min dimension {side}", pixels=2e-3)


def test_sizes_within_a_range() -> None:
    for bounds, expected in zip(((50, 100), (600, 1024), (320, 320)), GOLDEN["ranges"], strict=True):
        found = [KeepAspectRatioResizer(*bounds).size_of(*side) for side in SIDES]
        assert found == [tuple(size) for size in np.maximum(expected, 1).tolist()]


def test_boxes_alone() -> None:
    jitter = {edge: GOLDEN["jitter"][:, place] for place, edge in enumerate(("top", "left", "bottom", "right"))}
    found = RandomJitterBoxes(0.3)(batch(), Given(**jitter))
    torch.testing.assert_close(found["boxes"][0], torch.from_numpy(GOLDEN["jittered"]), rtol=0, atol=1e-6)
    scaled = ScaleBoxesToPixelCoordinates()(batch(), Given())
    for name, key in (("boxes", "scaled boxes"), ("keypoints", "scaled points")):
        torch.testing.assert_close(scaled[name][0], torch.from_numpy(GOLDEN[key]), equal_nan=True)
    kept = RetainBoxesAboveThreshold(0.6, field="label_scores")(batch(), Given())
    assert kept["labels"][0].tolist() == GOLDEN["kept"].tolist()
