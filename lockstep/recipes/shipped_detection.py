"""The recipes of detectors that come with Lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep.augmentations.colours import (
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustSaturation,
    RandomDistortColor,
)
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.turns import RandomVerticalFlip
from lockstep.augmentations.zoom import RandomIoUCrop, RandomZoomOut
from lockstep.detection.values import FasterRcnnFpn, MaskRcnnFpn, SqueezeSsd, Ssd300, Ssdlite
from lockstep.images.augment import HorizontalFlip
from lockstep.optim import SGD, ClipGlobalNorm, Cosine, MovingAverage, PiecewiseConstant, Warmup
from lockstep.parallel.towers import Towers
from lockstep.progress import Epochs, Interval
from lockstep.recipes.detection import DetectionData
from lockstep.recipes.parts import Checkpoints, DetectionEvaluation, Evaluate, InitialWeights
from lockstep.recipes.recipe import Recipe
from lockstep.weights.warm_start import WarmStart

_SQUEEZENET = "data/squeezenet/squeezenet1_1_imagenet_features.safetensors"
"""Weights that come with the project."""
_COCO_LABELS = 90
"""COCO's largest: its 80 classes keep their numbers, as in torchvision's weights."""
_WARMUP_STEPS = 1000
_LARGE_IMAGES = DetectionData(
    crowd=False, resizer=KeepAspectRatioResizer(800, 1333, "antialiased"), augment=(HorizontalFlip(),)
)
_SAVED_OFTEN = Checkpoints(Interval(20, "seconds"))
"""For runs of minutes, which lose no more than that by a kill on a processor of any speed."""
_BOXES = Evaluate(micro_batch=8, detection=DetectionEvaluation(("coco_detection_metrics",)))


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
        optimizer=SGD(Cosine(0.01, epochs, warmup_steps=50), momentum=0.9, weight_decay=5e-4),
        gradient_transforms=(ClipGlobalNorm(5.0),),
        batch_size=8,
        average=MovingAverage(0.98),
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
            num_classes=1, layers=(12,), anchor_sizes=((80.0, 120.0, 160.0, 210.0),), aspect_ratios=(0.7, 1.0, 1.4)
        ),
        data=DetectionData(
            train="data/raccoon",
            validation="data/raccoon",
            resizer=FixedShapeResizer(240, 240, "antialiased"),
            augment=(RandomIoUCrop(min_scale=0.5), HorizontalFlip(), RandomDistortColor()),
        ),
        optimizer=SGD(Cosine(0.005, epochs, warmup_steps=50), momentum=0.9, weight_decay=5e-4),
        batch_size=6,
        end=epochs,
        evaluate=Evaluate(every=Interval(10, "epochs"), weights="average"),
    )


def _ssd300_coco() -> Recipe:
    """SSD300 on COCO as torchvision's reference trains it: 32 images over 8 towers, 120 epochs.

    It starts from the features of VGG16, whose first two layers stay.
    """
    rates = PiecewiseConstant((Epochs(80), Epochs(110)), (0.002, 0.0002, 0.00002))
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
            crowd=False,
            resizer=FixedShapeResizer(320, 320, "antialiased"),
            augment=(RandomIoUCrop(), HorizontalFlip()),
        ),
        optimizer=_momentum(Cosine(0.15, epochs), 0.15, weight_decay=4e-5),
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
    rates = PiecewiseConstant((Epochs(16), Epochs(22)), (0.02, 0.002, 0.0002))
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


def _momentum(rates: Cosine | PiecewiseConstant, initial: float, *, weight_decay: float) -> SGD:
    """Make torchvision's optimizer, whose rate rises from a thousandth in the first thousand steps."""
    rising = Warmup(rates, _WARMUP_STEPS, initial=initial / _WARMUP_STEPS)
    return SGD(rising, momentum=0.9, weight_decay=weight_decay)


DETECTORS: Mapping[str, Callable[[], Recipe]] = {
    "bccd": _bccd,
    "raccoon": _raccoon,
    "ssd300_coco": _ssd300_coco,
    "ssdlite_coco": _ssdlite_coco,
    "faster_rcnn_coco": _faster_rcnn_coco,
    "mask_rcnn_coco": _mask_rcnn_coco,
}
"""The recipes by their names."""
