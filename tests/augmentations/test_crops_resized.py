from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.colours import ColourDraws
from lockstep.augmentations.crops import (
    CentralCrop,
    DistortedCrop,
    DistortedLaw,
    Objects,
    RandomResizedCrop,
    Resize,
    Windows,
    central_region,
    resized_crop_windows,
)
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.images.resizing import resized
from lockstep.randomness import Draws
from lockstep.readers.reader import Cost

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "preprocessing_golden.npz")
INCEPTION = DistortedLaw(0.1, (0.75, 1.33), (0.05, 1.0), 100)
BOXES = [[0.1, 0.2, 0.4, 0.5], [0.8, 0.8, 0.95, 0.9]]
# As in the script that wrote the golden file: height, width, law, boxes.
CROPS: dict[str, tuple[int, int, DistortedLaw, list[list[float]]]] = {
    "whole": (375, 500, INCEPTION, [[0, 0, 1, 1]]),
    "flat": (60, 300, INCEPTION, [[0, 0, 1, 1]]),
    "tiny": (7, 5, INCEPTION, [[0, 0, 1, 1]]),
    "narrow": (9, 8, DistortedLaw(0.1, (0.75, 1.33), (0.4, 0.5), 100), [[0, 0, 1, 1]]),
    "boxes": (375, 500, DistortedLaw(0.3, (0.75, 1.33), (0.05, 1.0), 100), BOXES),
    "seldom": (200, 200, DistortedLaw(0.6, (0.75, 1.33), (0.05, 0.5), 3), [[0, 0, 0.7, 0.7]]),
}
AUGMENTS: list[Augment] = [
    DistortedCrop(9),
    DistortedCrop(9, resize="random"),
    RandomResizedCrop(9),
    CentralCrop(9),
    Resize(9),
]


def draws(count: int, start: int = 0) -> Draws:
    return Draws(5, np.arange(start, start + count))


def sized(count: int, *lengths: int) -> list[Int64s]:
    return [np.full(count, length) for length in lengths]


def objects_of(count: int, height: int, width: int, boxes: list[list[float]]) -> Objects:
    """The same boxes in each image."""
    pixels = (np.array(boxes, np.float32) * np.array([height, width, height, width], np.float32)).astype(np.int64)
    return Objects(np.repeat(np.arange(count), len(boxes)), *np.tile(pixels, (count, 1)).T)


def windows_of(name: str, count: int) -> Windows:
    height, width, law, boxes = CROPS[name]
    return law.windows(*sized(count, height, width), objects_of(count, height, width, boxes), draws(count), "crop")


def encoded(height: int, width: int, seed: int = 0, source: str = "noise") -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return EncodedImage(written.getvalue(), source, Decoding("pillow"))


def some_images(count: int) -> list[EncodedImage]:
    return [encoded(10 + row, 30 - row, seed=row, source=f"{row}.png") for row in range(count)]


@pytest.mark.parametrize("name", CROPS)
def test_windows_are_distributed_as_those_of_tensorflow(name: str) -> None:
    count, recorded = 20_000, 20_000
    mean, deviation = GOLDEN[f"crops {name}"]
    windows = np.stack(windows_of(name, count), axis=1)
    error = deviation * (1 / count + 1 / recorded) ** 0.5
    assert (np.abs(windows.mean(0) - mean) < 4.5 * error).all()
    assert (np.abs(windows.std(0) / deviation - 1) < 0.04).all()


