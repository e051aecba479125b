"""The data of a recipe: where the examples are, and how they become inputs of the network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, Self, cast

import torch

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.boxes import ScaleBoxesToPixelCoordinates
from lockstep.augmentations.colours import ColourOption
from lockstep.augmentations.lists import DeferredColours, deferred
from lockstep.augmentations.on_device import OnDevice
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.slim_presets import Preset
from lockstep.augmentations.turns import RandomShift
from lockstep.checks import Checked, NonNegativeInt, PositiveInt, Range, check_together
from lockstep.detection.targets import DetectionTargets, refuse_merging
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding
from lockstep.images.normalisation import scale_image
from lockstep.listing import hint_for_path
from lockstep.readers.paths import ANNOTATED, check_there, found_from, is_folder
from lockstep.recipes.code import Function
from lockstep.recipes.preprocessing import Inception, Preprocessing, ResizedCrop
from lockstep.records.shards import data_path

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augmentations.mixing import MixDraws
    from lockstep.readers.label_map import LabelMap
    from lockstep.readers.reader import Reader
    from lockstep.records.index_cache import LimitedCache

SPLITS = ("train", "validation", "test")

Split = Literal["train", "validation", "test"]
Gigabytes = Annotated[float, Range(ge=0, lt=10**6)]
_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
_ZERO_BASED = -1  # subtracted from labels that count from 0
_NAMES_IN_VOC = {"train": "train", "validation": "val", "test": "test"}


class DataOfOneSize:
    """Base of data whose images have one size; nothing is to be checked or fetched, unless a subclass does so."""

    image_size: ClassVar[int]
    size_field: ClassVar[str] = "data.image_size"
    mixing: ClassVar[None] = None

    def check_complete(self) -> None:
        """Do nothing: what gives the examples says itself what there is."""

    def check_there(self, split: str) -> None:
        """Do nothing, as `check_complete`."""

    def prepare(self) -> None:
        """Do nothing: what gives the examples does it."""

    def resized(self, image_size: int, field: str) -> NoReturn:
        """Refuse images of another size, for which this field of a recipe asks."""
        raise one_size(self, field, image_size)

    def evaluation(self) -> Sequence[Augment]:
        """Return no augmentations."""
        return ()


@dataclass(frozen=True)
class MnistData(DataOfOneSize):
    """MNIST: 55,000 examples to train on, 5,000 to validate and 10,000 to test."""

    folder: str | None = None
    """The folder of the four files; None: `data/mnist` in the current folder, else `mnist` in the cache. Files that are
    missing are fetched to it."""
    cache: str | None = None
    """The folder of the cache; None: the user's."""
    augment: tuple[RandomShift, ...] = ()
    """Augmentations of the training images, in this order."""
    split: Split = "train"
    """The examples to train on."""
    scale: Literal["half", "one"] = "half"
    """Range of the pixels: -0.5 to 0.5, as in the MNIST trainer, or -1 to 1, as in slim."""

    image_size: ClassVar[int] = 28
    splits: ClassVar[Sequence[str]] = SPLITS
    function: ClassVar[None] = None

    def found_from(self, folder: Path) -> MnistData:
        """Take the files from the current folder, or else from another one, if they are in it."""
        name = self.folder or "data/mnist"
        is_elsewhere = not is_folder(name) and is_folder(folder / name)
        return replace(self, folder=str(folder / name)) if is_elsewhere else self

    def path_of(self, split: str) -> str | None:
        """Return the folder of the files."""
        return self.folder

    def at(self, split: str, path: str) -> MnistData:
        """Take the files, of all splits, from another folder, which has them: nothing is fetched to it."""
        from lockstep.readers.mnist import FILES

        if missing := [file.name for file in FILES if not (data_path(path) / file.name).is_file()]:
            raise DataError(
                f"{path} does not hold the files of MNIST.",
                given=f"no {missing[0]} in it",
                expected=f"a folder with {', '.join(file.name for file in FILES)}",
                hint=hint_for_path(path) if not data_path(path).exists() else "name their folder",
            )
        return replace(self, folder=path)

    def prepare(self) -> None:
        """Fetch the files that are missing."""
        from lockstep.readers.mnist import ensure_files, mnist_folder

        ensure_files(mnist_folder(self.folder or None, self.cache))

    def reader(self, split: str, num_classes: int, *, to_train: bool = False) -> Reader:
        """Return the examples of a split."""
        from lockstep.readers.classification import ClassificationReader
        from lockstep.readers.mnist import mnist_reader

        return ClassificationReader(mnist_reader(split, self.folder or None, self.cache), num_classes)

    def training(self) -> Sequence[Augment]:
        """Return the augmentations of training batches, in their order."""
        return self.augment

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Make the input of the network: floats of shape (batch, 1, 28, 28)."""
        images: Tensor = batch["image"]
        return scale_image(images) if self.scale == "half" else (images.to(torch.float32) - 128) / 128

    def blank(self, num_examples: int) -> Tensor:
        """Make an input of the network from black images."""
        return self.inputs({"image": torch.zeros(num_examples, 1, 28, 28, dtype=torch.uint8)})


def one_size(data: Any, field: str, image_size: int) -> InputError:
    """Make the error for a stage with images of another size than those of data that has but one."""
    return InputError(
        f"The images of {type(data).__name__} have one size.",
        given=f"{field}={image_size}",
        expected=f"{data.image_size} pixels throughout",
        hint="leave image_size out of the stages, or take ImageData",
    )


class PathData:
    """Base of data that has a path for each split, or is given by a function of a script."""

    train: str | None
    validation: str | None
    """Path of the examples that are scored during the run; None: none are. "10 %": so many of those at `train`, which
    are not trained on; a hash of each one's name decides, so that it stays where it is when others are added."""
    test: str | None
    """Path of the examples that are scored after the end of the run; None: the validation examples are."""
    function: Function | None
    """`reader(split)` gives the examples in place of paths: see `PythonData`; the fields are those of this data."""
    split: Split
    """The examples to train on."""
    cache: str | None
    cache_gb: float | None

    known: ClassVar[str]
    """What a path may lead to, for errors."""
    class_file: ClassVar[tuple[str, str]]
    """The field with the path of the file that numbers the classes, and what that is, for errors."""
    how_to_build: ClassVar[str]
    """How such data is made, for errors."""

    def check_paths(self) -> None:
        """Refuse an empty path, as a variable of the shell that is not set makes it; and a share that is none."""
        for split in self.splits:
            if not self.path_of(split):
                raise self._no_path(split)
        if (share := self.validation_share) is not None and not (0 < share < 1 and self.train is not None):
            raise InputError(
                "This share of the training examples cannot be held out.",
                given=f"data.validation={self.validation!r}" + ("" if self.train else ", and no data.train"),
                expected='above 0 and below 100 percent of the examples at data.train, such as "10 %"',
                hint='set data.validation="10 %", or name other examples to validate',
            )

    @property
    def splits(self) -> Sequence[str]:
        """The splits that have a path."""
        return [split for split in SPLITS if self.path_of(split) is not None]

    @property
    def validation_share(self) -> float | None:
        """The share of the training examples that is held out, where `validation` is one: "10 %" is 0.1."""
        found = _SHARE.fullmatch(self.validation or "")
        return float(found[1]) / 100 if found else None

    def check_complete(self) -> None:
        """Check that there are examples to train on."""
        check_together(partial(self.check_there, split) for split in dict.fromkeys((self.split, *self.splits)))

    def check_there(self, split: str) -> None:
        """Check that a split has a path, and that it and that of the file of classes lead somewhere.

        A function says itself what there is.
        """
        if self.function is None:
            check_there(self.path(split), self.known)
        field, expected = self.class_file
        if isinstance(path := getattr(self, field), str):
            check_there(path, expected)

    @property
    def limited_cache(self) -> LimitedCache:
        """The cache, for readers."""
        from lockstep.records.index_cache import LimitedCache

        return LimitedCache(self.cache, self.cache_gb)

    def path_of(self, split: str) -> str | None:
        """Return the path of a split, if it has one: of a share that is held out, that of the training examples."""
        is_share = split == "validation" and self.validation_share is not None
        path: str | None = getattr(self, "train" if is_share else split)
        return path

    def path(self, split: str) -> str:
        """Return the path of a split; an error if it has none."""
        if (path := self.path_of(split)) is None:
            raise self._no_path(split)
        return path

    def given(self, split: str) -> Reader | None:
        """Call the function that gives the examples in place of paths."""
        from lockstep.readers.reader import reader_from

        assert self.function is not None, "asked where it is there"
        return reader_from(self.function(split))

    def found_from(self, folder: Path) -> Self:
        """Take each path that leads nowhere from another folder, if it leads somewhere there."""
        fields = [each for each in (*self.splits, self.class_file[0]) if isinstance(getattr(self, each), str)]
        return self._with({each: found_from(folder, getattr(self, each)) for each in fields})

    def part_of(self, source: Reader, split: str) -> Reader:
        """Return the examples of a source that belong to a split: of the training examples not those held out."""
        share = self.validation_share
        if share is None or split == "test":
            return source
        from lockstep.readers.combine import share_by_name

        return share_by_name(source, share, is_held_out=split == "validation")

    def at(self, split: str, path: str) -> Self:
        """Take the examples of a split from another path."""
        # None of other examples to train on has been held out.
        held_out = {"validation": None} if split == "train" and self.validation_share else {}
        return self._with({"function": None, split: path} | held_out)

    def prepare(self) -> None:
        """Do nothing: the files are read as they are."""

    def _with(self, changed: Mapping[str, Any]) -> Self:
        return replace(cast("Any", self), **changed)  # type: ignore[no-any-return]

    def _no_path(self, split: str) -> DataError:
        return DataError(
            f"This recipe has not been told where its {split} images are.",
            given=f"no data.{split}",
            expected=self.known,
            hint=f"--set data.{split}=PATH, or in a recipe's file, such as 'shards/{split}-*'. {self.how_to_build}",
        )


