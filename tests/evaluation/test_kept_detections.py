"""The detections of an evaluation, as all workers have found them, in the order of the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.detection.detector import FoundMasks
from lockstep.evaluation.kept_detections import KeptDetections, kept_columns, with_data_labels
from lockstep.mask_runs import flips_of_pixels, pixels_in
from lockstep.readers.reader import Arrays

SIZE = 9
PIXELS = (np.arange(6).reshape(1, 2, 3) % 2 == 0).astype(np.uint8)


class Named(Arrays):
    """Examples with ids."""

    def read_batch(self, indices: Any) -> dict[str, Any]:
        return {**super().read_batch(indices), "source_id": [f"image {index}" for index in indices]}


def found_on(index: int) -> dict[str, Tensor]:
    return {
        "boxes": torch.full((index % 3, 4), index / 3),
        "scores": torch.arange(index % 3) / 7,
        "labels": torch.full((index % 3,), index),
    }


def points_on(index: int) -> Tensor:
    return torch.full((index % 3, 2, 3), index / 7, dtype=torch.float64)


def kept(most: int | None, num_examples: int = SIZE, micro_batch: int = 2, *, masks: bool = False) -> list[Any]:
    """The images as plain values, of each its index and id, and what was found on it."""
    metric = KeptDetections(most)

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        indices = batch["x"].tolist()
        rows = [found_on(index) for index in indices]
        found: dict[str, Any] = {name: ls.Ragged.of([row[name] for row in rows]) for name in rows[0]}
        if masks:
            found["keypoints"] = ls.Ragged.of([points_on(index) for index in indices])
            found["masks"] = [FoundMasks(2, 3, flips_of_pixels(PIXELS) * (index % 3)) for index in indices]
        return {"kept": metric.columns(batch, found)}

    state = ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(Named({"x": torch.arange(num_examples)}), batch_size=micro_batch)
    result = ls.evaluate(state, score, loader, metrics={"kept": metric})
    assert result.scores == {}
    return [
        (image.example_index, image.source_id, *(column.tolist() for column in image.found[:3]), [*image.found.masks])
        for image in metric
        if masks == np.array_equal(image.found.keypoints, points_on(image.example_index))
    ]


def expected(num_images: int) -> list[Any]:
    boxes = [torch.full((index % 3, 4), index / 3).double().tolist() for index in range(num_images)]
    scores = [(torch.arange(index % 3) / 7).double().tolist() for index in range(num_images)]
    return [
        (index, f"image {index}", boxes[index], [index] * (index % 3), scores[index], []) for index in range(num_images)
    ]


def test_all_images_are_kept_in_their_order_or_the_first_ones() -> None:
    assert kept(None) == expected(SIZE)
    assert kept(4) == expected(4)
    assert kept(0) == []


@pytest.mark.process
def test_the_chief_keeps_what_all_workers_have_found(run_workers: Callable[..., list[Any]]) -> None:
    assert run_workers(kept, 3, None) == [expected(SIZE), [], []]


def test_masks_travel_as_runs_and_keypoints_as_they_are() -> None:
    found = kept(None, masks=True)
    assert len(found) == SIZE
    for index, *_, masks in found:
        assert len(masks) == index % 3
        for mask in masks:
            assert np.array_equal(pixels_in(mask.runs, mask.height, mask.width), PIXELS[0])


def test_labels_become_those_of_the_data() -> None:
    metric = KeptDetections()
    rows = {"boxes": torch.zeros(2, 4), "scores": torch.ones(2), "labels": torch.tensor([1, 2])}
    columns = kept_columns({name: ls.Ragged.of([values]) for name, values in rows.items()})
    metric.update(*metric.prepare(torch.tensor([0]), ["a"], *columns))
    (image,) = metric
    assert with_data_labels(image.found, {2: 90}).labels.tolist() == [1, 90]
