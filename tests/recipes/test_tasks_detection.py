"""What a detector is trained by and scored by: its losses and their counts, inputs of several sizes, its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_detector import Objects, TinyDetector, make_loader, make_task
from torch import Tensor

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.recipes.data import DetectionData
from lockstep.recipes.parts import DetectionEvaluation
from lockstep.recipes.tasks import ASSIGNED, REPORT, Detection, network_input

KEEP = KeepAspectRatioResizer(24, 36)


class Recorder(TinyDetector):
    """Notes what it is called with."""

    size_divisibility = 16

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[Targets] = []
        self.inputs: list[Tensor] = []

    def assign(self, targets: Targets) -> Any:
        self.targets.append(targets)
        return super().assign(targets)

    def forward(self, inputs: Tensor, assigned: Any = None) -> Mapping[str, Any]:
        self.inputs.append(inputs)
        return super().forward(inputs, assigned)


def batch_of(task: Detection, sides: Any = ((24, 24),)) -> ls.Batch:
    return next(iter(ls.batches(make_loader(task, Objects(sides=sides)))))


def test_its_losses_are_sums_over_what_it_counts() -> None:
    task, model = make_task(), TinyDetector()
    batch = batch_of(task)
    counts, losses = task.counts(model)(batch), task.losses(model, batch)
    assert counts.keys() == losses.keys() == {"classification", "localization"}
    number = len({(image, *cell) for image, cell in cells(batch)})
    assert {name: int(count) for name, count in counts.items()} == dict.fromkeys(counts, number)


def cells(batch: ls.Batch) -> list[tuple[int, list[int]]]:
    """The image of each object, and the cell of its centre."""
    boxes = batch["boxes"]
    centres = (boxes.values[:, :2] + boxes.values[:, 2:]) / 2
    return list(zip(boxes.owner.tolist(), (centres * 4).long().tolist(), strict=True))


def test_objects_are_assigned_once_a_tower() -> None:
    """What was counted is what the losses take; without counts the losses find it themselves."""
    task, model = make_task(), Recorder()
    batch = batch_of(task)
    task.counts(model)(batch)
    counted = task.losses(model, batch)
    assert len(model.targets) == 1
    del batch[ASSIGNED]
    alone = task.losses(model, batch)
    assert len(model.targets) == 2
    assert ASSIGNED not in batch
    assert all(torch.equal(counted[name], alone[name]) for name in counted)


def test_a_step_counts_each_tower_once() -> None:
    task, model = make_task(), Recorder()
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    ls.train_step(state, task.losses, batch_of(task), ls.Towers(1), counts=task.counts(model))
    assert len(model.targets) == 1
    batch = next(iter(ls.batches(make_loader(task), ls.Towers(4))))
    ls.train_step(state, task.losses, batch, ls.Towers(4), counts=task.counts(model))
    assert [len(targets) for targets in model.targets[1:]] == [2] * 4


def test_boxes_are_in_pixels_of_their_image_on_the_input() -> None:
    """Images of several sizes lie in the upper left corner of an input that has room for the largest."""
    task, model = make_task(KEEP), Recorder()
    batch = batch_of(task, [(24, 30), (30, 24)])
    assert isinstance(batch["image"], list)
    task.losses(model, batch)
    (targets,), (inputs,) = model.targets, model.inputs
    assert targets.shape == inputs.shape[2:] == (32, 32), "30 by 30, to multiples of 16"
    for image, shares, boxes in zip(batch["image"], batch["boxes"], targets.boxes, strict=True):
        height, width = image.shape[1:]
        assert torch.equal(boxes, shares * torch.tensor([height, width, height, width]))


def test_padding_is_zero_after_preprocessing() -> None:
    model = Recorder()
    images = [torch.full((3, 20, 30), 255.0), torch.full((3, 30, 20), 255.0)]
    inputs = network_input(model, images)
    assert inputs.shape == (2, 3, 32, 32)
    assert (inputs[0, :, :20, :30] == 0.5).all()
    assert (inputs[0, :, 20:] == 0).all()
    assert (inputs[0, :, :, 30:] == 0).all()
    assert torch.equal(inputs[1], inputs[0].transpose(1, 2))


def test_an_image_is_detected_without_the_padding_of_others() -> None:
    task, model = make_task(KEEP), Recorder()
    batch = batch_of(task, [(24, 30), (30, 24)])
    model.eval()
    together = task.detect(model, batch)
    assert [tuple(each.shape[2:]) for each in model.inputs] == [(32, 32)] * 8, "one by one"
    for row, found in enumerate(together):
        (alone,) = task.detect(model, batch.rows(slice(row, row + 1), range(1)))
        assert all(torch.equal(one, other) for one, other in zip(found[:3], alone[:3], strict=True))


def test_images_of_one_size_are_detected_together() -> None:
    task, model = make_task(), Recorder()
    task.detect(model, batch_of(task))
    assert [len(each) for each in model.inputs] == [8]


def test_columns_are_in_pixels_of_the_images_of_the_data() -> None:
    """x, y, width and height; an image of 12 x 30 pixels is 24 x 24 for the network."""
    task = make_task()
    found = Detections(
        torch.tensor([[4.0, 8, 12, 20], [-3, 0, 24, 30]]), torch.tensor([0.9, 0.2]), torch.tensor([2, 1])
    )._replace(keypoints=torch.tensor([[[4.0, 8, 0.5]], [[-3, 30, 2]]]))
    batch = {"original_size": torch.tensor([[12, 30]])}
    columns = task.on_stored_images([found], batch)
    assert columns["boxes"].values.tolist() == [[10, 2, 15, 4], [0, 0, 30, 12]]
    assert columns["scores"].values.tolist() == pytest.approx([0.9, 0.2])
    assert columns["labels"].values.tolist() == [2, 1]
    assert columns["labels"].lengths.tolist() == [2]
    assert columns["keypoints"].values.tolist() == [[[10, 2, 0.5]], [[37.5, -1.5, 2]]]
    assert "masks" not in columns


def test_a_detector_without_counts_has_means() -> None:
    class Means(TinyDetector):
        def counts(self, assigned: Any) -> Mapping[str, Tensor]:
            return DetectionModel.counts(self, assigned)

    task, model = make_task(), Means()
    batch = batch_of(task)
    assert task.counts(model)(batch) == {}
    state = ls.TrainState(model, ls.optim.SGD(0.0))
    halves = next(iter(ls.batches(make_loader(task), ls.Towers(2))))
    report = ls.train_step(state, task.losses, halves, ls.Towers(2), counts=task.counts(model))
    sums = task.losses(model, batch)
    assert report.losses == {name: pytest.approx(loss.item() / 2) for name, loss in sums.items()}


def test_keypoints_are_on_the_input_and_have_a_sigma_each() -> None:
    data = DetectionData(num_keypoints=2, resizer=FixedShapeResizer(24, 24))
    points = Ragged.of([torch.tensor([[[0.5, 0.25], [torch.nan, torch.nan]]]), torch.zeros(0, 2, 2)])
    fields = {"boxes": Ragged.of([torch.tensor([[0.0, 0, 1, 1]]), torch.zeros(0, 4)]), "keypoints": points}
    fields["labels"] = Ragged.of([torch.tensor([1]), torch.zeros(0, dtype=torch.int64)])
    made = data.targets(1)(fields, Draws(0, np.arange(2)))
    targets = Targets.of(made, (32, 32), [(24, 20), (24, 24)])
    assert targets.keypoints is not None
    assert [each.tolist() for each in targets.keypoints] == [[[[12, 5, 1], [0, 0, 0]]], []]
    scored = DetectionEvaluation(("coco_keypoint_metrics",), keypoint_sigmas=(0.05, 0.1))
    Detection(data, 1, scored).check(1)
    assert Detection(data, 1, scored).with_metrics({1: "person"}, {}).metrics["coco_keypoint_metrics"] is not None
    with pytest.raises(ls.InputError, match="num_keypoints=2, and 17 sigmas"):
        Detection(data, 1, replace(scored, keypoint_sigmas=())).check(1)


@pytest.mark.parametrize(
    ("names", "measured"),
    [(("coco_detection_metrics",), "boxes"), (("coco_detection_metrics", "coco_mask_metrics"), "masks")],
)
def test_its_table_by_class_goes_by_masks_where_they_are_scored(names: Any, measured: str) -> None:
    task = Detection(make_task().data, 2, DetectionEvaluation(names)).with_metrics({}, {})
    report: Any = task.in_detail({}, keep_all=False).metrics[REPORT]
    assert report.measured == measured