@dataclass(frozen=True)
class ImageData(PathData, Checked):
    """Images that have one class each: sharded records, tar shards, tables, or a folder of images for each class."""

    train: str | None = None
    """Path or pattern of the training examples."""
    validation: str | None = None
    test: str | None = None
    image_size: PositiveInt = 299
    """Height and width of the images that the network sees, in pixels."""
    preprocessing: Preprocessing = field(default_factory=Inception)
    """Crops, augmentations and normalisation."""
    labels_offset: Annotated[int, Range(gt=-(2**31), lt=2**31)] = 0
    """Subtracted from each label; -1 for folders, whose classes count from 0, if class 0 is the background."""
    decoding: Decoding = field(default_factory=Decoding)
    """How image files become pixels."""
    function: Function | None = None
    split: Split = "train"
    cache: str | None = None
    """The folder where indices of records and of tar shards, and what is read of object stores, are kept, never beside
    them; None: the user's cache."""
    cache_gb: Gigabytes | None = None
    """What is kept there of object stores at most, in 10**9 bytes, by all runs of this host together; 0: nothing; None:
    20, and at most half of what is free. It is read from the network once, and then again when it is damaged."""
    preprocess_on: Literal["host", "device"] = "host"
    """Where the crops are resized and flipped: "host", by the processes that read, or "device", for a whole batch at
    once beside the step before, to the same pixels. Colours and normalisation are always computed on the device."""
    image_column: str | None = None
    """The column of images in Parquet or Arrow files; None: it is found by its type and name."""
    label_column: str | None = None
    """The column of labels there; None: likewise."""
    labels: str | tuple[str, ...] | None = None
    """The names of the classes, or a file with one a line: of folders of images, and of tables whose labels are text.
    They are numbered by their order, from 0 on, in each split, which may lack some; None: the order of the names that a
    split has."""

    size_field: ClassVar[str] = "data.image_size"
    """The field of a recipe that says the size of the images, for errors."""
    class_file: ClassVar[tuple[str, str]] = ("labels", "a file with the name of each class, one a line")
    known: ClassVar[str] = (
        "sharded records, tar shards, a folder with a folder of images for each class, Parquet or Arrow files, "
        "a data set of Hugging Face's or of TFDS (tfds:NAME/VERSION/SPLIT)"
    )
    how_to_build: ClassVar[str] = (
        "To build shards: `lockstep convert images FOLDER --to shards` of folders of images, "
        "`lockstep convert imagenet --help` of ImageNet's archives"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._made_preset()
        self.check_paths()

    def reader(self, split: str, num_classes: int, *, to_train: bool = False) -> Reader:
        """Open the examples of a split."""
        from lockstep.readers.open import open_source

        source = open_source(
            self.path(split),
            everything=to_train and self.crops_by_boxes,
            decoding=self.decoding,
            cache=self.limited_cache,
            image_column=self.image_column,
            label_column=self.label_column,
            labels=self.labels,
        )
        return self.labelled(self.part_of(source, split), num_classes, to_train=to_train)

    def labelled(self, source: Reader, num_classes: int, *, to_train: bool = False) -> Reader:
        """Select the images, labels and, if crops depend on them, boxes of a source; labels are checked."""
        from lockstep.readers.classification import ClassificationReader

        return ClassificationReader(
            source, num_classes, offset=self.labels_offset, boxes=to_train and self.crops_by_boxes
        )

    @property
    def crops_by_boxes(self) -> bool:
        """Whether the training augmentations use boxes."""
        return isinstance(self.preprocessing, Inception) and self.preprocessing.crop_by_boxes

    def training(self) -> Sequence[Augment]:
        """Return the augmentations of training batches, in their order."""
        return self._preset.train

    def evaluation(self) -> Sequence[Augment]:
        """Return the augmentations of batches that are scored; they draw no random numbers."""
        return self._preset.evaluate

    @property
    def mixing(self) -> MixDraws | None:
        """What mixes the images of a batch, and so their labels; None: nothing does."""
        return self.preprocessing.mixing if isinstance(self.preprocessing, ResizedCrop) else None

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Make the input of the network: floats of shape (batch, 3, image_size, image_size)."""
        return self._preset.inputs(batch)

    def blank(self, num_examples: int) -> Tensor:
        """Make an input of the network from black images."""
        return self.inputs({"image": torch.zeros(num_examples, 3, self.image_size, self.image_size, dtype=torch.uint8)})

    def resized(self, image_size: int, field: str) -> Self:
        """Make images of another size; the preprocessing may refuse it."""
        return replace(self, image_size=image_size)

    @cached_property
    def _preset(self) -> Preset:
        return self._made_preset()

    def _made_preset(self) -> Preset:
        preset = self.preprocessing.preset(self.image_size)
        if self.preprocess_on == "host":
            return preset
        return replace(preset, train=(OnDevice.of(preset.train),), evaluate=(OnDevice.of(preset.evaluate),))


@dataclass(frozen=True)
class DetectionData(PathData, Checked):
    """Images with objects on them: sharded records, tables, or annotations of PASCAL VOC, YOLO, COCO or in CSV.

    Labels are numbered 1 to the model's `num_classes`. Those of the data are taken as they are if none is larger; else,
    as the 80 of COCO's up to 90, they are numbered by their order. With a label map they are the numbers in the map.
    """

    train: str | None = None
    """Path or pattern of records; a folder of VOC, or of images and XML; YOLO's `data.yaml`, or a folder of images with
    labels; a table of CSV; or a file of annotations.json, with the folder of its images after a colon where that is not
    beside it."""
    validation: str | None = None
    test: str | None = None
    train_split: str | None = None
    """The list in ImageSets/Main of VOC's folder, or the set of YOLO's `data.yaml`; None: "train", for the others "val"
    and "test". Of a folder without lists all images are read."""
    validation_split: str | None = None
    """The list of the validation examples; None: "val"."""
    test_split: str | None = None
    """The list of the test examples; None: "test"."""
    year: PositiveInt | None = None
    """Year of VOC's challenge, where the paths lead to the folder above that of the year."""
    label_map: str | None = None
    """A file with the numbers of the classes by name; None: the data numbers them. XML's and those of tables of CSV are
    numbered by the names in the examples to train on, in alphabetical order; other sets may lack some."""
    labels_offset: Annotated[int, Range(gt=-(2**31), lt=2**31)] = 0
    """Subtracted from each label of the data: -1 if its classes count from 0."""
    masks: bool = False
    """Also read masks."""
    num_keypoints: NonNegativeInt = 0
    """Also read keypoints, so many for each object."""
    crowd: bool = True
    """Train on objects that are crowds, too."""
    difficult: bool = True
    """Train on objects that are marked as difficult, too."""
    max_number_of_boxes: PositiveInt | None = None
    """The most objects of an image to train on, the first ones; None: all."""
    merge_multiple_label_boxes: bool = False
    """Make one object of several labels out of those with the same box; not with masks or keypoints."""
    quantization_bins: Annotated[int, Range(ge=2, lt=2**31)] | None = None
    """Boxes are the same if each edge is in the same of so many bins: 10,000 as in 2018; None: if they are equal, as in
    2017."""
    use_multiclass_scores: bool = False
    """Train on the scores of all classes that records have for an object, in place of its label."""
    bad_objects: Literal["raise", "drop"] = "raise"
    """What becomes of an object with a box that is none or a label outside of the map: an error, or it is left out."""
    resizer: FixedShapeResizer | KeepAspectRatioResizer = field(default_factory=FixedShapeResizer)
    """The size of the images that the network sees; it comes after the augmentations."""
    augment: tuple[Augment, ...] = ()
    """Augmentations of the training images and their objects, in this order."""
    colours_after_resizing: bool = True
    """Compute colours that nothing else in `augment` waits for at the size that the network sees, on its device; False:
    in their order, as the reference does."""
    decoding: Decoding = field(default_factory=Decoding)
    """How image files become pixels."""
    function: Function | None = None
    split: Split = "train"
    cache: str | None = None
    """The folder where indices of records, and what is read of object stores, are kept, never beside them; None: the
    user's cache."""
    cache_gb: Gigabytes | None = None
    """What is kept there of object stores at most, as of `ImageData`."""
    image_column: str | None = None
    """The column of images in Parquet or Arrow files; None: it is found by its type and name."""
    objects_column: str | None = None
    """The column of objects there; None: likewise."""

    class_file: ClassVar[tuple[str, str]] = ("label_map", "a label map: a file with the id and the name of each class")
    known: ClassVar[str] = (
        "sharded records; Parquet or Arrow files; a data set of Hugging Face's or of TFDS (tfds:NAME/VERSION/SPLIT); "
        + ANNOTATED
    )
    how_to_build: ClassVar[str] = "To build shards: `lockstep convert detection --help`"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_paths()
        self._check_order()
        self.targets(num_classes=1)
        if self.merge_multiple_label_boxes:
            refuse_merging(["masks"] * self.masks + ["keypoints"] * (self.num_keypoints > 0))

    def _check_order(self) -> None:
        """Refuse boxes in pixels before an augmentation that takes them for shares: objects would be lost."""
        of_places = [each for each in self.augment if not isinstance(each, ColourOption)]
        for before, after in pairwise(of_places):
            if isinstance(before, ScaleBoxesToPixelCoordinates):
                raise InputError(
                    "Boxes in pixels can only be the end of the augmentations: all others but colours take shares.",
                    given=f"{type(before).__name__} before {type(after).__name__}",
                    expected="it as the last one, but for colours",
                    hint="name scale_boxes_to_pixel_coordinates at the end of augment",
                )

    @property
    def image_size(self) -> int:
        """The shorter side of the images that the network sees, in pixels."""
        return min(self.resizer.shape)

    @property
    def size_field(self) -> str:
        """The field of a recipe that says the shorter side of the images, for errors."""
        return f"data.resizer.{self.resizer.shorter_side}"

    def resized(self, image_size: int, field: str) -> Self:
        """Make square images of another size, where all of them have one size; errors name the field that asks."""
        if not isinstance(self.resizer, FixedShapeResizer):
            raise one_size(self, field, image_size)
        return replace(self, resizer=replace(self.resizer, height=image_size, width=image_size))

    def reader(
        self, split: str, num_classes: int, *, to_train: bool = False, class_names: Mapping[int, str] | None = None
    ) -> Reader:
        """Open a split, with what it is scored against unless `to_train`; a run that has begun has `class_names`."""
        from lockstep.readers.coco import Coco
        from lockstep.readers.image_tables import DetectionTable
        from lockstep.readers.open import open_detection
        from lockstep.readers.tfds import TfdsRecords
        from lockstep.readers.yolo import Yolo

        is_share = split == "validation" and self.validation_share is not None
        listed = "train" if is_share else split
        source = open_detection(
            self.path(split),
            split=getattr(self, f"{listed}_split") or _NAMES_IN_VOC[listed],
            year=self.year,
            label_map=self._read_label_map(),
            zero_based=self.labels_offset == _ZERO_BASED,
            masks=self.masks,
            num_keypoints=self.num_keypoints,
            num_multiclass_scores=num_classes if self.use_multiclass_scores and to_train else 0,
            truth=not to_train,
            decoding=self.decoding,
            cache=self.limited_cache,
            image_column=self.image_column,
            objects_column=self.objects_column,
            classes_of=class_names if class_names and not self.labels_offset else self.path_of(self.split),
        )
        is_numbered = (
            isinstance(source, Coco | DetectionTable | TfdsRecords | Yolo) and self.labels_offset == _ZERO_BASED
        )  # from 1 on, by its reader
        data = replace(self, labels_offset=0) if is_numbered else self
        return data.labelled(self.part_of(source, split), num_classes, to_train=to_train)

    def labelled(self, source: Reader, num_classes: int, *, to_train: bool = False) -> Reader:
        """Number the labels of a source and check its objects; to train on it, leave out those that are not wanted."""
        from lockstep.readers.detection import DetectionReader

        label_map = self._read_label_map()
        return DetectionReader(
            source,
            num_classes,
            offset=self.labels_offset,
            classes=None if label_map is None else label_map.names,
            crowd=self.crowd,
            difficult=self.difficult,
            max_number_of_boxes=self.max_number_of_boxes,
            num_keypoints=self.num_keypoints,
            bad_objects=self.bad_objects,
            label_map_path=self.label_map,
        )

    def _read_label_map(self) -> LabelMap | None:
        from lockstep.readers.label_map import read_label_map

        return None if self.label_map is None else read_label_map(self.label_map)

    def training(self) -> Sequence[Augment]:
        """Return the augmentations of training batches, in their order."""
        in_loader, _ = self._split_augment
        return (*in_loader, self.resizer)

    def evaluation(self) -> Sequence[Augment]:
        """Return the augmentations of batches that are scored; they draw no random numbers."""
        return (self.resizer,)

    def targets(self, num_classes: int) -> DetectionTargets:
        """Return what comes after the augmentations of training batches, and makes the targets of the losses."""
        return DetectionTargets(
            num_classes, self.merge_multiple_label_boxes, self.quantization_bins, self.use_multiclass_scores
        )

    def inputs(self, batch: Mapping[str, Any]) -> Tensor | Sequence[Tensor]:
        """Make floats from 0 to 255 of shape (batch, 3, height, width); where sizes differ, (3, height, width) each."""
        _, colours = self._split_augment
        images = colours.apply(batch)
        if isinstance(images, torch.Tensor):
            return images.to(torch.float32)
        floats = [image.to(torch.float32) for image in images]
        return torch.stack(floats) if len({image.shape for image in floats}) == 1 else floats

    def blank(self, num_examples: int) -> Tensor:
        """Make an input of the network from black images."""
        return torch.zeros(num_examples, 3, *self.resizer.shape)

    @cached_property
    def _split_augment(self) -> tuple[Sequence[Augment], DeferredColours]:
        """What the loader does, and the colours that are left to do: none where padding would be coloured too."""
        resizer = self.resizer
        is_padded = isinstance(resizer, KeepAspectRatioResizer) and resizer.pad_to_max_dimension
        can_wait = self.colours_after_resizing and not is_padded
        return deferred(self.augment) if can_wait else (self.augment, DeferredColours())
