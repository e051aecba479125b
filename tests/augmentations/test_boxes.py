from __future__ import annotations

import pytest
import torch
from augmented import BOXES, batch_of, draws_of, noise

from lockstep.augmentations import RandomJitterBoxes, RetainBoxesAboveThreshold, ScaleBoxesToPixelCoordinates
from lockstep.errors import InputError


def test_edges_move_by_a_share_of_the_box_and_stay_in_the_image() -> None:
    count = 200
    batch = batch_of(*[noise(4, 4)] * count)
    after = RandomJitterBoxes(0.1)(batch, draws_of(count))["boxes"]
    assert after.lengths.tolist() == [2] * count
    moved = (after.values - BOXES.repeat(count, 1)).view(count, 2, 4)
    sides = (BOXES[:, 2:] - BOXES[:, :2]).repeat(1, 2)
    inner = moved[:, 1, :3] / sides[1, :3]  # the right edge is that of the image
    assert inner.abs().max() <= 0.1 + 1e-6
    assert inner.std() == pytest.approx(0.1 / 3**0.5, rel=0.1)
    assert after.values.min() >= 0
    assert after.values.max() <= 1


def test_each_edge_of_each_box_has_a_number_of_its_own() -> None:
    boxes = torch.tensor([[0.4, 0.4, 0.6, 0.6]] * 5)
    after = RandomJitterBoxes()(batch_of(noise(4, 4), boxes=boxes), draws_of(1))["boxes"].values - boxes
    assert len(after.unique()) == 20
    fewer = RandomJitterBoxes()(batch_of(noise(4, 4), boxes=boxes[:2]), draws_of(1))["boxes"].values
    torch.testing.assert_close(fewer - boxes[:2], after[:2])


def test_objects_above_a_score_stay_and_those_without_one() -> None:
    columns = {
        "weights": torch.tensor([1.0, 0.5]),
        "keypoints": torch.rand(2, 3, 2),
        "multiclass_scores": torch.rand(2, 4),
        "label_scores": torch.tensor([torch.nan, 0.6]),
    }
    batch = {**batch_of(noise(4, 4), **columns), "masks": [noise(4, 4, 2) % 2]}
    kept = RetainBoxesAboveThreshold(0.6)(batch, draws_of(1))
    assert kept["labels"].values.tolist() == [0]
    for name, values in columns.items():
        torch.testing.assert_close(kept[name].values, values[:1], equal_nan=True)
    assert torch.equal(kept["masks"][0], batch["masks"][0][:1])
    by_scores = RetainBoxesAboveThreshold(0.6, field="label_scores")(batch, draws_of(1))
    assert by_scores["labels"].values.tolist() == [0]


def test_a_missing_field_of_scores_is_refused() -> None:
    with pytest.raises(InputError, match="finds no scores in the field 'weights'"):
        RetainBoxesAboveThreshold()(batch_of(noise(4, 4)), draws_of(1))


def test_boxes_and_keypoints_in_pixels() -> None:
    points = torch.tensor([[[0.5, 0.25]], [[torch.nan, torch.nan]]])
    scaled = ScaleBoxesToPixelCoordinates()(batch_of(noise(60, 40), keypoints=points), draws_of(1))
    assert scaled["boxes"].values.tolist() == [[0, 10, 45, 40], [15, 20, 45, 40]]
    torch.testing.assert_close(
        scaled["keypoints"].values, torch.tensor([[[30.0, 10]], [[torch.nan, torch.nan]]]), equal_nan=True
    )
