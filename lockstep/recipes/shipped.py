"""The recipes that come with Lockstep, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lockstep import optim
from lockstep.augmentations.colours import (
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustSaturation,
    RandomDistortColor,
)
from lockstep.augmentations.mixing import Mosaic
from lockstep.augmentations.random_crops import RandomSquareCropByScale
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip, RandomVerticalFlip
from lockstep.augmentations.zoom import RandomIoUCrop, RandomZoomOut
from lockstep.checkpoints.retention import Retention
from lockstep.detection.values import FasterRcnnFpn, KeypointRcnnFpn, MaskRcnnFpn, SqueezeSsd, Ssd300, Ssdlite
from lockstep.errors import RecipeError
from lockstep.listing import closest_path, did_you_mean
from lockstep.losses.regularization import L2
from lockstep.models import InceptionV3, LeNet, Mnist, SqueezeNet
from lockstep.recipes.code import with_code
from lockstep.recipes.data import DetectionData, ImageData, MnistData
from lockstep.recipes.parts import Checkpoints, CrossEntropy, DetectionEvaluation, Evaluate, InitialWeights, Stage
from lockstep.recipes.preprocessing import Inception, ResizedCrop
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import load
from lockstep.towers.towers import Towers
from lockstep.types import Epochs, Interval, Steps
from lockstep.weights.warm_start import WarmStart

_CLASS_LAYERS = (r"^fc\.", r"^AuxLogits\.fc\.")
"""The layers of Inception-v3 whose shape depends on the number of classes."""
_HEADS = (r"^fc\.", r"^AuxLogits\.")
"""These layers and the rest of the auxiliary head, which slim initializes anew."""
_CAFFE_MEAN = (103.939 / 255, 116.779 / 255, 123.68 / 255)
"""The mean colour of ImageNet, blue first, as weights from Caffe expect it; they take values up to 255."""
_SQUEEZENET = "data/squeezenet/squeezenet1_1_imagenet_features.safetensors"
"""Weights that come with the project."""
_COCO_LABELS = 90
"""COCO's largest: its 80 classes keep their numbers, as in torchvision's weights."""
_WARMUP_STEPS = 1000
_LARGE_IMAGES = DetectionData(
    crowd=False, resizer=KeepAspectRatioResizer(800, 1333, "antialiased"), augment=(HorizontalFlip(),)
)
_MIRRORED = (0, *(place for left in range(1, 17, 2) for place in (left + 1, left)))
"""The place of each keypoint of COCO's persons on a mirrored image: after the nose, left and right take turns."""
_SAVED_OFTEN = Checkpoints(Interval(20, "seconds"))
"""For runs of minutes, which lose no more than that by a kill on a processor of any speed."""
_BOXES = Evaluate(micro_batch=8, detection=DetectionEvaluation(("coco_detection_metrics",)))


def find(name: str) -> Recipe:
    """Return a shipped recipe by name, or read one from a file whose name ends in .toml.

    Code of your own that the file names is looked for beside it, in the current folder and among installed packages.
    """
    if name.endswith(".toml"):
        return with_code(load(Path(name)), Path(name).parent)
    if name not in _SHIPPED:
        meant = closest_path(Path(name))
        raise RecipeError(
            f"{name}: there is no such recipe.",
            given=name,
            expected=f"{', '.join(names())}, or a file that ends in .toml",
            hint=did_you_mean(name, names()) or (f"did you mean {meant}?" if meant else "give one of these"),
        )
    return _SHIPPED[name]()


def names() -> list[str]:
    """Names of the shipped recipes."""
    return list(_SHIPPED)


def summary_of(name: str) -> str:
    """Say in a line what a shipped recipe trains."""
    return (_SHIPPED[name].__doc__ or "").partition("\n")[0].rstrip(".")


