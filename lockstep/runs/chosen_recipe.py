"""A recipe for somebody's own data, chosen by its size and the machine's, with the reason for each choice.

The settings are those of the recipes `flowers_small`, `bccd` and `raccoon`, which were chosen by cross-validation; what
depends on the data follows it: classes, sizes, anchors, batches, the number of epochs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep import optim
from lockstep.augmentations.colours import (
    RandomAdjustBrightness,
    RandomAdjustContrast,
    RandomAdjustSaturation,
    RandomDistortColor,
)
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.augmentations.zoom import RandomIoUCrop
from lockstep.detection.values import SqueezeSsd
from lockstep.errors import InputError
from lockstep.models import SqueezeNet
from lockstep.recipes.data import DetectionData, ImageData
from lockstep.recipes.parts import Checkpoints, DataLoading, Evaluate, InitialWeights
from lockstep.recipes.preprocessing import ResizedCrop
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml
from lockstep.records.index_cache import cache_folder
from lockstep.runs.found_data import Found
from lockstep.runs.inputs import check_same_classes
from lockstep.runs.workdir import class_names
from lockstep.screen import one_line
from lockstep.types import Epochs, Interval, Steps
from lockstep.weights.warm_start import WarmStart

WEIGHTS = "squeezenet/squeezenet1_1_imagenet_features.safetensors"
LICENCE = "SqueezeNet 1.1 trained on ImageNet, MIT licence"
_FEW_TO_SCORE = 200
"""With fewer images to validate one of them moves the score too much to stop by it."""
_LARGEST_SIDE, _DETECTOR_SIDE, _CELL = 192, 320, 16
_MANY = 500
_OF_LARGE = (RandomIoUCrop(min_scale=0.5), HorizontalFlip(), RandomDistortColor())
"""How images with large objects are augmented, as in `raccoon`."""
_OF_SMALL = (HorizontalFlip(), RandomAdjustBrightness(0.1), RandomAdjustContrast(), RandomAdjustSaturation())
"""How those with small objects are, as in `bccd`, but for its vertical flip: most things have an upper side."""


class Chosen(NamedTuple):
    """A recipe, and the reason for each choice by the path of its field."""

    recipe: Recipe
    reasons: Mapping[str, str]
    num_train: int
    num_validation: int
    num_test: int

    @property
    def num_steps(self) -> int | None:
        """Updates of the whole run; None where hours end it, or nothing does."""
        end = self.recipe.end
        if isinstance(end, Steps):
            return end.count
        return end.steps(self.num_train, self.recipe.batch_size) if isinstance(end, Epochs) else None

    @property
    def num_scored(self) -> int:
        """Images that are scored during the run and twice after its end."""
        epochs = (self.num_steps or 0) * self.recipe.batch_size / self.num_train
        each = self.recipe.evaluate.every.amount
        during = int(epochs / each) * self.num_validation if each else 0
        return during + 2 * (self.num_test or self.num_validation)


def places_of_weights() -> list[Path]:
    """Return where the weights may be: in the data here or of the checkout, with the package, or in the cache."""
    cache, package = cache_folder(), Path(__file__).parents[1]
    return [place / WEIGHTS for place in (Path("data"), package / "weights", package.parent / "data", cache) if place]


def find_weights() -> Path | None:
    """Return the weights that come with the project, or were put into the cache; None where they are not here."""
    return next(filter(Path.is_file, places_of_weights()), None)


def choose_recipe(
    found: Found, name: str, weights: Path | None, num_devices: int, end: Steps | Epochs | None = None
) -> Chosen:
    """Choose a recipe for data that was looked at.

    `weights` are of SqueezeNet's features, to start from; `num_devices` accelerators, 0 where processors compute. The
    rates fall to the end of the run, which is chosen, too, if it is not given.
    """
    data, counts, reasons = _with_validation(found)
    chosen = _detector if found.has_objects else _classifier
    recipe, more = chosen(found, data, counts, weights, max(1, num_devices), end)
    feed = DataLoading(bad_examples="skip", bad_budget=max(100, len(found.broken) * 1000))
    recipe = replace(recipe, name=name, feed=feed if found.broken else DataLoading(), num_towers=max(1, num_devices))
    reasons |= more | {
        "warm_start": f"{LICENCE}; the layers that depend on the classes are new"
        if weights
        else "none were found: all layers learn from these images alone, for more epochs",
        "feed": "images that cannot be read are left out" if found.broken else "",
        "evaluate.patience": "the run ends after so many evaluations without a better score",
        "end": "as it was asked for" if end else "fewer images are seen more often",
        "num_towers": "one for each accelerator" if num_devices > 1 else "one slice: the whole batch at once",
    }
    return Chosen(
        recipe, {k: v for k, v in reasons.items() if v}, *(counts[s] for s in ("train", "validation", "test"))
    )


def _with_validation(found: Found) -> tuple[Any, dict[str, int], dict[str, str]]:
    """Return the data of the recipe, how many images each set has, and the reasons; a share is held out if need be."""
    sets = found.sets
    reasons = {"data": found.kind}
    data: Any
    if found.has_objects:
        data = DetectionData(sets.train, sets.validation, sets.test, train_split=sets.train_split)
        data = replace(data, label_map=sets.label_map, labels_offset=found.labels_offset)
        if sets.label_map:
            reasons["data.label_map"] = "the names of the classes, beside the records"
        if found.labels_offset:
            reasons["data.labels_offset"] = "the classes count from 0, where 0 is the background"
    else:
        data = ImageData(sets.train, sets.validation, sets.test, labels=sets.labels, labels_offset=found.labels_offset)
        reasons["data.labels"] = "the classes to train on: some folders are empty, or another set lacks a class"
    if sets.validation is None and sets.test is None:
        shares = ["10 %"] if found.num_images >= _MANY else ["20 %", "30 %", "40 %"]
        data = _held_out(data, shares, len(found.classes))
        reasons["data.validation"] = (
            "held out of the images at train, by a hash of their names; they are never trained on"
        )
    readers = {split: data.reader(split, len(found.classes)) for split in data.splits}
    for split, reader in readers.items():
        check_same_classes(split, class_names(reader), class_names(readers["train"]))
    counts = {split: len(reader) for split, reader in readers.items()}
    return data, {"train": 0, "validation": 0, "test": 0} | counts, reasons


def _held_out(data: Any, shares: list[str], num_classes: int) -> Any:
    """Hold out the first of these shares that leaves examples in both parts."""
    for share in shares:
        held = replace(data, validation=share)
        try:
            held.reader("validation", num_classes), held.reader("train", num_classes)
        except InputError:
            if share == shares[-1]:
                raise
            continue
        return held
    raise AssertionError("there is a share")


def _epochs(num_images: int, *, images_seen: int, least: int, most: int) -> int:
    return max(least, min(most, round(images_seen / num_images)))


class _Length(NamedTuple):
    """How long a run is: its end, what its schedule of rates takes, and epochs."""

    end: Steps | Epochs
    of_schedule: int | Epochs
    num_epochs: float

    @classmethod
    def of(cls, end: Steps | Epochs, num_train: int, batch_size: int) -> _Length:
        if isinstance(end, Epochs):
            return cls(end, end, end.count)
        return cls(end, end.count, end.count * batch_size / num_train)


def _scoring(epochs: float, num_validation: int, **more: Any) -> Evaluate:
    """Score about six times, or ten where there are enough images to stop by their scores."""
    is_enough = num_validation >= _FEW_TO_SCORE
    every = Interval(max(1, round(epochs / (10 if is_enough else 6))), "epochs")
    return Evaluate(every=every, weights="average", patience=3 if is_enough else None, **more)


def _classifier(
    found: Found,
    data: Any,
    counts: Mapping[str, int],
    weights: Path | None,
    num_devices: int,
    end: Steps | Epochs | None,
) -> tuple[Recipe, dict[str, str]]:
    given = find("flowers_small")
    side, num_train = _image_side(found), counts["train"]
    batch = (32 if num_train >= 2 * 128 else 16) * num_devices
    seen = 9_000 if weights else 40_000
    epochs = _epochs(num_train, images_seen=seen, least=5 if num_train < 20_000 else 2, most=30 if weights else 100)
    length = _Length.of(end or Epochs(epochs), num_train, batch)
    optimizer: optim.ByName | optim.AdamW
    optimizer, learned = _tuning(length) if weights else _from_scratch(length, num_train, batch)
    assert isinstance(given.data, ImageData)
    preprocessing = given.data.preprocessing if weights else ResizedCrop(least_area=0.35, jitter=0.3)
    warm_start = given.warm_start and replace(given.warm_start, path=str(weights))
    recipe = replace(
        given,
        model=SqueezeNet(num_classes=len(found.classes), fires_seen=3),
        data=replace(data, image_size=side, preprocessing=preprocessing),
        warm_start=warm_start if weights else None,
        frozen=given.frozen if weights else (),
        optimizer=optimizer,
        batch_size=batch,
        end=length.end,
        checkpoints=Checkpoints(Interval(20, "seconds")),
        evaluate=_scoring(length.num_epochs, counts["validation"], flip=True),
    )
    return recipe, {
        "model": f"a small net, quick on processors; {len(found.classes)} classes",
        "data.image_size": f"half of the images have a shorter side of {_median_side(found)} pixels or more",
        "frozen": "the first layers know edges and colours already" if weights else "",
        "optimizer": learned,
        "batch_size": f"for {num_train} images to train on",
        "average": "scored and exported are averages of the last updates, which vary less",
    }


def _tuning(length: _Length) -> tuple[optim.ByName, str]:
    rates, decays = {r"^features\.": 0.0005, r"^classifier\.": 0.005}, {r"^features\.": 0.0, r"^classifier\.": 0.1}
    optimizer = optim.ByName(
        {p: optim.SGD(optim.Cosine(rates[p], length.of_schedule), momentum=0.9, weight_decay=decays[p]) for p in rates}
    )
    return optimizer, "the layers that were trained before learn slowly, the new one faster; both rates fall to 0"


def _from_scratch(length: _Length, num_train: int, batch_size: int) -> tuple[optim.AdamW, str]:
    """Return what trains a net without batch norm from drawn weights, from which SGD diverges or stands still."""
    warmup = _warmup(length, num_train, batch_size)
    optimizer = optim.AdamW(optim.Cosine(0.001, length.of_schedule, warmup_steps=warmup), weight_decay=0.05)
    return (optimizer, f"all layers begin from drawn weights; the rate rises for {warmup} steps, and falls to 0")


def _warmup(length: _Length, num_train: int, batch_size: int) -> int:
    """Return how many updates the rate rises for, a quarter of all at most."""
    return min(50, int(length.num_epochs * num_train / batch_size / 4))


def _median_side(found: Found) -> int:
    return int(np.median(found.sizes.min(1)))


def _image_side(found: Found) -> int:
    return int(max(64, min(_LARGEST_SIDE, round(_median_side(found) / 32) * 32)))


def _detector(
    found: Found,
    data: Any,
    counts: Mapping[str, int],
    weights: Path | None,
    num_devices: int,
    end: Steps | Epochs | None,
) -> tuple[Recipe, dict[str, str]]:
    given = find("bccd")
    (height, width), num_train = _detector_shape(found), counts["train"]
    anchors = choose_anchors(found.box_sides * [height, width]) if len(found.box_sides) else _USUAL_ANCHORS
    layers, sizes = anchors.of_squeeze_ssd()
    ratios = anchors.ratios
    is_large = bool(np.median(np.sqrt(np.prod(found.box_sides, 1))) > 0.25) if len(found.box_sides) else False
    epochs = _epochs(num_train, images_seen=4400 if weights else 20_000, least=5, most=60 if weights else 150)
    batch, rate = 8 * num_devices, 0.01 if num_train >= 150 else 0.005
    length = _Length.of(end or Epochs(epochs), num_train, batch)
    warmup = _warmup(length, num_train, batch)
    recipe = replace(
        given,
        model=SqueezeSsd(num_classes=len(found.classes), layers=layers, anchor_sizes=sizes, anchor_ratios=ratios),
        data=replace(
            data, resizer=FixedShapeResizer(height, width, "antialiased"), augment=_OF_LARGE if is_large else _OF_SMALL
        ),
        warm_start=InitialWeights(
            str(weights), WarmStart(add_prefix="backbone.", skip=(r"^head\.", r"^backbone\.norms\."))
        )
        if weights
        else None,
        frozen=given.frozen if weights else (),
        optimizer=optim.SGD(
            optim.Cosine(rate, length.of_schedule, warmup_steps=warmup), momentum=0.9, weight_decay=5e-4
        ),
        batch_size=batch,
        end=length.end,
        checkpoints=Checkpoints(Interval(20, "seconds")),
        evaluate=_scoring(length.num_epochs, counts["validation"], detection=given.evaluate.detection),
    )
    return recipe, {
        "model": f"a small detector, quick on processors; {len(found.classes)} classes, anchors of the objects' sizes",
        "data.resizer": "the shape of most images; the longer side is enough for a processor",
        "data.augment": "objects are large, so parts of images are learned from, too"
        if is_large
        else "objects are small: images stay whole, and hues as they are",
        "frozen": "the first layers know edges and colours already" if weights else "",
        "optimizer": f"the rate rises for {warmup} steps, and falls to 0",
        "average": "scored and exported are averages of the last updates, which vary less",
    }


def _detector_shape(found: Found) -> tuple[int, int]:
    """Return the height and width that the net sees: those of most images, with 320 pixels at the longer side."""
    aspect = float(np.median(found.sizes[:, 0] / found.sizes[:, 1]))
    if 0.87 < aspect < 1.15 or found.sizes[:, 0].std() > 0.25 * found.sizes[:, 0].mean():
        return 240, 240
    shorter = round(_DETECTOR_SIDE * min(aspect, 1 / aspect) / _CELL) * _CELL
    shorter = max(160, shorter)
    return (shorter, _DETECTOR_SIDE) if aspect > 1 else (_DETECTOR_SIDE, shorter)


class ChosenAnchors(NamedTuple):
    """Anchors that objects fit."""

    sizes: tuple[float, ...]
    """The square root of an anchor's area, in pixels of the network's input, ascending."""
    ratios: tuple[float, ...]
    """Height over width; 1 alone where objects are about as high as they are wide."""

    def of_squeeze_ssd(self) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
        """Return the layers of a SqueezeSsd that predict, and the sizes on each."""
        small = tuple(each for each in self.sizes if each < 40)
        large = tuple(each for each in self.sizes if each >= 40)
        return ((7, 12), (small, large or (64.0,))) if small else ((12,), (large,))


_USUAL_ANCHORS = ChosenAnchors((16.0, 32.0, 64.0, 128.0), (1.0,))


def choose_anchors(sides: npt.NDArray[np.floating[Any]], count: int | None = None) -> ChosenAnchors:
    """Choose anchors by quantiles of the sizes and ratios of objects.

    Args:
        sides: height and width of each object in pixels of the network's input, (objects, 2), one at least.
        count: of the sizes; None: as many as lie 1.3 times from one to the next, from 3 to 9.
    """
    sizes = np.sqrt(np.maximum(np.prod(sides, 1), 16.0))
    low, high = np.quantile(sizes, [0.02, 0.98])
    count = count or int(np.clip(round(math.log(high / low) / math.log(1.3)) + 1, 3, 9))
    narrow, tall = np.quantile(np.log(sides[:, 0] / np.maximum(sides[:, 1], 1e-6)), [0.15, 0.85])
    ends = [*dict.fromkeys(max(0.01, round(math.exp(each), 2)) for each in (narrow, tall) if abs(each) > 0.25)]
    ratios = (ends[0], 1.0, ends[1]) if len(ends) == 2 and narrow < 0 < tall else (*ends, 1.0) if ends else (1.0,)
    return ChosenAnchors(tuple(round(float(each), 1) for each in np.geomspace(low, high, count)), ratios)


_HEADING, _FIELD = re.compile(r"\[+(.+?)\]+"), re.compile(r"(\w+) = ")


def explained(chosen: Chosen, heading: list[str]) -> str:
    """Write the recipe as TOML, complete, with the reasons as comments before their fields and tables."""
    # Names of classes and files are part of the heading: a line break in one would end the comment.
    lines, table = [f"# {one_line(line)}".rstrip() for line in heading] + [""], ""
    told: set[str] = set()
    for line in to_toml(chosen.recipe).rstrip("\n").split("\n"):
        if opened := _HEADING.fullmatch(line):
            path = table = opened[1].replace('"', "")
        elif given := _FIELD.match(line):
            path = f"{table}.{given[1]}" if table else given[1]
        else:
            path = ""
        if path in chosen.reasons and path not in told:
            told.add(path)
            lines.append(f"# {one_line(chosen.reasons[path])}")
        lines.append(line)
    return "\n".join(lines) + "\n"
