"""The file and the pictures that an evaluation of a detector leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lockstep.evaluation.kept_detections import KeptDetections, kept_columns
from lockstep.images.drawing import side_by_side
from lockstep.ragged import Ragged
from lockstep.readers.coco import Coco
from lockstep.readers.detection import DetectionReader
from lockstep.recipes.data import DetectionData
from lockstep.recipes.parts import DetectionEvaluation, Pictures
from lockstep.recipes.tasks import KEPT, Detection
from lockstep.runs.showing import drawn, examples
from lockstep.runs.validation import evaluation_outputs

COCO = Path(__file__).parent.parent / "fixtures/coco"


def reader() -> DetectionReader:
    return DetectionReader(Coco(COCO / "instances.json", COCO / "images", truth=True), num_classes=80)


def task_of(how: DetectionEvaluation) -> Detection:
    return Detection(DetectionData(), 80, how).with_metrics({}, {})


def kept_by(task: Detection) -> KeptDetections:
    kept = task.metrics[KEPT]
    assert isinstance(kept, KeptDetections)
    return kept


def detect(kept: KeptDetections, source: DetectionReader) -> None:
    """Find each object where it is, with scores that rise from 0.1 on."""
    batch = source.read_batch(np.arange(len(source)))
    boxes, labels = batch["truth_boxes"], batch["truth_labels"]
    scores = boxes.replaced(torch.linspace(0.1, 1, len(boxes.values), dtype=torch.float64))
    columns = kept_columns({"boxes": boxes, "scores": scores, "labels": labels})
    kept.update(*kept.prepare(torch.arange(len(source)), batch["source_id"], *columns))


def test_detections_are_written_with_the_ids_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "detections.json"
    task = task_of(DetectionEvaluation(export_path=str(path), pictures=Pictures(count=1)))
    source = reader()
    detect(kept_by(task), source)
    assert list(evaluation_outputs(task, source)) == ["image-0"]
    written = json.loads(path.read_text())
    annotated = json.loads((COCO / "instances.json").read_text())
    known = {(each["image_id"], each["category_id"], *each["bbox"]) for each in annotated["annotations"]}
    assert written
    assert {(each["image_id"], each["category_id"], *each["bbox"]) for each in written} <= known
    assert {each["category_id"] for each in written} != {each for image in kept_by(task) for each in image.found.labels}


def test_pictures_are_written_in_place_of_those_of_the_evaluation_before(tmp_path: Path) -> None:
    task = task_of(DetectionEvaluation(pictures=Pictures(count=2, folder=str(tmp_path / "new"))))
    source = reader()
    for _ in range(2):
        kept_by(task).reset()
        detect(kept_by(task), source)
        pictures = evaluation_outputs(task, source)
    assert list(pictures) == ["image-0", "image-1"]
    for tag, pixels in pictures.items():
        stored = Image.open(io.BytesIO((tmp_path / "new" / f"export-{tag}.png").read_bytes()))
        assert np.array_equal(np.asarray(stored).transpose(2, 0, 1), pixels)
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_what_is_drawn_is_said_by_the_recipe() -> None:
    source, kept = reader(), KeptDetections(1)
    detect(kept, source)
    (image,) = kept
    (example,) = examples(source, [image.example_index], order="sequential")
    assert example.original
    original = example.original

    def picture(**how: object) -> torch.Tensor:
        return drawn(original, image.found, source.classes, Pictures(**how))  # type: ignore[arg-type]

    nothing = picture(min_score=1.0)
    assert torch.equal(nothing, original.pixels)
    assert torch.equal(picture(max_boxes=0), nothing)
    best, everything = picture(min_score=0.0, max_boxes=1), picture(min_score=0.0)
    assert not torch.equal(best, nothing)
    assert not torch.equal(best, everything)
    assert not torch.equal(picture(min_score=0.0, scores=False), picture(min_score=0.0, labels=False))
    beside = picture(min_score=0.0, ground_truth=True)
    assert torch.equal(beside[:, :, : everything.shape[2]], everything)
    objects = beside[:, :, -everything.shape[2] :]
    assert torch.equal(beside, side_by_side([everything, objects]))
    assert not torch.equal(objects, original.pixels)


def test_no_detections_are_no_boxes() -> None:
    task, source = task_of(DetectionEvaluation()), reader()
    empty = Ragged(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int64))
    numbers = empty.replaced(torch.zeros(0))
    labels = empty.replaced(torch.zeros(0, dtype=torch.int64))
    kept = kept_by(task)
    columns = kept_columns({"boxes": empty, "scores": numbers, "labels": labels})
    kept.update(*kept.prepare(torch.tensor([0]), ["1"], *columns))
    (example,) = examples(source, [0], order="sequential")
    assert example.original
    assert np.array_equal(evaluation_outputs(task, source)["image-0"], example.original.pixels)


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    task = task_of(DetectionEvaluation(pictures=Pictures(count=0)))
    assert KEPT not in task.metrics
    assert evaluation_outputs(task, reader()) == {}
