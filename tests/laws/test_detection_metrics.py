"""The law of evaluation, for detections: the same bits for every number of workers and every micro-batch.

What is found on an image depends on no other image.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_detector import TinyDetector, write_coco
from torch import nn

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.data.loader import Loader
from lockstep.readers.detection import DetectionReader
from lockstep.readers.reader import Arrays
from lockstep.recipes.data import DetectionData
from lockstep.recipes.parts import DetectionEvaluation
from lockstep.recipes.tasks import KEPT, Detection

CATEGORIES = {1: "cat", 2: "dog"}
COCO = Path(__file__).parent.parent / "fixtures/coco"
SIZE = 23
NAMES = ["coco_detection_metrics", "pascal_voc_detection_metrics", "oid_challenge_object_detection_metrics"]


class Detected(Arrays):
    """Images whose ids do not ascend, with some objects each, and detections near them, many of one score."""

    def read_batch(self, indices: Any) -> dict[str, Any]:
        images = [self.image(index) for index in indices.tolist()]
        columns = {name: ls.Ragged.of([image[name] for image in images]) for name in images[0]}
        return {**super().read_batch(indices), "source_id": [str(7 * index % 101) for index in indices], **columns}

    def image(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        number = index % 5
        boxes = torch.rand(number, 4, generator=generator, dtype=torch.float64) * 100
        places = torch.arange(number).repeat(3)
        labels = torch.randint(1, 3, (number,), generator=generator)
        off = torch.randn(len(places), 4, generator=generator, dtype=torch.float64) * 5
        return {
            "truth_boxes": boxes,
            "truth_labels": labels,
            "truth_area": boxes[:, 2] * boxes[:, 3],
            "truth_is_crowd": torch.arange(number) == 3,
            "truth_difficult": torch.arange(number) == 2,
            "truth_group_of": torch.arange(number) == 3,
            "truth_verified_labels": torch.tensor([1]),
            "boxes": (boxes[places] + off).abs(),
            "scores": torch.randint(1, 4, (len(places),), generator=generator) / 4,
            "labels": labels[places],
        }


def scored(micro_batch: int) -> dict[str, str]:
    """Every value in hexadecimal: every bit of it."""
    report = ls.metrics.DetectionReport(CATEGORIES)
    metrics = {**ls.metrics.detection_metrics(NAMES, CATEGORIES, per_category=True), "report": report}

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {name: metric.columns(batch, batch) for name, metric in metrics.items()}

    loader = Loader(Detected({"x": torch.zeros(SIZE, 1)}), batch_size=4)
    state = ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1))
    result = ls.evaluate(state, score, loader, micro_batch=micro_batch, metrics=metrics)
    values = {key: value.hex() for name in NAMES for key, value in result.computed[name].items()}
    return {**values, "report": repr(result.computed["report"])}


@pytest.mark.process
def test_the_same_bits_for_every_number_of_workers_and_every_micro_batch(
    run_workers: Callable[..., list[Any]],
) -> None:
    alone = scored(SIZE)
    assert 0 < float.fromhex(alone["DetectionBoxes_Precision/mAP"]) < 1
    assert "'name': 'dog', 'objects': 1" in alone["report"]
    assert [scored(micro_batch) for micro_batch in (1, 4)] == [alone] * 2
    assert run_workers(scored, 4, 3) == [alone] * 4


def test_the_annotations_of_a_reader_are_scored_as_they_stand() -> None:
    annotations = ls.data.Coco(COCO / "instances.json", COCO / "images", masks=True, truth=True)
    reader = DetectionReader(annotations, num_classes=80)
    names = ["coco_detection_metrics", "coco_mask_metrics", "pascal_voc_detection_metrics"]
    metrics = ls.metrics.detection_metrics(names, reader.classes)

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        found = {name: batch[f"truth_{name}"] for name in ("boxes", "labels", "masks")}
        found["scores"] = found["labels"].replaced(torch.ones(len(found["labels"].values)))
        return {name: metric.columns(batch, found) for name, metric in metrics.items()}

    state = ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1))
    result = ls.evaluate(state, score, Loader(reader, batch_size=2, num_processes=0), metrics=metrics)
    for prefix in ("DetectionBoxes", "DetectionMasks", "PascalBoxes"):
        mean = "mAP@0.5IOU" if prefix == "PascalBoxes" else "mAP"
        assert result[f"{prefix}_Precision/{mean}"] == pytest.approx(1)


def found_by(resizer: FixedShapeResizer | KeepAspectRatioResizer, path: Path, micro_batch: int) -> tuple[Any, Any]:
    """The values of the metrics in hexadecimal, and on the chief what was found on each image."""
    torch.set_num_threads(1)
    data = DetectionData(train=str(path), validation=str(path), resizer=resizer)
    how = DetectionEvaluation(("coco_detection_metrics", "pascal_voc_detection_metrics"), export_path="unused")
    reader = data.reader("validation", 2)
    task = Detection(data, 2, how).with_metrics({1: "red", 2: "green"}, {})
    loader = Loader(reader, batch_size=micro_batch, augment=data.evaluation(), num_processes=0)
    state = ls.TrainState(TinyDetector(), ls.optim.SGD(0.1))
    result = ls.evaluate(state, task.score, loader, metrics=task.metrics)
    kept: Any = task.metrics[KEPT]
    return {name: value.hex() for name, value in result.scores.items()}, [
        (image.source_id, *(column.tolist() for column in image.found[:3])) for image in kept
    ]


FIXED, VARIED = FixedShapeResizer(32, 48), KeepAspectRatioResizer(24, 40)
PADDED = KeepAspectRatioResizer(24, 40, pad_to_max_dimension=True)


@pytest.mark.parametrize("resizer", [FIXED, VARIED, PADDED], ids=["one size", "own sizes", "padded"])
def test_what_is_found_on_an_image_depends_on_no_other(tmp_path: Path, resizer: Any) -> None:
    path = write_coco(tmp_path, 7)
    scores, alone = found_by(resizer, path, 1)
    assert 0 <= float.fromhex(scores["DetectionBoxes_Recall/AR@10"]) < 1
    assert [image_id for image_id, *_ in alone] == [str(7 * number) for number in range(1, 8)]
    assert sum(len(boxes) for _, boxes, *_ in alone) > 10
    for micro_batch in (3, 7):
        for one, other in zip(alone, found_by(resizer, path, micro_batch)[1], strict=True):
            assert one[2] == other[2], "labels"
            for ours, theirs in zip(one[1:], other[1:], strict=True):
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-4)


@pytest.mark.process
def test_all_workers_score_what_one_finds(tmp_path: Path, run_workers: Callable[..., list[Any]]) -> None:
    path = write_coco(tmp_path, 7)
    alone = found_by(VARIED, path, 2)
    assert run_workers(found_by, 2, VARIED, path, 2) == [alone, (alone[0], [])]
