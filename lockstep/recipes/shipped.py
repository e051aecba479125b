"""The recipes that come with Lockstep, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.checkpoints.retention import Retention
from lockstep.errors import RecipeError
from lockstep.listing import did_you_mean
from lockstep.losses.regularization import L2
from lockstep.models import InceptionV3, LeNet, Mnist, SqueezeNet
from lockstep.optim import SGD, ByName, Cosine, Exponential, MovingAverage, RMSProp
from lockstep.parallel.towers import Towers
from lockstep.progress import Epochs, Interval, Steps
from lockstep.recipes.data import ImageData, MnistData
from lockstep.recipes.parts import Checkpoints, CrossEntropy, Evaluate, InitialWeights, Stage
from lockstep.recipes.preprocessing import Inception, ResizedCrop
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped_detection import DETECTORS
from lockstep.recipes.toml import load
from lockstep.weights.warm_start import WarmStart

_CLASS_LAYERS = (r"^fc\.", r"^AuxLogits\.fc\.")
"""The layers of Inception-v3 whose shape depends on the number of classes."""
_HEADS = (r"^fc\.", r"^AuxLogits\.")
"""These layers and the rest of the auxiliary head, which slim initializes anew."""
_CAFFE_MEAN = (103.939 / 255, 116.779 / 255, 123.68 / 255)
"""The mean colour of ImageNet, blue first, as weights from Caffe expect it; they take values up to 255."""


def find(name: str) -> Recipe:
    """Return a shipped recipe by name, or read one from a file whose name ends in .toml."""
    if name.endswith(".toml"):
        return load(Path(name))
    if name not in _SHIPPED:
        raise RecipeError(
            f"{name}: there is no such recipe.",
            given=name,
            expected=f"{', '.join(names())}, or a file that ends in .toml",
            hint=did_you_mean(name, names()) or "give one of these",
        )
    return _SHIPPED[name]()


def names() -> list[str]:
    """Names of the shipped recipes."""
    return list(_SHIPPED)


def _mnist() -> Recipe:
    """The reference convnet on MNIST, trained to 99 %: cosine from 0.05 over 4 epochs, Nesterov momentum 0.9."""
    epochs = Epochs(4)
    return Recipe(
        name="mnist",
        model=Mnist(),
        data=MnistData(),
        optimizer=SGD(Cosine(0.05, epochs), momentum=0.9, nesterov=True),
        batch_size=128,
        num_towers=2,
        towers=Towers(channels_last=True),
        end=epochs,
    )


def _mnist_reference() -> Recipe:
    """The reference convnet, trained as the reference did: a constant rate of 0.1, for 10 epochs.

    At this rate the net is fragile: one seed in a few dies at once and stays at 10 %, since the last hidden layer has
    ten ReLU units, and when all of them are off no gradient comes back. Use `mnist` to get a good model.
    """
    optimizer = SGD(0.1, momentum=0.9, nesterov=True)
    return replace(_mnist(), name="mnist_reference", optimizer=optimizer, end=Epochs(10))


def _lenet() -> Recipe:
    """Slim's LeNet on MNIST, as its script trains it: 20,000 steps of 50 images at a constant rate of 0.01."""
    return Recipe(
        name="lenet",
        model=LeNet(),
        data=MnistData(scale="one"),
        optimizer=SGD(0.01),
        batch_size=50,
        num_towers=1,
        towers=Towers(channels_last=True),
        end=Steps(20_000),
    )


def _inception_v3() -> Recipe:
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


def _inception_v3_distributed() -> Recipe:
    """Inception-v3 with the learning rate of the distributed trainer: 0.045, and 6 % less every two epochs."""
    schedule = Exponential(0.045, decay_steps=Epochs(2), factor=0.94)
    return replace(_inception_v3(), name="inception_v3_distributed", optimizer=_rmsprop(schedule), end=Epochs(100))


def _flowers() -> Recipe:
    """A trained Inception-v3 fine-tuned on five flowers: fresh heads, all layers at a small rate, one tower."""
    return replace(
        _inception_v3(),
        name="flowers",
        model=InceptionV3(num_classes=6),
        data=ImageData(),
        warm_start=InitialWeights(mapping=WarmStart(skip=_CLASS_LAYERS)),
        optimizer=_rmsprop(Exponential(0.001, decay_steps=Epochs(30), factor=0.16)),
        batch_size=32,
        num_towers=1,
        end=Steps(2_000),
    )


def _flowers_two_stages() -> Recipe:
    """Fine-tuning as slim's script does it: 1,000 steps of the heads alone, then 500 of all layers at a smaller rate.

    No label smoothing and no averages.
    """
    return replace(
        _flowers(),
        name="flowers_two_stages",
        warm_start=InitialWeights(mapping=WarmStart(skip=_HEADS)),
        loss=CrossEntropy(),
        average=None,
        evaluate=Evaluate(top=(1, 5)),
        end=None,
        stages=(
            Stage(Steps(1_000), optimizer=_rmsprop(0.01), train_only=_HEADS),
            Stage(Steps(500), optimizer=_rmsprop(0.0001)),
        ),
    )


def _rmsprop(lr: float | Exponential) -> RMSProp:
    return RMSProp(lr, alpha=0.9, momentum=0.9, eps=1.0)


def _flowers_small() -> Recipe:
    """A trained SqueezeNet 1.1 that learns five flowers from 60 photographs of each, in minutes on two cores.

    The first layers stay as they are, the last four blocks learn slowly, a new classifier learns faster. The settings
    suit weights from Caffe; for others, set `data.preprocessing.mean`, `std` and `channel_order`.

    Its settings were chosen by cross-validation in 300 photographs of TensorFlow's flowers, where five folds reach
    89.0 %; on 100 others, scored once for each of three seeds, it reaches 83.0 % (82 to 84).
    """
    epochs = Epochs(30)
    colours = ResizedCrop(least_area=0.35, jitter=0.3, mean=_CAFFE_MEAN, std=(1 / 255,) * 3, channel_order="bgr")
    return Recipe(
        name="flowers_small",
        model=SqueezeNet(num_classes=5, fires_seen=3),
        data=ImageData(image_size=192, preprocessing=colours),
        warm_start=InitialWeights(mapping=WarmStart(skip=(r"^classifier\.",), require_loaded=0.95)),
        frozen=(r"^features\.[0-7]\.",),
        optimizer=ByName(
            {
                r"^features\.": SGD(Cosine(0.0005, epochs), momentum=0.9),
                r"^classifier\.": SGD(Cosine(0.005, epochs), momentum=0.9, weight_decay=0.1),
            }
        ),
        loss=CrossEntropy(label_smoothing=0.1),
        batch_size=30,
        average=MovingAverage(0.98),
        num_towers=1,
        towers=Towers(channels_last=True),
        end=epochs,
        evaluate=Evaluate(every=Interval(5, "epochs"), weights="average", flip=True),
    )


_SHIPPED: Mapping[str, Callable[[], Recipe]] = {
    "mnist": _mnist,
    "mnist_reference": _mnist_reference,
    "lenet": _lenet,
    "inception_v3": _inception_v3,
    "inception_v3_distributed": _inception_v3_distributed,
    "flowers": _flowers,
    "flowers_two_stages": _flowers_two_stages,
    "flowers_small": _flowers_small,
    **DETECTORS,
}
