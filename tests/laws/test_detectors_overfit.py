"""Each detector learns eight images by heart.

Those with batch norm are scored with statistics computed afresh. Running variances begin at 1, where SSDlite's layers
make about 0.005, and with its momentum of 0.03 it takes some 400 steps until nothing of that is left.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.detection.configs import Detector
from lockstep.detection.values import SqueezeSsd, Ssdlite
from lockstep.optim.optimizers import Optimizer
from lockstep.recipes.tasks import Detection
from lockstep.weights.warm_start import WarmStart

DATA = Path(__file__).parents[2] / "data"
SQUEEZENET = DATA / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
AP = "PascalBoxes_Precision/mAP@0.5IOU"
LEARNED = 0.95


def eight_of(name: str, folder: Path) -> Path:
    """Make a folder of the first eight training images of a data set."""
    lists = Path("ImageSets", "Main")
    for each in (DATA / name).iterdir():
        if each.is_dir() and each.name not in lists.parts:
            (folder / each.name).symlink_to(each)
    (folder / lists).mkdir(parents=True)
    names = (DATA / name / lists / "train.txt").read_text().split()[:8]
    (folder / lists / "eight.txt").write_text("\n".join(names))
    return folder


def precision_after(
    steps: int, model: Detector, optimizer: Optimizer, images: Path, side: int, weights: Path | None = None
) -> float:
    """The average precision on the images after so many steps, each of all of them."""
    data = ls.recipes.DetectionData(
        str(images),
        test=str(images),
        train_split="eight",
        test_split="eight",
        resizer=FixedShapeResizer(side, side, "antialiased"),
    )
    train, test = (data.reader(split, model.num_classes, to_train=split == "train") for split in ("train", "test"))
    task = Detection(data, model.num_classes).with_metrics(test.classes, {})
    net = model.build(0).to(memory_format=torch.channels_last)
    state = ls.TrainState(net, optimizer)
    if weights is not None:
        ls.warm_start(state, weights, WarmStart(add_prefix="backbone.", ignore_missing=True))
    options = {"batch_size": 8, "num_processes": 0}
    loader = ls.data.Loader(train, augment=[*data.training(), *task.targets()], **options)
    ls.train(state, task.losses, loader, counts=task.counts(net), until=ls.Steps(steps))
    loader = ls.data.Loader(test, augment=data.evaluation(), **options)
    has_statistics = any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    statistics = ls.PreciseStatistics(loader, 1) if has_statistics else None
    return ls.evaluate(state, task.score, loader, metrics=task.metrics, statistics=statistics)[AP]


@pytest.mark.process
def test_squeeze_ssd_from_the_weights_of_a_classifier(tmp_path: Path) -> None:
    model = SqueezeSsd(1, layers=(12,), anchor_sizes=((50.0, 75.0, 105.0),), aspect_ratios=(0.7, 1.0))
    raccoons, adam = eight_of("raccoon", tmp_path), ls.optim.Adam(1e-3)
    assert precision_after(30, model, adam, raccoons, side=120, weights=SQUEEZENET) > LEARNED


@pytest.mark.process
def test_ssdlite_from_nothing(tmp_path: Path) -> None:
    """On the images lie 145 blood cells of three kinds."""
    assert precision_after(30, Ssdlite(3), ls.optim.Adam(1e-3), eight_of("bccd", tmp_path), side=96) > LEARNED
