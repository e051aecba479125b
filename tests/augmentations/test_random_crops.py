from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmented import BOXES, batch_of, draws_of, noise, png
from hypothesis import given
from hypothesis import strategies as st

from lockstep.augmentations import RandomCropImage, RandomCropToAspectRatio
from lockstep.augmentations.crops import Windows
from lockstep.augmentations.random_crops import cropped
from lockstep.augmentations.resizers import pad_images
from lockstep.errors import DataError, InputError
from lockstep.images.decode import EncodedImage
from lockstep.images.objects import areas_of

EVERY = np.array([True])


def cut(batch: dict[str, Any], *window: int, overlap: float = 0.3) -> dict[str, Any]:
    return cropped(batch, batch["image"], Windows(*np.array(window)[:, None]), np.array([overlap]), EVERY)


def test_the_crop_of_the_reference_with_masks_scores_and_keypoints() -> None:
    points = torch.tensor([[[0.1, 0.1], [0.5, 0.5]], [[0.9, 0.8], [0.5, 0.99]]])
    batch = batch_of(noise(200, 400), keypoints=points, label_scores=torch.tensor([0.5, torch.nan]))
    after = cut({**batch, "masks": [noise(200, 400, 2) % 2]}, 6, 143, 190, 237)
    assert after["image"][0].shape == (3, 190, 237)
    expected = torch.tensor([[0, 0, 0.75789469, 1], [0.23157893, 0.24050637, 0.75789469, 1]])
    torch.testing.assert_close(after["boxes"].values, expected)
    torch.testing.assert_close(after["label_scores"].values, torch.tensor([0.5, torch.nan]), equal_nan=True)
    assert torch.equal(after["masks"][0], noise(200, 400, 2)[:, 6:196, 143:380] % 2)
    within = (points - torch.tensor([0.03, 0.3575])) / torch.tensor([0.95, 0.5925])
    within[0, 0] = within[1, 1] = torch.nan
    torch.testing.assert_close(after["keypoints"].values, within, equal_nan=True)


def test_objects_outside_of_the_crop_are_dropped_with_their_labels() -> None:
    boxes = torch.tensor([[0.1, 0.1, 0.8, 0.3], [0.2, 0.4, 0.75, 0.75], [0.3, 0.1, 0.4, 0.7]])
    batch = {**batch_of(noise(200, 400), boxes=boxes), "class_text": [["person", "dog", "cat"]]}
    after = cut(batch, 6, 143, 190, 237)
    assert after["labels"].values.tolist() == [1, 2]
    assert after["class_text"] == [["dog", "cat"]]
    expected = torch.tensor([[0.178947, 0.07173, 0.75789469, 0.66244733], [0.28421, 0, 0.38947365, 0.57805908]])
    torch.testing.assert_close(after["boxes"].values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("overlap", "kept"), [(0.0, [0, 1]), (0.5, [0, 1]), (0.51, [0])])
def test_an_overlap_of_the_threshold_is_enough(overlap: float, kept: list[int]) -> None:
    boxes = torch.tensor([[0, 0, 0.5, 0.5], [0.25, 0.25, 0.75, 0.5], [0.6, 0, 1, 1], [0.1, 0.1, 0.1, 0.4]])
    assert cut(batch_of(noise(8, 8), boxes=boxes), 0, 0, 4, 8, overlap=overlap)["labels"].values.tolist() == kept


