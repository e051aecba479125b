"""Features within boxes are those that torchvision's RoIAlign and TensorFlow's crop_and_resize make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.detection.roi_align import crop_and_resize, multiscale_roi_align, position_sensitive_crop, roi_align_masks

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "regions_golden.npz")
CROPS = ((14, 14), (1, 3), (2, 1))


def recorded(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def interpolated(values: Tensor, y: float, x: float) -> Tensor:
    """Interpolate (channels, height, width) as torchvision's kernel does: nothing beyond one cell outside."""
    height, width = values.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(len(values))
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = values[:, top, left] * (1 - x + left) + values[:, top, right] * (x - left)
    lower = values[:, bottom, left] * (1 - x + left) + values[:, bottom, right] * (x - left)
    return upper * (1 - y + top) + lower * (y - top)


def roi_align(
    maps: Tensor,
    boxes: Tensor,
    image_of: Tensor,
    size: tuple[int, int],
    sampling_ratio: int,
    *,
    image_shape: tuple[int, int],
) -> Tensor:
    """Align on one level."""
    return multiscale_roi_align([maps], boxes, image_of, size, image_shape=image_shape, sampling_ratio=sampling_ratio)


def aligned_point_by_point(values: Tensor, box: Tensor, size: int, scale: float, sampling_ratio: int) -> Tensor:
    top, left, bottom, right = (box * scale).tolist()
    height, width = max(bottom - top, 1), max(right - left, 1)
    rows, columns = (sampling_ratio or max(1, int(np.ceil(side / size))) for side in (height, width))
    made = torch.zeros(len(values), size, size)
    for row in range(size):
        for column in range(size):
            points = [
                interpolated(
                    values,
                    top + (row + (i + 0.5) / rows) * height / size,
                    left + (column + (j + 0.5) / columns) * width / size,
                )
                for i in range(rows)
                for j in range(columns)
            ]
            made[:, row, column] = torch.stack(points).mean(0)
    return made


BOXES = torch.tensor(
    [[4.0, 8, 40, 60], [-30, -20, 20, 90], [50, 70, 120, 160], [10, 10, 11, 10.5], [0, 0, 64, 96], [200, 200, 300, 300]]
)
IMAGE_OF = torch.tensor([0, 1, 0, 1, 1, 0])


@pytest.mark.parametrize("sampling_ratio", [0, 1, 2])
def test_roi_align_averages_interpolated_points(sampling_ratio: int) -> None:
    maps = features(2, 3, 16, 24)
    made = roi_align(maps, BOXES, IMAGE_OF, (3, 3), sampling_ratio, image_shape=(64, 96))
    for box, image, of_box in zip(BOXES, IMAGE_OF, made, strict=True):
        expected = aligned_point_by_point(maps[image], box, 3, 0.25, sampling_ratio)
        torch.testing.assert_close(of_box, expected)


def test_gradients_reach_the_features_and_not_the_boxes() -> None:
    maps, boxes = features(2, 3, 6, 7).requires_grad_(), BOXES.clone().requires_grad_()

    def made(given: Tensor) -> Tensor:
        return roi_align(given, boxes, IMAGE_OF, (2, 2), 2, image_shape=(48, 56))

    out = made(maps)
    seed = torch.randn_like(out)
    out.backward(seed)
    assert boxes.grad is None
    ones = torch.ones(2, 3, 6, 7)
    # It is linear in the features: the sum of the gradient is what the seed makes of ones.
    assert maps.grad is not None
    assert maps.grad.sum().item() == pytest.approx((made(ones) * seed).sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("side", "level"), [(1.0, 0), (111.9, 0), (112.0, 1), (223.9, 1), (224.0, 2), (448.0, 3), (5000.0, 3)]
)
def test_a_box_twice_as_large_is_on_the_next_level(side: float, level: int) -> None:
    maps = [torch.full((1, 1, 256 >> number, 256 >> number), float(number)) for number in range(4)]
    boxes = torch.tensor([[0.0, 0, side, side]])
    made = multiscale_roi_align(maps, boxes, torch.tensor([0]), (1, 1), image_shape=(1024, 1024), sampling_ratio=2)
    assert made.item() == level if side < 1000 else made.item() <= level


