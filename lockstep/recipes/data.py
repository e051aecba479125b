"""The data of a recipe: where the examples are, and what a network is to see of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from lockstep.checks import Checked, PositiveInt
from lockstep.errors import DataError, InputError
from lockstep.images.augment import Augment, RandomShift
from lockstep.images.decode import Decoding
from lockstep.images.slim_presets import Preset
from lockstep.readers.classification import ClassificationReader, check_labels_offset
from lockstep.readers.mnist import mnist_reader, prepare_records, scale_image
from lockstep.readers.open import check_there, open_source
from lockstep.readers.reader import Reader
from lockstep.recipes.preprocessing import Inception, Preprocessing

SPLITS = ("train", "validation", "test")

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class MnistData:
    """The 55,000 examples of MNIST to train on, 5,000 to validate and 10,000 to test."""

    folder: str | None = None
    """Where the four files are; None: the ones that come with the project."""
    augment: tuple[RandomShift, ...] = ()
    """What happens to the images of a training batch, in this order."""
    split: Split = "train"
    """The examples to train on."""
    scale: Literal["half", "one"] = "half"
    """Pixels become -0.5 to 0.5, as the MNIST trainer has them, or -1 to 1, as slim has them."""

    image_size: ClassVar[int] = 28
    splits: ClassVar[Sequence[str]] = SPLITS

    def check_told(self) -> None:
        """It comes with the project."""

    def prepare(self) -> None:
        """Write the records that are missing."""
        prepare_records(self._folder)

    def reader(self, split: str, num_classes: int, *, to_train: bool = False) -> Reader:
        """The examples of a split."""
        return ClassificationReader(mnist_reader(split, self._folder), num_classes)

    def training(self) -> Sequence[Augment]:
        """What happens to the images of a training batch, in this order."""
        return self.augment

    def evaluation(self) -> Sequence[Augment]:
        """Nothing."""
        return ()

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Floats of shape (batch, 1, 28, 28)."""
        images: Tensor = batch["image"]
        return scale_image(images) if self.scale == "half" else (images.to(torch.float32) - 128) / 128

    def blank(self, num_examples: int) -> Tensor:
        """An input of the network, of black images."""
        return self.inputs({"image": torch.zeros(num_examples, 1, 28, 28, dtype=torch.uint8)})

    @property
    def _folder(self) -> Path | None:
        return Path(self.folder) if self.folder else None


@dataclass(frozen=True)
class ImageData(Checked):
    """Images that have one class each: sharded records, tar shards, or a folder of images for each class.

    Raises:
        InputError: a number is out of range, the preprocessing cannot make such images, or a path is empty.
    """

    train: str | None = None
    """The path or pattern of the examples to train on."""
    validation: str | None = None
    """Those that are scored while the run goes on; None: nothing is."""
    test: str | None = None
    """Those that are scored after its end; None: those to validate once more."""
    image_size: PositiveInt = 299
    """Height and width of the images as the network sees them, in pixels."""
    preprocessing: Preprocessing = field(default_factory=Inception)
    """How they come to be that."""
    labels_offset: Annotated[int, check_labels_offset] = 0
    """What is taken off each label; -1 for folders, whose classes count from 0, where 0 is to be the background."""
    decoding: Decoding = field(default_factory=Decoding)
    """How image files become pixels."""
    function: str | None = None
    """The function of a script that gives the examples in place of paths; only that script can start the run."""
    split: Split = "train"
    """The examples to train on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preprocessing.preset(self.image_size)
        for split in self.splits:
            if not getattr(self, split):
                raise _no_path(split)

    @property
    def splits(self) -> Sequence[str]:
        """Those that have a path."""
        return [split for split in SPLITS if getattr(self, split) is not None]

    def check_told(self) -> None:
        """Make sure that there is something to train on.

        Raises:
            InputError: the examples come from a function of a script.
            DataError: no path is given, or nothing is there.
        """
        if self.function is not None:
            raise self._needs_its_script()
        if getattr(self, self.split) is None:
            raise _no_path(self.split)
        for split in self.splits:
            check_there(getattr(self, split))

    def prepare(self) -> None:
        """It is read as it lies there."""

    def reader(self, split: str, num_classes: int, *, to_train: bool = False) -> Reader:
        """The examples of a split.

        Raises:
            InputError: the examples come from a function.
            DataError: it has no path, or its path leads to no data.
        """
        path = getattr(self, split)
        if self.function is not None:
            raise self._needs_its_script()
        if path is None:
            raise _no_path(split)
        source = open_source(path, everything=to_train and self.crops_by_boxes, decoding=self.decoding)
        return self.labelled(source, num_classes, to_train=to_train)

    def labelled(self, source: Reader, num_classes: int, *, to_train: bool = False) -> Reader:
        """The images, labels and, where crops are made by them, boxes of a source; the labels are checked."""
        return ClassificationReader(
            source, num_classes, offset=self.labels_offset, boxes=to_train and self.crops_by_boxes
        )

    def _needs_its_script(self) -> InputError:
        return InputError(
            f"The examples of this run come from the function {self.function} of a script.",
            given=f"data.function={self.function!r}",
            expected="that script, which gives the function to ls.run",
            hint="run the script again: lockstep run SCRIPT; or set data.function=none and name paths",
        )

    @property
    def crops_by_boxes(self) -> bool:
        """Whether the augmentations of training look at boxes."""
        return isinstance(self.preprocessing, Inception) and self.preprocessing.crop_by_boxes

    def training(self) -> Sequence[Augment]:
        """What happens to the images of a training batch, in this order."""
        return self._preset.train

    def evaluation(self) -> Sequence[Augment]:
        """What happens to the images of a batch that is scored; nothing is drawn."""
        return self._preset.evaluate

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Floats of shape (batch, 3, image_size, image_size)."""
        return self._preset.inputs(batch)

    def blank(self, num_examples: int) -> Tensor:
        """An input of the network, of black images."""
        return self.inputs({"image": torch.zeros(num_examples, 3, self.image_size, self.image_size, dtype=torch.uint8)})

    @cached_property
    def _preset(self) -> Preset:
        return self.preprocessing.preset(self.image_size)


def _no_path(split: str) -> DataError:
    return DataError(
        f"This recipe has not been told where its {split} images are.",
        given=f"no data.{split}",
        expected="sharded records, tar shards, or a folder with a folder of images for each class",
        hint=f"--set data.{split}=PATH, or in a recipe's file, such as 'shards/{split}-*'. To build shards: "
        "`lockstep convert images FOLDER --to shards` of folders of images, "
        "`lockstep convert imagenet --help` of ImageNet's archives",
    )
