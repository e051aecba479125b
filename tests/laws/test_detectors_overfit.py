"""Each detector learns eight images by heart.

Those with batch norm are scored with statistics computed afresh. Running variances begin at 1, where SSDlite's layers
make about 0.005, and with its momentum of 0.03 it takes some 400 steps until nothing of that is left.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.detection.values import Detector, FasterRcnnFpn, Fcos, MaskRcnnFpn, RtDetr, SqueezeSsd, Ssdlite
from lockstep.recipes.parts import MAIN_SCORES, DetectionEvaluation, DetectionMetrics
from lockstep.recipes.tasks import Detection
from lockstep.weights.warm_start import WarmStart

DATA = Path(__file__).parents[2] / "data"
SQUEEZENET = DATA / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
COCO = os.environ.get("LOCKSTEP_COCO", "")
METRICS: tuple[DetectionMetrics, ...] = ("pascal_voc_detection_metrics", "pascal_voc_instance_segmentation_metrics")
LEARNED = 0.95
FEW_PROPOSALS: dict[str, Any] = {
    "rpn_pre_nms_top_n_train": 200,
    "rpn_post_nms_top_n_train": 50,
    "rpn_pre_nms_top_n_test": 100,
    "rpn_post_nms_top_n_test": 20,
    "box_batch_size_per_image": 16,
}
"""So that a step takes two seconds, and not many times as long."""


def eight_of(name: str, folder: Path, side: int) -> ls.recipes.DetectionData:
    """The first eight training images of a data set, side x side pixels."""
    lists = Path("ImageSets", "Main")
    for each in (DATA / name).iterdir():
        if each.is_dir() and each.name not in lists.parts:
            (folder / each.name).symlink_to(each)
    (folder / lists).mkdir(parents=True)
    names = (DATA / name / lists / "train.txt").read_text().split()[:8]
    (folder / lists / "eight.txt").write_text("\n".join(names))
    return ls.recipes.DetectionData(
        str(folder),
        test=str(folder),
        train_split="eight",
        test_split="eight",
        resizer=FixedShapeResizer(side, side, "antialiased"),
    )


def eight_with_masks(folder: Path, side: int) -> ls.recipes.DetectionData:
    """Eight of COCO's images with the fewest objects that cover a hundredth of them, and these objects."""
    document = json.loads(Path(COCO, "annotations", "instances_train2017.json").read_text())
    areas = {image["id"]: image["height"] * image["width"] for image in document["images"]}
    large = [
        each
        for each in document["annotations"]
        if each["area"] >= areas[each["image_id"]] / 100 and not each["iscrowd"]
    ]
    counts = Counter(each["image_id"] for each in large)
    chosen = sorted(counts, key=lambda image: (counts[image], image))[:8]
    document["images"] = [image for image in document["images"] if image["id"] in chosen]
    document["annotations"] = [each for each in large if each["image_id"] in chosen]
    (folder / "eight.json").write_text(json.dumps(document))
    path = f"{folder / 'eight.json'}:{Path(COCO, 'train2017')}"
    return ls.recipes.DetectionData(path, test=path, masks=True, resizer=FixedShapeResizer(side, side, "antialiased"))


def precision_after(
    steps: int, model: Detector, data: ls.recipes.DetectionData, weights: Path | None = None, lr: float = 1e-3
) -> float:
    """The average precision on the images after so many steps, each of all of them; of boxes or masks, the lower."""
    train, test = (data.reader(split, model.num_classes, to_train=split == "train") for split in ("train", "test"))
    metrics = DetectionEvaluation(METRICS if data.masks else METRICS[:1])
    task = Detection(data, model.num_classes, metrics).with_metrics(test.classes, {})
    net = model.build(0).to(memory_format=torch.channels_last)
    state = ls.TrainState(net, ls.optim.Adam(lr))
    if weights is not None:
        ls.warm_start(state, weights, WarmStart(add_prefix="backbone.", ignore_missing=True))
    options = {"batch_size": 8, "num_processes": 0}
    loader = ls.data.Loader(train, augment=[*data.training(), *task.targets()], **options)
    ls.train(state, task.losses, loader, counts=task.counts(net), until=ls.Steps(steps))
    loader = ls.data.Loader(test, augment=data.evaluation(), **options)
    has_statistics = any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    statistics = ls.PreciseStatistics(loader, 1) if has_statistics else None
    found = ls.evaluate(state, task.score, loader, metrics=task.metrics, statistics=statistics)
    return min(found[MAIN_SCORES[metric]] for metric in metrics.metrics)


@pytest.mark.process
def test_squeeze_ssd_from_the_weights_of_a_classifier(tmp_path: Path) -> None:
    model = SqueezeSsd(1, layers=(12,), anchor_sizes=((50.0, 75.0, 105.0),), anchor_ratios=(1 / 0.7, 1.0))
    raccoons = eight_of("raccoon", tmp_path, side=120)
    assert precision_after(30, model, raccoons, weights=SQUEEZENET) > LEARNED


@pytest.mark.slow
@pytest.mark.process
def test_ssdlite_from_nothing(tmp_path: Path) -> None:
    """On the images lie 145 blood cells of three kinds."""
    assert precision_after(30, Ssdlite(3), eight_of("bccd", tmp_path, side=96)) > LEARNED


@pytest.mark.slow
def test_fcos_from_nothing(tmp_path: Path) -> None:
    assert precision_after(50, Fcos(1), eight_of("raccoon", tmp_path, side=128)) > LEARNED


@pytest.mark.slow
def test_rt_detr_from_nothing(tmp_path: Path) -> None:
    model = RtDetr(1, num_queries=50, num_denoising=20)
    assert precision_after(100, model, eight_of("raccoon", tmp_path, side=96), lr=3e-4) > LEARNED


@pytest.mark.slow
def test_faster_rcnn_from_nothing(tmp_path: Path) -> None:
    model = FasterRcnnFpn(1, freeze_batchnorm=False, **FEW_PROPOSALS)
    assert precision_after(90, model, eight_of("raccoon", tmp_path, side=128)) > LEARNED


@pytest.mark.slow
@pytest.mark.skipif(not COCO, reason="no LOCKSTEP_COCO with the annotations and images of COCO")
def test_mask_rcnn_from_nothing(tmp_path: Path) -> None:
    model = MaskRcnnFpn(90, freeze_batchnorm=False, **FEW_PROPOSALS)
    assert precision_after(100, model, eight_with_masks(tmp_path, side=128)) > LEARNED
