"""Images on which each object has a colour of its own, so that pixels, masks, boxes and keypoints can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.images.decode import EncodedImage
from lockstep.images.fields import decoded
from lockstep.images.masks import DenseMasks, dense_masks
from lockstep.ragged import Ragged
from lockstep.readers.reader import Cost

OBJECT_FIELDS = (
    "boxes",
    "labels",
    "area",
    "keypoints",
    "keypoint_visibility",
    "is_crowd",
    "weights",
    "object_colour",
    "object_is_rectangle",
)


def scene(number: int, sides: tuple[int, int] | None = None, count: int | None = None) -> dict[str, Any]:
    """One image with up to five rectangles, of which later ones cover earlier ones."""
    rng = np.random.default_rng(number)
    height, width = sides or rng.integers(12, 40, 2).tolist()
    pixels = np.full((height, width, 3), (0, number % 256, 7), np.uint8)
    owner = np.full((height, width), -1)
    for index in range(rng.integers(0, 6) if count is None else count):
        top, left = rng.integers(0, height - 3), rng.integers(0, width - 3)
        bottom, right = rng.integers(top + 2, height + 1), rng.integers(left + 2, width + 1)
        owner[top:bottom, left:right] = index
    masks = [owner == index for index in np.unique(owner[owner >= 0])]
    boxes, points, colours = [], [], []
    for index, mask in enumerate(masks):
        colours.append((100 + 20 * index, number % 256, 200))
        pixels[mask] = colours[-1]
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        boxes.append([rows[0] / height, columns[0] / width, (rows[-1] + 1) / height, (columns[-1] + 1) / width])
        row, column = np.argwhere(mask)[len(boxes) % mask.sum()]
        points.append([[(row + 0.5) / height, (column + 0.5) / width], [np.nan, np.nan]])
    count = len(masks)
    return {
        "pixels": pixels,
        "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        "labels": torch.arange(count) + 10 * number,
        "area": torch.tensor([float(mask.sum()) for mask in masks]),
        "keypoints": torch.tensor(np.array(points), dtype=torch.float32).view(-1, 2, 2),
        "keypoint_visibility": torch.tensor([[2, 0]] * count, dtype=torch.int64).view(-1, 2),
        "is_crowd": torch.zeros(count, dtype=torch.bool),
        "weights": torch.ones(count),
        "object_colour": torch.tensor(colours, dtype=torch.uint8).view(-1, 3),
        "object_is_rectangle": torch.tensor([_is_rectangle(mask) for mask in masks], dtype=torch.bool),
        "class_text": [f"{number}-{index}" for index in range(count)],
        "masks": dense_masks(np.array(masks, np.float32), height, width)
        if masks
        else DenseMasks(b"", 0, height, width),
    }


def _is_rectangle(mask: np.ndarray[Any, Any]) -> bool:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return bool(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all())


def encoded(pixels: np.ndarray[Any, Any], source: str) -> EncodedImage:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return EncodedImage(file.getvalue(), source)


def batch_of(scenes: Sequence[dict[str, Any]], *, files: bool = True) -> dict[str, Any]:
    """A batch as readers of detection data give it; with images that are decoded, if they are not to be files."""
    images = [
        encoded(each["pixels"], f"scene {place}") if files else torch.from_numpy(each["pixels"]).permute(2, 0, 1)
        for place, each in enumerate(scenes)
    ]
    return {
        "image": images,
        **{name: Ragged.of([each[name] for each in scenes]) for name in OBJECT_FIELDS},
        "class_text": [each["class_text"] for each in scenes],
        "masks": [each["masks"] for each in scenes],
    }


class Scenes:
    """A reader of scenes by their numbers."""

    cost: Cost = "decode"

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read_batch(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
        return batch_of([scene(number) for number in indices.tolist()])

    def example_id(self, index: int) -> str:
        return f"scene {index}"


def pixels_of(batch: dict[str, Any]) -> list[Tensor]:
    return [decoded(image) for image in batch["image"]]


def labels_of(batch: dict[str, Any]) -> list[list[int]]:
    return [each.tolist() for each in batch["labels"]]


def check_in_step(batch: dict[str, Any], *, painted: bool = True) -> None:
    """Hold all fields of objects to one another; and the pixels to them, if they were not resized or mixed."""
    counts = batch["boxes"].lengths.tolist()
    for name in OBJECT_FIELDS:
        assert batch[name].lengths.tolist() == counts, name
    assert [len(each) for each in batch["class_text"]] == [len(each) for each in batch["masks"]] == counts
    texts = [text for each in batch["class_text"] for text in each]
    assert [int(text.partition("-")[0]) for text in texts] == (batch["labels"].values // 10).tolist()
    boxes = batch["boxes"].values
    assert ((boxes >= 0) & (boxes <= 1)).all()
    assert (boxes[:, :2] <= boxes[:, 2:]).all()
    points = batch["keypoints"].values
    assert (points.isnan() | ((points >= 0) & (points <= 1))).all()
    assert (batch["keypoint_visibility"].values[points.isnan().any(-1)] == 0).all()
    for row, pixels in enumerate(pixels_of(batch)):
        assert pixels.dtype == torch.uint8
        sides = torch.tensor(pixels.shape[1:])
        masks = (
            batch["masks"][row] if isinstance(batch["masks"][row], Tensor) else batch["masks"][row].decode()
        ).bool()
        assert masks.shape == (counts[row], *pixels.shape[1:])
        for place, mask in enumerate(masks):
            _check_object(
                {name: batch[name][row][place] for name in OBJECT_FIELDS}, mask, sides, pixels if painted else None
            )


def _check_object(own: dict[str, Tensor], mask: Tensor, sides: Tensor, pixels: Tensor | None) -> None:
    if mask.any():
        places = mask.nonzero()
        around = torch.cat([places.amin(0), places.amax(0) + 1]).float()
        outside = (around - own["boxes"] * sides.repeat(2)) * torch.tensor([-1, -1, 1, 1])
        assert outside.max() <= 1 + 1e-3
        assert outside.min() >= -1 - 1e-3 or not own["object_is_rectangle"]
    if pixels is not None:
        assert (pixels[:, mask] == own["object_colour"][:, None]).all()
        for point, visibility in zip(own["keypoints"], own["keypoint_visibility"].tolist(), strict=True):
            if visibility > 1:
                row, column = (point * sides).long().tolist()
                assert torch.equal(pixels[:, row, column], own["object_colour"])