def test_the_last_row_and_column_are_left_to_windows_as_long_as_the_image() -> None:
    windows = windows_of("tiny", 2000)
    for start, length, whole in ((windows.top, windows.height, 7), (windows.left, windows.width, 5)):
        assert set(start + length) == set(range(1, whole + 1)) - {0, 1}
        assert (length[start + length == whole] == whole).all()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.floats(0, 1),
    st.tuples(st.floats(0.2, 1), st.floats(1, 5)),
    st.tuples(st.floats(0.01, 0.5), st.floats(0.5, 1)),
)
def test_every_window_keeps_to_what_was_asked_or_is_the_whole_image(
    height: int, width: int, covered: float, aspect: tuple[float, float], area: tuple[float, float]
) -> None:
    law = DistortedLaw(covered, aspect, area, 10)
    found = law.windows(*sized(32, height, width), objects_of(32, height, width, BOXES), draws(32), "crop").regions()
    boxes = [[int(side * length) for side, length in zip(box, [height, width] * 2, strict=True)] for box in BOXES]
    for top, left, rows, columns in found:
        if (top, left, rows, columns) == (0, 0, height, width):
            continue
        assert top >= 0 <= left
        assert top + rows <= height
        assert left + columns <= width
        assert aspect[0] * rows - 0.51 <= columns <= aspect[1] * rows + 0.51
        assert area[0] * (1 - 1e-6) <= rows * columns / (height * width) <= area[1] * (1 + 1e-6)
        assert any(shown(box, top, left, rows, columns) >= covered - 1e-6 for box in boxes)


def shown(box: list[int], top: int, left: int, rows: int, columns: int) -> float:
    y0, x0, y1, x1 = box
    if (y1 - y0) * (x1 - x0) == 0:
        return -1
    height, width = min(y1, top + rows) - max(y0, top), min(x1, left + columns) - max(x0, left)
    return max(height, 0) * max(width, 0) / ((y1 - y0) * (x1 - x0))


def test_windows_by_the_law_of_torchvision() -> None:
    count = 20_000
    height, width = sized(count, 300, 400)
    windows = resized_crop_windows(height, width, (0.08, 0.5), (3 / 4, 4 / 3), draws(count), "crop")
    share = windows.height * windows.width / (300 * 400)
    logarithm = np.log(windows.width / windows.height)
    assert abs(share.mean() - 0.29) < 0.005
    assert abs(share.std() - 0.42 / 12**0.5) < 0.005
    assert abs(logarithm.mean()) < 0.01
    assert abs(logarithm.std() - 2 * np.log(4 / 3) / 12**0.5) < 0.01
    assert (windows.top >= 0).all()
    assert (windows.top + windows.height).max() == 300
    assert (windows.left + windows.width).max() == 400


def test_a_window_by_the_law_of_torchvision_that_does_not_fit_is_drawn_again() -> None:
    count = 2000
    windows = resized_crop_windows(*sized(count, 100, 100), (0.7, 1.0), (3 / 4, 4 / 3), draws(count), "crop")
    whole = (windows.height == 100) & (windows.width == 100)
    assert whole.mean() < 0.02  # Of the first attempts half do not fit.


@pytest.mark.parametrize(
    ("height", "width", "region"),
    [(10, 100, (0, 43, 10, 13)), (100, 10, (43, 0, 13, 10)), (100, 100, (0, 0, 100, 100))],
)
def test_a_crop_that_does_not_fit_in_ten_attempts_is_central(height: int, width: int, region: tuple[int, ...]) -> None:
    scale = (1.0, 1.0) if height != width else (1.0000001, 1.1)  # no window is as large as all of a long image
    windows = resized_crop_windows(*sized(1, height, width), scale, (3 / 4, 4 / 3), draws(1), "crop")
    assert windows.regions() == [region]


def test_the_middle_is_that_of_tensorflow() -> None:
    for height, width, *region in GOLDEN["central"].tolist():
        assert [*central_region(height, width, 0.875)] == region


def test_pixels_are_those_of_the_window_resized() -> None:
    images = some_images(6)
    height, width = np.array([image.size[::-1] for image in images]).T
    whole = Objects(np.arange(6), *np.stack([0 * height, 0 * height, height, width]))
    regions = INCEPTION.windows(height, width, whole, draws(6), "DistortedCrop image").regions()
    pixels = DistortedCrop(9)({"image": images}, draws(6))["image"]
    assert len({*regions}) == 6
    for image, region, found in zip(images, regions, pixels, strict=True):
        top, left, rows, columns = region
        assert torch.equal(found, resized(image.decode()[:, top : top + rows, left : left + columns], 9, 9))


