"""The law of annotations: the same images and objects are the same targets in every format, and the same run."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from annotation_formats import (
    DATA,
    FORMATS,
    Images,
    coco,
    labelimg,
    names_of,
    pascal,
    roboflow_yolo,
    table,
    table_in_folder,
    xml_beside,
)
from tiny_detector import TinyDetector, tiny_recipe

import lockstep as ls
from lockstep.cli.convert import CONVERTERS
from lockstep.cli.evaluate import evaluate_as_worker
from lockstep.cli.main import main
from lockstep.convert.detection import convert_detection
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError
from lockstep.readers.boxed_images import BoxedImage, BoxedObject
from lockstep.readers.coco import Coco
from lockstep.readers.label_map import LabelMap, write_label_map
from lockstep.readers.open import open_detection, open_source
from lockstep.readers.voc import read_voc_xml
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData
from lockstep.recipes.python_parts import PythonModel
from lockstep.runs.data_sets import find_data_sets
from lockstep.runs.found_data import look_at
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
    known, other = (
        DetectionData(str(path), share, label_map=label_map)
        for path in (given, written(images, folder, tmp_path / "new"))
    )
    for split in ("train", "validation"):
        assert targets_of(other, split, num_classes) == targets_of(known, split, num_classes)


@pytest.mark.parametrize("written", [pascal, labelimg, xml_beside, table, table_in_folder])
def test_a_set_that_lacks_a_class_has_the_numbers_of_that_to_train_on(written: Format, tmp_path: Path) -> None:
    images, folder = SOURCES["bccd"]
    lacking = [each._replace(objects=tuple(o for o in each.objects if o.name != "RBC")) for each in images[:5]]
    train, valid = (
        written(some, folder, tmp_path / "data" / split) for split, some in {"train": images, "valid": lacking}.items()
    )
    whole = LabelMap.alphabetical(names_of(images))
    write_label_map(tmp_path / "all.pbtxt", whole)
    data, told = (DetectionData(str(train), str(valid), label_map=path) for path in (None, str(tmp_path / "all.pbtxt")))
    for split in ("train", "validation"):
        assert targets_of(data, split, 3) == targets_of(told, split, 3)
    alone = DetectionData(validation=str(valid)) if written is not xml_beside else data
    assert targets_of(alone, "validation", 3)[3] == {1: "Platelets", 2: "RBC", 3: "WBC"}
    if written is not xml_beside:  # whose folder is not named as a set
        for reader in (open_source(valid), open_detection(valid, split="val")):
            assert reader.classes == whole.names
        for path, base in {train: "train", valid: "valid"}.items():
            convert_detection(path, tmp_path / "shards", base=base, settings=Settings(num_processes=1))
        shards = DetectionData(*(f"{tmp_path}/shards/{base}-*" for base in ("train", "valid")))
        for split in ("train", "validation"):
            assert targets_of(shards, split, 3)[4] == targets_of(data, split, 3)[4]
    other = DetectionData(str(valid), str(train))
    with pytest.raises(DataError, match=r"data/train.* are of a class that none in .*data/valid.*\n.*the class 'RBC'"):
        other.reader("validation", 3)


@pytest.mark.process
def test_a_run_on_sets_of_which_one_lacks_a_class_goes_on_and_is_scored_on_others(tmp_path: Path) -> None:
    images, folder = SOURCES["bccd"]
    kept = {"train": {"Platelets", "RBC", "WBC"}, "valid": {"Platelets", "WBC"}, "other": {"WBC"}}
    for name, classes in kept.items():
        some = [each._replace(objects=tuple(o for o in each.objects if o.name in classes)) for each in images]
        labelimg(some, folder, tmp_path / name)
    data = DetectionData(str(tmp_path / "train"), str(tmp_path / "valid"), resizer=tiny_recipe(folder).data.resizer)  # type: ignore[union-attr]
    recipe = tiny_recipe(folder, per_category=True)
    recipe = replace(recipe, data=data, model=PythonModel(Function.of(TinyDetector), num_classes=3))
    for steps in (2, 3):
        leave()
        Run(replace(recipe, end=ls.Steps(steps)), tmp_path / "run", ls.join("cpu")).run()
    history = (tmp_path / "run/history.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in history] == ["start", "end", "resume", "end"]
    leave()
    assert evaluate_as_worker(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "other")]) == 0
    scores = json.loads((tmp_path / "run/evaluations.jsonl").read_text().splitlines()[-1])["scores"]
    named = {name.rpartition("/")[2]: value for name, value in scores.items() if "ByCategory" in name}
    assert named == {"Platelets": "nan", "RBC": "nan", "WBC": 0.0}, "of the others none has objects"


def trained(path: Path, workdir: Path) -> list[Any]:
    """What three updates of a detector on BCCD come to: losses and scores, and the bytes of the last checkpoint."""
    data = DetectionData(str(path), "40 %", resizer=tiny_recipe(path).data.resizer)  # type: ignore[union-attr]
    model = PythonModel(Function.of(TinyDetector), num_classes=3)
    leave()
    Run(replace(tiny_recipe(path), data=data, model=model, end=ls.Steps(3)), workdir, ls.join("cpu")).run()
    (last,) = workdir.glob("checkpoints/step-*3")
    files = sorted(file for file in last.iterdir() if file.suffix == ".safetensors")
    return [(workdir / "metrics.jsonl").read_text(), *[file.read_bytes() for file in files]]


@pytest.fixture(scope="module")
def known_run(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("known")
    return trained(coco(*SOURCES["bccd"], folder / "data") / "annotations/all.json", folder / "run")


@pytest.mark.process
@pytest.mark.parametrize(
    "written", [pytest.param(each, marks=() if each is roboflow_yolo else pytest.mark.slow) for each in FORMATS]
)
def test_every_format_gives_the_same_run(written: Format, known_run: list[Any], tmp_path: Path) -> None:
    found = trained(written(*SOURCES["bccd"], tmp_path / "data"), tmp_path / "run")
    assert len(found) > 1
    assert found == known_run


@pytest.mark.parametrize("written", FORMATS)
def test_every_format_is_shown_converted_and_found_as_data_of_ones_own(
    written: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images, folder = SOURCES["bccd"]
    path = written(images, folder, tmp_path / "data")
    assert main(["show", str(path), "--to", str(tmp_path / "sheet.png"), "--positions", "0:2"]) == 0
    caplog.set_level(logging.ERROR, "lockstep")
    command = argparse.ArgumentParser()
    CONVERTERS["detection"].add_arguments(command)
    words = [str(path), "--to", str(tmp_path / "shards"), "--processes", "1"]
    assert CONVERTERS["detection"].run(command.parse_args(words))["records"] == len(images)
    shards, given = (DetectionData(str(place)) for place in (tmp_path / "shards", path))
    of_shards, of_data = (targets_of(data, "train", 3) for data in (shards, given))
    assert of_shards[1:3] + of_shards[4:] == of_data[1:3] + of_data[4:]
    found = look_at(find_data_sets(str(path)))
    assert (found.num_images, found.classes, found.has_objects) == (len(images), ("Platelets", "RBC", "WBC"), True)
    assert sum(found.counts.values()) == sum(len(image.objects) for image in images)
    assert torch.tensor(found.box_sides).shape == (sum(found.counts.values()), 2)