def test_levels_are_aligned_each_by_itself() -> None:
    maps = [features(2, 3, 128 >> number, 192 >> number, seed=number) for number in range(4)]
    boxes = torch.tensor([[10.0, 10, 40, 60], [0, 0, 150, 160], [5, 5, 300, 310], [20, 100, 500, 700], [1, 2, 30, 40]])
    image_of = torch.tensor([0, 1, 1, 0, 1])
    made = multiscale_roi_align(maps, boxes, image_of, (7, 7), image_shape=(512, 768), sampling_ratio=2)
    for place, level in enumerate([0, 1, 2, 3, 0]):
        one = slice(place, place + 1)
        alone = roi_align(maps[level], boxes[one], image_of[one], (7, 7), 2, image_shape=(512, 768))
        torch.testing.assert_close(made[one], alone, rtol=0, atol=0)


def test_no_boxes_are_no_features_and_no_gradient() -> None:
    maps = features(2, 3, 8, 8).requires_grad_()
    none, of_none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    made = [
        roi_align(maps, none, of_none, (7, 7), 0, image_shape=(16, 16)),
        multiscale_roi_align([maps], none, of_none, (7, 7), image_shape=(16, 16), sampling_ratio=2),
        crop_and_resize(maps, none, of_none, (7, 7)),
    ]
    assert [tuple(each.shape) for each in made] == [(0, 3, 7, 7)] * 3
    sum(each.sum() for each in made).backward()  # type: ignore[union-attr]
    assert maps.grad is not None
    assert not maps.grad.any()
    assert roi_align_masks(torch.zeros(0, 8, 8, dtype=torch.uint8), none, of_none, (5, 5)).shape == (0, 5, 5)


def test_masks_are_aligned_as_features() -> None:
    masks = (features(3, 40, 50) > 0).to(torch.uint8)
    boxes = torch.tensor([[1.0, 2, 30, 45], [-5, -5, 60, 60], [10, 10, 10.5, 11], [3, 4, 39, 9]])
    object_of = torch.tensor([2, 0, 1, 2])
    expected = roi_align(masks[:, None].float(), boxes, object_of, (5, 7), 0, image_shape=(40, 50))[:, 0]
    torch.testing.assert_close(roi_align_masks(masks, boxes, object_of, (5, 7)), expected)


@pytest.mark.parametrize(("number", "size"), list(enumerate(CROPS)))
def test_crops_are_those_of_tensorflow(number: int, size: tuple[int, int]) -> None:
    maps = recorded("features").permute(0, 3, 1, 2).requires_grad_()
    made = crop_and_resize(maps, recorded("boxes"), recorded("image_of").long(), size)
    torch.testing.assert_close(made.permute(0, 2, 3, 1), recorded(f"crops_{number}"), rtol=1e-5, atol=1e-5)
    (made * made).sum().backward()
    assert maps.grad is not None
    torch.testing.assert_close(maps.grad.permute(0, 2, 3, 1), recorded(f"gradient_{number}"), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_each_part_of_a_box_is_read_from_maps_of_its_own(memory_format: torch.memory_format) -> None:
    """As the reference does it: crop by crop of each part, and then the mean of them all."""
    drawn = torch.Generator().manual_seed(0)
    features = torch.randn(2, 6 * 5, 7, 9, generator=drawn).to(memory_format=memory_format)
    boxes, image_of = torch.rand(4, 4, generator=drawn), torch.tensor([1, 0, 0, 1])
    boxes[0] = torch.tensor([0.8, 0.9, 1.4, 1.2])
    found = position_sensitive_crop(features, boxes, image_of, (3, 2), (6, 8))
    crops = []
    for part, maps in enumerate(features.split(5, 1)):
        (top, left, bottom, right), (row, column) = boxes.T, divmod(part, 2)
        height, width = (bottom - top) / 3, (right - left) / 2
        corner = [top + row * height, left + column * width]
        of_part = torch.stack([*corner, corner[0] + height, corner[1] + width], 1)
        crops.append(crop_and_resize(maps, of_part, image_of, (2, 4)).mean((2, 3)))
    torch.testing.assert_close(found, torch.stack(crops).mean(0))
