"""The recipes of Inception-v3: on ImageNet as the reference trainers trained it, and fine-tuned on other images."""

from __future__ import annotations

from dataclasses import replace

from lockstep.checkpoints.retention import Retention
from lockstep.losses.regularization import L2
from lockstep.models.inception_v3 import InceptionV3
from lockstep.optim import Exponential, MovingAverage, RMSProp
from lockstep.parallel.towers import Towers
from lockstep.progress import Epochs, Steps
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import Checkpoints, CrossEntropy, Evaluate, InitialWeights, Stage
from lockstep.recipes.preprocessing import Inception
from lockstep.recipes.recipe import Recipe
from lockstep.weights.warm_start import WarmStart

CLASS_LAYERS = (r"^fc\.", r"^AuxLogits\.fc\.")
"""What has a number for each class."""
HEADS = (r"^fc\.", r"^AuxLogits\.")
"""The same, and the rest of the auxiliary head, as slim begins it anew."""


def inception_v3() -> Recipe:
    """Inception-v3 on ImageNet, as the multi-GPU trainer had it: 256 images over 8 towers, 100,000 steps.

    The published run reached 73.5 % after them.
    """
    return Recipe(
        name="inception_v3",
        model=InceptionV3(num_classes=1001),
        data=ImageData(preprocessing=Inception(crop_by_boxes=True)),
        optimizer=_rmsprop(Exponential(0.1, decay_steps=Epochs(30), factor=0.16)),
        loss=CrossEntropy(label_smoothing=0.1, auxiliary_weight=0.4),
        batch_size=256,
        regularization=(L2(4e-5),),
        average=MovingAverage(0.9999, statistics=True),
        num_towers=8,
        towers=Towers(batch_norm="last", precision="bf16", channels_last=True),
        end=Steps(100_000),
        checkpoints=Checkpoints(retention=Retention(best="validation/top1")),
        evaluate=Evaluate(weights="average", top=(1, 5)),
    )


def inception_v3_distributed() -> Recipe:
    """The same with the learning rate of the distributed trainer: 0.045, and 6 % less every two epochs."""
    schedule = Exponential(0.045, decay_steps=Epochs(2), factor=0.94)
    return replace(inception_v3(), name="inception_v3_distributed", optimizer=_rmsprop(schedule), end=Epochs(100))


def flowers() -> Recipe:
    """A trained Inception-v3 that learns five flowers: fresh heads, all layers at a small rate, one tower."""
    return replace(
        inception_v3(),
        name="flowers",
        model=InceptionV3(num_classes=6),
        data=ImageData(),
        warm_start=InitialWeights(mapping=WarmStart(skip=CLASS_LAYERS)),
        optimizer=_rmsprop(Exponential(0.001, decay_steps=Epochs(30), factor=0.16)),
        batch_size=32,
        num_towers=1,
        end=Steps(2_000),
    )


def flowers_two_stages() -> Recipe:
    """The same as slim's script does it: 1,000 steps of the heads alone, then 500 of all layers at a smaller rate.

    Without smoothed labels, and without averages.
    """
    return replace(
        flowers(),
        name="flowers_two_stages",
        warm_start=InitialWeights(mapping=WarmStart(skip=HEADS)),
        loss=CrossEntropy(),
        average=None,
        evaluate=Evaluate(top=(1, 5)),
        end=None,
        stages=(
            Stage(Steps(1_000), optimizer=_rmsprop(0.01), train_only=HEADS),
            Stage(Steps(500), optimizer=_rmsprop(0.0001)),
        ),
    )


def _rmsprop(lr: float | Exponential) -> RMSProp:
    return RMSProp(lr, alpha=0.9, momentum=0.9, eps=1.0)
