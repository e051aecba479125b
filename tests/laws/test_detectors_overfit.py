"""Each detector learns eight photographs by heart."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.detection.configs import Detector
from lockstep.detection.values import SqueezeSsd
from lockstep.optim.optimizers import Optimizer
from lockstep.recipes.tasks import Detection
from lockstep.weights.warm_start import WarmStart

DATA = Path(__file__).parents[2] / "data"
SQUEEZENET = DATA / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
AP = "PascalBoxes_Precision/mAP@0.5IOU"
LEARNED = 0.95


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Eight of the raccoons, in a folder of their own."""
    for name in ("annotations", "images"):
        (tmp_path / name).symlink_to(DATA / "raccoon" / name)
    lists = DATA / "raccoon" / "ImageSets" / "Main", tmp_path / "ImageSets" / "Main"
    lists[1].mkdir(parents=True)
    (lists[1] / "eight.txt").write_text("\n".join((lists[0] / "train.txt").read_text().split()[:8]))
    return tmp_path


def precision_after(
    steps: int, model: Detector, optimizer: Optimizer, photographs: Path, side: int, weights: Path | None = None
) -> float:
    """The average precision on the photographs after so many steps, each of all of them."""
    data = ls.recipes.DetectionData(
        str(photographs),
        test=str(photographs),
        train_split="eight",
        test_split="eight",
        resizer=FixedShapeResizer(side, side, "antialiased"),
    )
    train, test = data.reader("train", 1, to_train=True), data.reader("test", 1)
    task = Detection(data, 1).with_metrics(test.classes, {})
    state = ls.TrainState(model.build(0), optimizer)
    if weights is not None:
        ls.warm_start(state, weights, WarmStart(add_prefix="backbone.", ignore_missing=True))
    options = {"batch_size": 8, "num_processes": 0}
    loader = ls.data.Loader(train, augment=[*data.training(), *task.targets()], **options)
    ls.train(state, task.losses, loader, counts=task.counts(state.model), until=ls.Steps(steps))
    loader = ls.data.Loader(test, augment=data.evaluation(), **options)
    return ls.evaluate(state, task.score, loader, metrics=task.metrics)[AP]


@pytest.mark.process
def test_squeeze_ssd_from_the_weights_of_a_classifier(photographs: Path) -> None:
    model = SqueezeSsd(1, layers=(12,), anchor_sizes=((50.0, 75.0, 105.0),), aspect_ratios=(0.7, 1.0))
    adam = ls.optim.Adam(1e-3)
    assert precision_after(30, model, adam, photographs, side=120, weights=SQUEEZENET) > LEARNED