@pytest.mark.parametrize("method", ["antialiased", "bilinear", "nearest", "bicubic", "area"])
@pytest.mark.parametrize("crop", [CentralCrop, Resize])
def test_central_crop_and_resize_take_the_middle_or_all(crop: type[CentralCrop | Resize], method: str) -> None:
    images = some_images(3)
    pixels = crop(9, resize=method)({"image": images}, draws(3))["image"]
    for image, found in zip(images, pixels, strict=True):
        width, height = image.size
        region = central_region(height, width, 0.875) if crop is CentralCrop else None
        assert torch.equal(found, resized(image.decode(region), 9, 9, method))


def test_each_of_the_four_methods_is_drawn() -> None:
    images = [encoded(20, 20)] * 40
    law: dict[str, Any] = {"aspect": (1.0, 1.0), "area": (1.0, 1.0)}  # the whole image alone
    pixels = DistortedCrop(9, resize="random", **law)({"image": images}, draws(40))["image"]
    found = {one.numpy().tobytes() for one in pixels}
    methods = ("bilinear", "nearest", "bicubic", "area")
    assert found == {resized(images[0].decode(), 9, 9, method).numpy().tobytes() for method in methods}


def test_crops_show_a_box() -> None:
    """Each image is black but for its box: a crop that showed none of it would be black."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[30:36, 3:15] = 255
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    image = EncodedImage(written.getvalue(), "a box", Decoding("pillow"))
    box = torch.tensor([[0.75, 0.05, 0.9, 0.25]])
    batch = {"image": [image] * 64, "boxes": [box] * 64, "label": 1}
    cropped = DistortedCrop(16, min_object_covered=0.5, area=(0.05, 0.2), boxes_field="boxes")(batch, draws(64))
    assert [*cropped] == ["image", "label"]
    assert (cropped["image"].flatten(1).amax(1) == 255).all()
    anywhere = DistortedCrop(16, area=(0.05, 0.2))({"image": batch["image"]}, draws(64))
    assert (anywhere["image"].flatten(1).amax(1) == 0).any()


def test_an_image_without_boxes_is_cropped_as_if_none_were_asked_for() -> None:
    images = some_images(4)
    none = DistortedCrop(9, boxes_field="boxes")({"image": images, "boxes": [torch.zeros(0, 4)] * 4}, draws(4))
    assert torch.equal(none["image"], DistortedCrop(9)({"image": images}, draws(4))["image"])


@pytest.mark.parametrize("augment", AUGMENTS, ids=repr)
def test_an_example_depends_on_its_own_draws_alone(augment: Augment) -> None:
    images = some_images(8)
    whole = augment({"image": images, "label": 3}, draws(8))
    part = augment({"image": images[3:5]}, draws(2, start=3))["image"]
    assert whole["image"].shape == (8, 3, 9, 9)
    assert whole["image"].dtype == torch.uint8
    assert whole["label"] == 3
    assert torch.equal(part, whole["image"][3:5])


class Encoded:
    """A reader of encoded images."""

    cost: Cost = "decode"

    def __init__(self) -> None:
        self.images = some_images(12)

    def __len__(self) -> int:
        return len(self.images)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        return {"image": [self.images[index] for index in indices]}

    def example_id(self, index: int) -> str:
        return self.images[index].source


def stream(num_processes: int, num_workers: int) -> dict[str, Tensor]:
    """Two batches of eight, put together from the parts of all workers."""
    augment: list[Augment] = [DistortedCrop(9), HorizontalFlip(), ColourDraws()]
    parts: list[list[dict[str, Any]]] = []
    for rank in range(num_workers):
        loader = Loader(Encoded(), batch_size=8, seed=1, augment=augment, num_processes=num_processes)
        share = 4 // num_workers
        batches = loader.batches(range(rank * share, (rank + 1) * share), 4)
        parts.append([next(batches), next(batches)])
        batches.close()
    return {name: torch.cat([part[step][name] for step in (0, 1) for part in parts]) for name in parts[0][0]}


@pytest.mark.process
@pytest.mark.parametrize(("num_processes", "num_workers"), [(0, 2), (0, 4), (1, 1), (2, 2)])
def test_the_stream_has_the_same_pixels_whoever_reads_it(num_processes: int, num_workers: int) -> None:
    alone, together = stream(0, 1), stream(num_processes, num_workers)
    assert alone["image"].shape == (16, 3, 9, 9)
    assert {*alone} == {*together} == {"image", "image.colour"}
    for name in alone:
        assert torch.equal(alone[name], together[name])


@pytest.mark.parametrize("augment", AUGMENTS, ids=repr)
@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"label": 0}, "missing; the fields are label"),
        ({"image": torch.zeros(2, 3, 9, 9)}, "a tensor of shape"),
        ({"image": [b"", "path"]}, "a list of bytes, str"),
    ],
)
def test_images_that_are_not_encoded_are_refused(augment: Augment, batch: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match="finds no images in the field 'image'") as raised:
        augment(batch, draws(2))
    assert found in str(raised.value)
    assert f"{type(augment).__name__}(..., field=...)" in str(raised.value)


@pytest.mark.parametrize(
    "boxes", [None, torch.zeros(1, 2, 4), [[0, 0, 1, 1]], [torch.zeros(4)], [torch.zeros(1, 4)] * 2]
)
def test_fields_without_boxes_are_refused(boxes: object) -> None:
    batch = {"image": some_images(1)} | ({} if boxes is None else {"boxes": boxes})
    with pytest.raises(InputError, match="finds no boxes in the field 'boxes'"):
        DistortedCrop(9, boxes_field="boxes")(batch, draws(1))


@pytest.mark.parametrize("side", [-0.1, 1.5, float("nan")])
def test_a_box_outside_of_its_image_is_named(side: float) -> None:
    boxes = [torch.rand(2, 4), torch.tensor([[0, 0, 1, 1], [0, 0, side, 1]])]
    with pytest.raises(DataError, match=r"A box does not lie within 1\.png") as raised:
        DistortedCrop(9, boxes_field="boxes")({"image": some_images(2), "boxes": boxes}, draws(2))
    assert f"0, 0, {side:g}, 1" in str(raised.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DistortedCrop(0), "size is out of range"),
        (lambda: DistortedCrop(9.5), "size is of the wrong type"),  # type: ignore[arg-type]
        (lambda: DistortedCrop(9, min_object_covered=-1), "min_object_covered is out of range"),
        (lambda: DistortedCrop(9, aspect=(0, 1)), r"aspect\[0\] is out of range"),
        (lambda: DistortedCrop(9, aspect=(1, float("inf"))), r"aspect\[1\] is out of range"),
        (lambda: DistortedCrop(9, area=(0.5, 1.1)), r"area\[1\] is out of range"),
        (lambda: DistortedCrop(9, area=(0.5, 0.1)), "area is out of range"),
        (lambda: DistortedCrop(9, area=0.5), "area is of the wrong type"),  # type: ignore[arg-type]
        (lambda: DistortedCrop(9, area=(0.5,)), "area is of the wrong length"),  # type: ignore[arg-type]
        (lambda: DistortedCrop(9, max_attempts=0), "max_attempts is out of range"),
        (lambda: DistortedCrop(9, resize="lanczos"), "resize cannot be 'lanczos'"),
        (lambda: RandomResizedCrop(0), "size is out of range"),
        (lambda: RandomResizedCrop(9, scale=(0, 1)), r"scale\[0\] is out of range"),
        (lambda: RandomResizedCrop(9, ratio=(2, 1)), "ratio is out of range"),
        (lambda: RandomResizedCrop(9, resize="random"), "resize cannot be 'random'"),
        (lambda: CentralCrop(0), "size is out of range"),
        (lambda: CentralCrop(9, fraction=1.1), "fraction is out of range"),
        (lambda: CentralCrop(9, resize="random"), "resize cannot be 'random'"),
        (lambda: Resize(0), "size is out of range"),
        (lambda: Resize(9, resize="random"), "resize cannot be 'random'"),
    ],
)
def test_parameters_of_resized_crops_out_of_range_are_refused(make: Callable[[], Augment], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