@given(st.integers(0, 10_000), st.booleans())
def test_a_crop_put_back_in_its_place_gives_the_objects_back(seed: int, encoded: bool) -> None:
    random = np.random.default_rng(seed)
    height, width = random.integers(2, 12, 2).tolist()
    (top, bottom), (left, right) = (np.sort(random.choice(side + 1, 2, False)).tolist() for side in (height, width))
    image = noise(height, width, seed=seed)
    boxes = torch.from_numpy(np.sort(random.random((4, 2, 2)), axis=1).reshape(4, 4)).float()
    after = cut(
        batch_of(png(image) if encoded else image, boxes=boxes), top, left, bottom - top, right - left, overlap=0
    )
    corners, sides = np.array([[top, left]]), np.array([[height, width]])
    back = pad_images(after, after["image"], corners, sides, [(0, 0, 0)], None)
    window = torch.tensor([top / height, left / width, bottom / height, right / width]).repeat(4, 1)
    seen = torch.cat([boxes[:, :2].maximum(window[:, :2]), boxes[:, 2:].minimum(window[:, 2:])], dim=1)
    in_pixels = (seen[:, 2:] - seen[:, :2]) * torch.tensor([height, width])
    seen = seen[(in_pixels >= 0.01).all(1)]
    torch.testing.assert_close(back["boxes"].values, seen, rtol=0, atol=1e-5)
    pixels = back["image"][0]
    pixels = pixels.decode() if isinstance(pixels, EncodedImage) else pixels
    assert torch.equal(pixels[:, top:bottom, left:right], image[:, top:bottom, left:right])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_window_keeps_to_its_limits_and_shows_enough_of_an_object(channels: int) -> None:
    count, limits = 64, RandomCropImage(0.7, 0.5, 2.0, 0.2, 0.6, overlap_thresh=0.41)
    boxes = torch.tensor([[0.1, 0.1, 0.5, 0.4], [-0.2, 0.5, 0.4, 1.3]])
    number = torch.arange(50, dtype=torch.float32).expand(channels, 40, 50) + 100 * torch.arange(40)[:, None]
    after = limits(batch_of(*[number] * count, boxes=boxes), draws_of(count))
    corners = torch.tensor([[int(image[0, 0, 0]) // 100, int(image[0, 0, 0]) % 100] for image in after["image"]])
    sides = torch.tensor([image.shape[1:] for image in after["image"]])
    assert len({image.shape[0] for image in after["image"]} | {channels}) == 1
    ratios = sides[:, 1] / sides[:, 0]
    areas = sides.prod(1) / 2000
    assert 0.5 * 0.93 <= ratios.min() < 0.7 < 1.5 < ratios.max() <= 2.0 * 1.07
    assert 0.2 <= areas.min() < 0.3 < 0.5 < areas.max() <= 0.6
    pixels = boxes.clamp(0, 1) * torch.tensor([40, 50, 40, 50])
    windows = torch.cat([corners, corners + sides], dim=1)[:, None]
    lengths = torch.minimum(pixels[:, 2:], windows[..., 2:]) - torch.maximum(pixels[:, :2], windows[..., :2])
    shown = lengths.clamp(min=0).prod(-1) / areas_of(pixels)
    assert (shown >= 0.7).any(1).all()
    # The second box reaches out of the image: the threshold is of all of it.
    whole = areas_of(boxes) * 2000
    expected = [
        [number for number in range(2) if row[number] / whole[number] >= 0.41] for row in lengths.clamp(min=0).prod(-1)
    ]
    assert [labels.tolist() for labels in after["labels"]] == expected


def test_nothing_is_decoded() -> None:
    images = [png(noise(20, 30, seed=row)) for row in range(8)]
    after = RandomCropImage(0.1)(batch_of(*images), draws_of(8))
    decoded = RandomCropImage(0.1)(batch_of(*[noise(20, 30, seed=row) for row in range(8)]), draws_of(8))
    for image, expected in zip(after["image"], decoded["image"], strict=True):
        assert isinstance(image, EncodedImage)
        assert torch.equal(image.decode(), expected)


def test_with_a_coefficient_of_1_everything_stays() -> None:
    boxes = torch.tensor([[0.1, 0.1, 0.5, 0.4], [0.3, 0.3, 0.3, 0.9], [-0.2, 0, 0.2, 0.3]])
    batch = batch_of(*[noise(20, 30, seed=row) for row in range(8)], boxes=boxes, label_scores=torch.rand(3))
    after = RandomCropImage(random_coef=1.0)(batch, draws_of(8))
    assert all(map(torch.equal, after["image"], batch["image"]))
    for name in ("boxes", "labels", "label_scores"):
        assert torch.equal(after[name].values, batch[name].values)
    some = RandomCropImage(0.1, random_coef=0.5)(batch_of(*[noise(20, 30)] * 99), draws_of(99))
    assert 30 < sum(image.shape == (3, 20, 30) for image in some["image"]) < 70


def test_after_100_attempts_the_whole_image_is_taken_without_boxes_that_have_no_area() -> None:
    boxes = torch.tensor([[0, 0, 1, 1], [0.5, 0.1, 0.5, 0.9]])
    after = RandomCropImage(1.0, max_area=0.5)(batch_of(noise(9, 9), boxes=boxes), draws_of(1))
    assert after["image"][0].shape == (3, 9, 9)
    assert after["labels"].values.tolist() == [0]


@pytest.mark.parametrize(
    ("ratio", "sides", "size"),
    [
        (2.0, (200, 200), (100, 200)),
        (1.0, (200, 400), (200, 200)),
        (0.5, (200, 400), (200, 100)),
        (1.5, (4, 6), (4, 6)),
    ],
)
def test_the_largest_crop_of_an_aspect(ratio: float, sides: tuple[int, int], size: tuple[int, int]) -> None:
    after = RandomCropToAspectRatio(ratio)(batch_of(png(noise(*sides)), boxes=torch.zeros(0, 4)), draws_of(1))
    assert after["image"][0].size == size[::-1]


def test_a_crop_to_an_aspect_ratio_is_uniform_in_place_and_drops_boxes_without_area() -> None:
    number = torch.arange(5, dtype=torch.uint8).expand(3, 2, 5)
    boxes = torch.tensor([[0, 0, 1, 1], [0.2, 0.5, 0.8, 0.5]])
    after = RandomCropToAspectRatio(overlap_thresh=0.0)(batch_of(*[number] * 400, boxes=boxes), draws_of(400))
    counts = np.bincount([int(image[0, 0, 0]) for image in after["image"]])
    assert len(counts) == 4
    assert counts.min() > 70
    assert after["labels"].values.unique().tolist() == [0]


def test_an_image_too_thin_for_an_aspect_is_named() -> None:
    with pytest.raises(DataError, match=r"photo\.png is too thin to be cropped") as caught:
        RandomCropToAspectRatio(0.3)(batch_of(noise(5, 5), png(noise(1, 9))), draws_of(2))
    assert "1 rows and 9 columns" in str(caught.value)


@pytest.mark.parametrize(
    "augment", [RandomCropImage(), RandomCropToAspectRatio()], ids=lambda value: type(value).__name__
)
def test_a_box_that_is_none_is_refused_with_its_image(augment: Any) -> None:
    boxes = BOXES.clone()
    boxes[1, 2] = torch.nan
    with pytest.raises(DataError, match=r"A box of photo\.png is none\.") as caught:
        augment(batch_of(png(noise(5, 5)), boxes=boxes), draws_of(1))
    assert "0.25, 0.5, nan, 1" in str(caught.value)


@pytest.mark.parametrize("limits", [{"min_area": 0.5, "max_area": 0.4}, {"min_aspect_ratio": 1.5}])
def test_the_least_is_not_more_than_the_most(limits: dict[str, float]) -> None:
    with pytest.raises(InputError, match="is larger than max_"):
        RandomCropImage(**limits)
