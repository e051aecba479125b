"""What trainer_test.py of the Object Detection API asserts, said of ours: two steps of a detector that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations import RandomAdjustBrightness, RandomAdjustContrast
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.errors import InputError, MissingFieldError
from lockstep.recipes.data import DetectionData
from lockstep.recipes.tasks import Detection
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records
from lockstep.types import Batch, StepReport

FIXTURES = Path(__file__).parents[1] / "fixtures"
NUM_CLASSES, SIDE = 2, 28
SCORES = [0.25, 0.75]
OBJECT = "image/object/"


class FakeDetector(DetectionModel):
    """One box an image, by layers without any map: sigmoid and smooth L1 losses, as the fake of the reference has."""

    num_classes = NUM_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * SIDE * SIDE, 10)
        self.boxes, self.logits = nn.Linear(10, 4), nn.Linear(10, NUM_CLASSES)
        self.seen: list[Targets] = []

    def preprocess(self, images: Tensor) -> Tensor:
        assert (images.dtype, images.dim()) == (torch.float32, 4)
        assert 0 <= images.min() <= images.max() <= 255
        return images / 255

    def assign(self, targets: Targets) -> Targets:
        self.seen.append(targets)
        return targets

    def forward(self, inputs: Tensor, assigned: Any = None) -> Mapping[str, Tensor]:
        hidden = F.relu(self.hidden(inputs.flatten(1)))
        return {"boxes": self.boxes(hidden), "logits": self.logits(hidden)}

    def losses(self, predictions: Mapping[str, Tensor], assigned: Targets) -> Mapping[str, Tensor]:
        boxes = torch.stack([each[0] for each in assigned.boxes]) / SIDE
        classes = torch.stack([each[0] for each in assigned.classes])
        return {
            "localization": F.smooth_l1_loss(predictions["boxes"], boxes),
            "classification": F.binary_cross_entropy_with_logits(predictions["logits"], classes),
        }

    def postprocess(self, predictions: Mapping[str, Tensor]) -> Sequence[Detections]:
        best = predictions["logits"].sigmoid().max(1)
        return [
            Detections(box[None] * SIDE, score[None], label[None] + 1)
            for box, score, label in zip(predictions["boxes"], best.values, best.indices, strict=True)
        ]


@pytest.fixture
def record(tmp_path: Path) -> str:
    """One image with one object of label 2, as the reference's test writes it."""
    edges = {"ymin": 0.25, "xmin": 0.25, "ymax": 0.75, "xmax": 0.75}
    fields: dict[str, Any] = {
        "image/encoded": [(FIXTURES / "images" / "hopper.jpg").read_bytes()],
        "image/format": [b"jpeg"],
        f"{OBJECT}class/label": np.array([2]),
        f"{OBJECT}class/text": [b"two"],
        f"{OBJECT}class/multiclass_scores": np.array(SCORES, np.float32),
    }
    fields |= {f"{OBJECT}bbox/{name}": np.array([value], np.float32) for name, value in edges.items()}
    path = tmp_path / "one.record"
    write_records(path, [serialize_example(fields)])
    return str(path)


def trained(data: DetectionData, model: FakeDetector) -> StepReport | None:
    task = Detection(data, NUM_CLASSES)
    state = ls.TrainState(model, ls.optim.Adam(0.01))
    reader = data.reader("train", NUM_CLASSES, to_train=True)
    loader = ls.data.Loader(reader, batch_size=1, augment=[*data.training(), *task.targets()], num_processes=0)
    return ls.train(state, task.losses, loader, counts=task.counts(model), until=ls.Steps(2))


def data_of(record: str, **options: Any) -> DetectionData:
    colours = RandomAdjustBrightness(max_delta=0.2), RandomAdjustContrast(min_delta=0.7, max_delta=1.1)
    return DetectionData(record, resizer=FixedShapeResizer(SIDE, SIDE), augment=colours, **options)


def test_two_steps_are_trained_to_the_end(record: str) -> None:
    model = FakeDetector()
    before = model.hidden.weight.detach().clone()
    report = trained(data_of(record), model)
    assert report is not None
    assert report.step == 2
    assert {*report.losses} == {"localization", "classification"}
    assert not torch.equal(model.hidden.weight, before)


def test_a_tower_gets_targets_in_pixels_and_classes_from_0(record: str) -> None:
    model = FakeDetector()
    trained(data_of(record), model)
    first, second = model.seen
    assert first.boxes[0].tolist() == second.boxes[0].tolist() == [[7.0, 7.0, 21.0, 21.0]]
    assert first.classes[0].tolist() == [[0.0, 1.0]]
    assert (first.labels[0].tolist(), first.weights[0].tolist()) == ([2], [1.0])
    assert (first.is_crowd[0].tolist(), first.masks, first.shape) == ([False], None, (SIDE, SIDE))


def test_two_steps_are_trained_on_the_scores_of_all_classes(record: str) -> None:
    model = FakeDetector()
    report = trained(data_of(record, use_multiclass_scores=True), model)
    assert report is not None
    assert report.step == 2
    assert model.seen[0].classes[0].tolist() == [SCORES]


@pytest.mark.parametrize("options", [{"masks": True}, {"num_keypoints": 17}])
def test_merged_boxes_have_no_masks_or_keypoints(record: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="merge"):
        data_of(record, merge_multiple_label_boxes=True, **options)


def test_what_a_batch_does_not_have_is_named() -> None:
    """The reference raises where a model asks for ground truth that nobody has provided."""
    with pytest.raises(MissingFieldError, match="boxes"):
        Targets.of(
            Batch({"image": torch.zeros(1, 3, SIDE, SIDE)}, position=0, batch_size=1, towers=range(1)), (1, 1), []
        )


def test_the_model_is_built_once_whatever_the_towers(record: str) -> None:
    """The reference builds it once for its checkpoint, and once for each clone."""
    built = []

    class Counted(FakeDetector):
        def __init__(self) -> None:
            built.append(self)
            super().__init__()

    data = data_of(record)
    task, model = Detection(data, NUM_CLASSES), Counted()
    reader = data.reader("train", NUM_CLASSES, to_train=True)
    loader = ls.data.Loader(reader, batch_size=4, augment=[*data.training(), *task.targets()], num_processes=0)
    state = ls.TrainState(model, ls.optim.Adam(0.01))
    ls.train(state, task.losses, loader, ls.Towers(4), counts=task.counts(model), until=ls.Steps(1))
    assert len(model.seen) == 4
    assert len(built) == 1
