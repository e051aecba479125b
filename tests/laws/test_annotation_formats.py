"""The law of annotations: the same images and objects are the same targets in every format, and the same run."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from annotation_formats import DATA, FORMATS, Images, coco, names_of
from tiny_detector import TinyDetector, tiny_recipe

import lockstep as ls
from lockstep.cli.convert import CONVERTERS
from lockstep.cli.main import main
from lockstep.readers.boxed_images import BoxedImage, BoxedObject
from lockstep.readers.coco import Coco
from lockstep.readers.voc import read_voc_xml
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData
from lockstep.recipes.python_parts import PythonModel
from lockstep.runs.own_data import find_data_sets, look_at
from lockstep.runs.run import Run
from lockstep.workers.rank import leave

Format = Callable[[Images, Path, Path], Path]
FIXTURES = Path(__file__).parent.parent / "fixtures"
COCO_LABELS = FIXTURES / "label_maps" / "mscoco_label_map.pbtxt"


def of_voc(folder: Path, images: str, numbers: slice) -> tuple[Images, Path]:
    annotations = next(folder.glob("[Aa]nnotations"))
    read = [read_voc_xml(path) for path in sorted(annotations.glob("*.xml"))[numbers]]
    read[-1] = read[-1]._replace(objects=())
    read = [each._replace(objects=tuple(o._replace(truncated=False) for o in each.objects)) for each in read]
    return read, folder / images


def of_coco(*_: Any) -> tuple[Images, Path]:
    folder = FIXTURES / "coco"
    reader = Coco(folder / "instances.json", folder / "images", truth=True)
    read = []
    for index in range(len(reader)):
        fields = reader.read_batch(np.array([index]))
        width, height = fields["image"][0].size
        boxes = [(y, x, y + high, x + wide) for x, y, wide, high in fields["truth_boxes"].values.tolist()]
        names = [reader.classes[label] for label in fields["truth_labels"].values.tolist()]
        objects = tuple(BoxedObject(name, box) for name, box in zip(names, boxes, strict=True))
        read.append(BoxedImage(reader.example_id(index), height, width, objects))
    return read, folder / "images"


SOURCES: dict[str, tuple[Images, Path]] = {
    "bccd": of_voc(DATA / "bccd", "JPEGImages", slice(8)),
    "raccoon": of_voc(DATA / "raccoon", "images", slice(28, 36)),
    "coco": of_coco(),
}


def targets_of(data: DetectionData, split: str, num_classes: int) -> list[Any]:
    """All that is trained on and scored against: names, files, boxes to the bit, labels and their names."""
    reader = data.reader(split, num_classes, to_train=split == "train")
    batch = reader.read_batch(np.arange(len(reader)))
    fields = ("boxes", "labels", *(name for name in ("truth_labels",) if name in batch))
    return [
        [reader.example_id(index) for index in range(len(reader))],
        [image.data for image in batch["image"]],
        batch["original_size"].tolist(),
        reader.classes,
        *[[rows.numpy().tobytes() for rows in batch[name]] for name in fields],
    ]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("written", FORMATS)
def test_every_format_gives_the_same_targets(written: Format, source: str, tmp_path: Path) -> None:
    images, folder = SOURCES[source]
    label_map = str(COCO_LABELS) if source == "coco" else None
    num_classes = 90 if source == "coco" else len(names_of(images))
    share = "40 %" if source != "coco" else "50 %"
    given = coco(images, folder, tmp_path / "known") / "annotations/all.json"
    # The reference has the ids of categories as labels, or the label map's; half of the numbers are read by Coco alone.
    known, other = (
        DetectionData(str(path), share, label_map=label_map)
        for path in (given, written(images, folder, tmp_path / "new"))
    )
    for split in ("train", "validation"):
        assert targets_of(other, split, num_classes) == targets_of(known, split, num_classes)