def _mnist() -> Recipe:
    """The reference convnet on MNIST, trained to 99 %: cosine from 0.05 over 4 epochs, Nesterov momentum 0.9."""
    epochs = Epochs(4)
    return Recipe(
        name="mnist",
        model=Mnist(),
        data=MnistData(),
        optimizer=optim.SGD(optim.Cosine(0.05, epochs), momentum=0.9, nesterov=True),
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
    optimizer = optim.SGD(0.1, momentum=0.9, nesterov=True)
    return replace(_mnist(), name="mnist_reference", optimizer=optimizer, end=Epochs(10))


def _lenet() -> Recipe:
    """Slim's LeNet on MNIST, as its script trains it: 20,000 steps of 50 images at a constant rate of 0.01."""
    return Recipe(
        name="lenet",
        model=LeNet(),
        data=MnistData(scale="one"),
        optimizer=optim.SGD(0.01),
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
        optimizer=_rmsprop(optim.Exponential(0.1, decay_steps=Epochs(30), factor=0.16)),
        loss=CrossEntropy(label_smoothing=0.1, auxiliary_weight=0.4),
        batch_size=256,
        regularization=(L2(4e-5),),
        average=optim.MovingAverage(0.9999, statistics=True),
        num_towers=8,
        towers=Towers(batch_norm="last", precision="bf16", channels_last=True),
        end=Steps(100_000),
        checkpoints=Checkpoints(retention=Retention(best="validation/top1")),
        evaluate=Evaluate(weights="average", top=(1, 5)),
    )


def _inception_v3_distributed() -> Recipe:
    """Inception-v3 with the learning rate of the distributed trainer: 0.045, and 6 % less every two epochs."""
    schedule = optim.Exponential(0.045, decay_steps=Epochs(2), factor=0.94)
    return replace(_inception_v3(), name="inception_v3_distributed", optimizer=_rmsprop(schedule), end=Epochs(100))


def _flowers() -> Recipe:
    """A trained Inception-v3 fine-tuned on five flowers: fresh heads, all layers at a small rate, one tower."""
    return replace(
        _inception_v3(),
        name="flowers",
        model=InceptionV3(num_classes=6),
        data=ImageData(),
        warm_start=InitialWeights(mapping=WarmStart(skip=_CLASS_LAYERS)),
        optimizer=_rmsprop(optim.Exponential(0.001, decay_steps=Epochs(30), factor=0.16)),
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


def _rmsprop(lr: float | optim.Exponential) -> optim.RMSProp:
    return optim.RMSProp(lr, alpha=0.9, momentum=0.9, eps=1.0)


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
        optimizer=optim.ByName(
            {
                r"^features\.": optim.SGD(optim.Cosine(0.0005, epochs), momentum=0.9),
                r"^classifier\.": optim.SGD(optim.Cosine(0.005, epochs), momentum=0.9, weight_decay=0.1),
            }
        ),
        loss=CrossEntropy(label_smoothing=0.1),
        batch_size=30,
        average=optim.MovingAverage(0.98),
        num_towers=1,
        towers=Towers(channels_last=True),
        end=epochs,
        evaluate=Evaluate(every=Interval(5, "epochs"), weights="average", flip=True),
    )


def _bccd() -> Recipe:
    """A small SSD that finds blood cells of three kinds, from SqueezeNet's weights, in minutes on two cores.

    Its settings were chosen on the 87 images of the list `val`, with the other 205 of `trainval` to train on.
    """
    epochs = Epochs(15)
    return Recipe(
        name="bccd",
        model=SqueezeSsd(num_classes=3, anchor_sizes=((18.0, 24.0, 32.0), (44.0, 52.0, 64.0, 90.0, 112.0))),
        data=DetectionData(
            train="data/bccd",
            test="data/bccd",
            train_split="trainval",
            resizer=FixedShapeResizer(240, 320, "antialiased"),
            augment=(
                HorizontalFlip(),
                RandomVerticalFlip(),
                RandomAdjustBrightness(0.1),
                RandomAdjustContrast(),
                RandomAdjustSaturation(),
            ),
        ),
        warm_start=InitialWeights(
            _SQUEEZENET, WarmStart(add_prefix="backbone.", skip=(r"^head\.", r"^backbone\.norms\."))
        ),
        frozen=(r"^backbone\.features\.[0-3]\.",),
        optimizer=optim.SGD(optim.Cosine(0.01, epochs, warmup_steps=50), momentum=0.9, weight_decay=5e-4),
        gradient_transforms=(optim.ClipGlobalNorm(5.0),),
        batch_size=8,
        average=optim.MovingAverage(0.98),
        num_towers=2,
        towers=Towers(channels_last=True),
        end=epochs,
        checkpoints=_SAVED_OFTEN,
        evaluate=Evaluate(
            every=Interval(0, "steps"), weights="average", detection=DetectionEvaluation(per_category=True)
        ),
    )


def _raccoon() -> Recipe:
    """The same net on 30 photographs of raccoons, scored on 10 others; to see quickly whether all works."""
    epochs = Epochs(60)
    return replace(
        _bccd(),
        name="raccoon",
        model=SqueezeSsd(
            num_classes=1,
            layers=(12,),
            anchor_sizes=((80.0, 120.0, 160.0, 210.0),),
            anchor_ratios=(1 / 0.7, 1.0, 1 / 1.4),
        ),
        data=DetectionData(
            train="data/raccoon",
            validation="data/raccoon",
            resizer=FixedShapeResizer(240, 240, "antialiased"),
            augment=(RandomIoUCrop(min_scale=0.5), HorizontalFlip(), RandomDistortColor()),
        ),
        optimizer=optim.SGD(optim.Cosine(0.005, epochs, warmup_steps=50), momentum=0.9, weight_decay=5e-4),
        batch_size=6,
        end=epochs,
        evaluate=Evaluate(every=Interval(10, "epochs"), weights="average"),
    )


def _raccoon_mosaic() -> Recipe:
    """`raccoon` with mosaics and at many scales: four images put together, squares of half to all of that cut out.

    An image stays alone half of the time. An object is thereby seen at a quarter to twice its size.
    """
    recipe = _raccoon()
    assert isinstance(recipe.data, DetectionData)
    scales = RandomSquareCropByScale(max_border=64, scale_min=0.5, scale_max=1.0)
    augment = (Mosaic(size=240, p=0.5), scales, HorizontalFlip(), RandomDistortColor())
    return replace(recipe, name="raccoon_mosaic", data=replace(recipe.data, augment=augment))


def _ssd300_coco() -> Recipe:
    """SSD300 on COCO as torchvision's reference trains it: 32 images over 8 towers, 120 epochs.

    It starts from the features of VGG16, whose first two layers stay.
    """
    rates = optim.PiecewiseConstant((Epochs(80), Epochs(110)), (0.002, 0.0002, 0.00002))
    return Recipe(
        name="ssd300_coco",
        model=Ssd300(num_classes=_COCO_LABELS),
        data=DetectionData(
            crowd=False,
            resizer=FixedShapeResizer(300, 300, "antialiased"),
            augment=(
                RandomDistortColor(),
                RandomZoomOut(fill=(123, 117, 104), p=0.5),
                RandomIoUCrop(),
                HorizontalFlip(),
            ),
        ),
        warm_start=InitialWeights(mapping=WarmStart(add_prefix="backbone.", ignore_missing=True, require_loaded=0.2)),
        frozen=(r"^backbone\.features\.[0-3]\.",),
        optimizer=_momentum(rates, 0.002, weight_decay=5e-4),
        batch_size=32,
        num_towers=8,
        towers=Towers(channels_last=True),
        end=Epochs(120),
        evaluate=_BOXES,
    )


def _ssdlite_coco() -> Recipe:
    """SSDlite on COCO as torchvision's reference trains it: 192 images over 8 towers, 660 epochs, from no weights."""
    epochs = Epochs(660)
    return Recipe(
        name="ssdlite_coco",
        model=Ssdlite(num_classes=_COCO_LABELS),
        data=DetectionData(
            crowd=False, resizer=FixedShapeResizer(320, 320, "antialiased"), augment=(RandomIoUCrop(), HorizontalFlip())
        ),
        optimizer=_momentum(optim.Cosine(0.15, epochs), 0.15, weight_decay=4e-5),
        batch_size=192,
        num_towers=8,
        towers=Towers(channels_last=True),
        end=epochs,
        evaluate=_BOXES,
    )


def _faster_rcnn_coco() -> Recipe:
    """Faster R-CNN with a ResNet-50 on COCO as torchvision's reference trains it: 16 images over 8 towers, 26 epochs.

    It starts from weights of a classifier, whose first layers and batch norm stay.
    """
    rates = optim.PiecewiseConstant((Epochs(16), Epochs(22)), (0.02, 0.002, 0.0002))
    return Recipe(
        name="faster_rcnn_coco",
        model=FasterRcnnFpn(num_classes=_COCO_LABELS),
        data=_LARGE_IMAGES,
        warm_start=InitialWeights(
            mapping=WarmStart(add_prefix="backbone.body.", ignore_missing=True, require_loaded=0.4)
        ),
        frozen=(r"^backbone\.body\.(conv1|bn1|layer1)\.",),
        optimizer=_momentum(rates, 0.02, weight_decay=1e-4),
        batch_size=16,
        num_towers=8,
        towers=Towers(channels_last=True),
        end=Epochs(26),
        evaluate=_BOXES,
    )


def _mask_rcnn_coco() -> Recipe:
    """Mask R-CNN on COCO, trained as `faster_rcnn_coco`."""
    given = _faster_rcnn_coco()
    return replace(
        given,
        name="mask_rcnn_coco",
        model=MaskRcnnFpn(num_classes=_COCO_LABELS),
        data=replace(_LARGE_IMAGES, masks=True),
        evaluate=Evaluate(
            micro_batch=8, detection=DetectionEvaluation(("coco_detection_metrics", "coco_mask_metrics"))
        ),
    )


def _keypoint_rcnn_coco() -> Recipe:
    """Keypoint R-CNN on COCO's persons, trained as `faster_rcnn_coco` but for 46 epochs, as torchvision's reference.

    Persons without keypoints teach boxes alone; the reference leaves out images with fewer than 10 keypoints.
    """
    given = _faster_rcnn_coco()
    rates = optim.PiecewiseConstant((Epochs(36), Epochs(43)), (0.02, 0.002, 0.0002))
    return replace(
        given,
        name="keypoint_rcnn_coco",
        model=KeypointRcnnFpn(num_classes=1),
        data=replace(_LARGE_IMAGES, num_keypoints=17, augment=(HorizontalFlip(keypoint_flip_permutation=_MIRRORED),)),
        optimizer=_momentum(rates, 0.02, weight_decay=1e-4),
        end=Epochs(46),
        evaluate=Evaluate(
            micro_batch=8, detection=DetectionEvaluation(("coco_keypoint_metrics", "coco_detection_metrics"))
        ),
    )


def _momentum(rates: optim.Cosine | optim.PiecewiseConstant, initial: float, *, weight_decay: float) -> optim.SGD:
    """Make torchvision's optimizer, whose rate rises from a thousandth in the first thousand steps."""
    rising = optim.Warmup(rates, _WARMUP_STEPS, initial=initial / _WARMUP_STEPS)
    return optim.SGD(rising, momentum=0.9, weight_decay=weight_decay)


_SHIPPED: Mapping[str, Callable[[], Recipe]] = {
    "mnist": _mnist,
    "mnist_reference": _mnist_reference,
    "lenet": _lenet,
    "inception_v3": _inception_v3,
    "inception_v3_distributed": _inception_v3_distributed,
    "flowers": _flowers,
    "flowers_two_stages": _flowers_two_stages,
    "flowers_small": _flowers_small,
    "bccd": _bccd,
    "raccoon": _raccoon,
    "raccoon_mosaic": _raccoon_mosaic,
    "ssd300_coco": _ssd300_coco,
    "ssdlite_coco": _ssdlite_coco,
    "faster_rcnn_coco": _faster_rcnn_coco,
    "mask_rcnn_coco": _mask_rcnn_coco,
    "keypoint_rcnn_coco": _keypoint_rcnn_coco,
}
