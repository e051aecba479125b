"""The converters of data sets with objects: PASCAL VOC and COCO, made into records of detection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.checks import check_one_of
from lockstep.convert.detection_example import detection_example
from lockstep.convert.manifest import Skipped
from lockstep.convert.sharding import DEFAULT, Settings, Summary, convert
from lockstep.errors import DataError
from lockstep.readers.coco import Coco
from lockstep.readers.combine import Concatenated
from lockstep.readers.label_map import Label, LabelMap, read_label_map, write_label_map
from lockstep.readers.reader import Reader
from lockstep.readers.voc import Voc, annotation_files, folder_of_year
from lockstep.records.shards import check_local

YEARS = {"VOC2007": (2007,), "VOC2012": (2012,), "merged": (2007, 2012)}
"""By its name the years of a VOC data set."""
LABEL_MAP = "label_map.pbtxt"

_EXAMPLES_A_SHARD = 1000


def convert_voc(
    data_dir: str | Path,
    output: Path,
    *,
    split: str | None = "train",
    year: str | None = None,
    label_map: LabelMap | None = None,
    ignore_difficult: bool = False,
    base: str | None = None,
    num_shards: int | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the examples of a data set in PASCAL VOC's format to shards BASE-00000-of-00002 ... in the folder `output`.

    Without a label map its classes are numbered as `Voc` does, and `label_map.pbtxt` is written beside the shards. An
    image that cannot be read, or is of another size than its annotation says, is skipped.

    Args:
        data_dir: the folder that holds Annotations; with a year the one above, VOCdevkit.
        output: the folder of the shards, made if need be.
        split: "train", "val", "trainval", "test" or another list of the data set; None for all annotations.
        year: "VOC2007", "VOC2012" or "merged", which is both, one after the other.
        label_map: the number of each class.
        ignore_difficult: leave out the objects that are marked as difficult.
        base: the name before the number of a shard; by default that of the split.
        num_shards: by default one for each 1000 examples.
        settings: how the conversion runs.

    Raises:
        InputError: there is no such year.
        DataError: as `Voc` and `convert`; or another label map is there.
        WorkerError: as `convert`.
    """
    if year is not None:
        check_one_of("year", year, [*YEARS])
    check_local(data_dir)
    folders = [folder_of_year(Path(data_dir), each) for each in YEARS[year]] if year else [Path(data_dir)]
    readers = _of_one_numbering(folders, split, not ignore_difficult, label_map)
    reader = Concatenated({folder.name: reader for folder, reader in zip(folders, readers, strict=True)})
    annotations = [[path.name, path.stat().st_mtime_ns] for folder in folders for path in annotation_files(folder)]
    options = {"split": split, "difficult": not ignore_difficult, "annotations": annotations}
    with _classes_beside(output, readers[0].classes, label_map, settings):
        return convert(
            _examples(reader),
            partial(_record, reader),
            output,
            base or split or "all",
            _count(reader, num_shards),
            options={**options, "classes": readers[0].classes},
            settings=settings,
        )


def convert_coco(
    annotations: str | Path,
    images: str | Path,
    output: Path,
    *,
    masks: bool = False,
    keypoints: bool = False,
    label_map: LabelMap | None = None,
    zero_based: bool = False,
    base: str | None = None,
    num_shards: int | None = None,
    settings: Settings = DEFAULT,
) -> Summary:
    """Write the examples of a data set in COCO's format to shards BASE-00000-of-00002 ... in the folder `output`.

    Without a label map the ids of categories are the labels, or the ids + 1 if they are zero-based, and
    `label_map.pbtxt` is written beside the shards. What cannot be read is skipped, as by `convert_voc`.

    Args:
        annotations: the file, such as instances_train2017.json.
        images: the folder of the images.
        output: the folder of the shards, made if need be.
        masks: write the objects' masks too.
        keypoints: write their keypoints too.
        label_map: the number of each class.
        zero_based: the file numbers its categories from 0.
        base: the name before the number of a shard; by default that of the file of annotations.
        num_shards: by default one for each 1000 examples.
        settings: how the conversion runs.

    Raises:
        DataError: as `Coco` and `convert`; or another label map is there.
        WorkerError: as `convert`.
    """
    reader = Coco(annotations, images, masks=masks, keypoints=keypoints, label_map=label_map, zero_based=zero_based)
    path = Path(annotations)
    version = [path.stat().st_size, path.stat().st_mtime_ns]
    options = {"annotations": [path.name, *version], "masks": masks, "keypoints": keypoints}
    with _classes_beside(output, reader.classes, label_map, settings):
        return convert(
            _examples(reader),
            partial(_record, reader),
            output,
            base or path.stem,
            _count(reader, num_shards),
            options={**options, "classes": reader.classes},
            settings=settings,
        )


def _of_one_numbering(
    folders: Sequence[Path], split: str | None, difficult: bool, label_map: LabelMap | None
) -> list[Voc]:
    """A reader of each folder, all with the same label for a class."""
    readers = [Voc(folder, split, difficult=difficult, label_map=label_map) for folder in folders]
    if all(reader.classes == readers[0].classes for reader in readers):
        return readers
    names = sorted({name for reader in readers for name in reader.classes.values()})
    joint = LabelMap(tuple(Label(number, name) for number, name in enumerate(names, 1)))
    return [Voc(folder, split, difficult=difficult, label_map=joint) for folder in folders]


def _examples(reader: Reader) -> list[tuple[int, str]]:
    """The number and the name of each example."""
    return [(index, reader.example_id(index)) for index in range(len(reader))]


def _record(reader: Reader, example: tuple[int, str]) -> bytes | Skipped:
    """The record of an example, or why it has none."""
    index, name = example
    try:
        batch = reader.read_batch(np.array([index], dtype=np.int64))
        return detection_example({field: values[0] for field, values in batch.items()})
    except DataError as error:
        return Skipped(name, f"{error.what} {error.given}")


def _count(reader: Reader, num_shards: int | None) -> int:
    return max(1, -(-len(reader) // _EXAMPLES_A_SHARD)) if num_shards is None else num_shards


@contextmanager
def _classes_beside(
    output: Path, classes: Mapping[int, str], label_map: LabelMap | None, settings: Settings
) -> Iterator[None]:
    """Where no label map was given, write one beside the shards that are made meanwhile.

    Raises:
        DataError: that of other shards is there, or the system refuses to write it.
    """
    if label_map is not None:
        yield
        return
    made = LabelMap(tuple(Label(number, name) for number, name in sorted(classes.items())))
    path = output / LABEL_MAP
    if path.exists() and not settings.overwrite and (there := read_label_map(path)) != made:
        raise DataError(
            f"{path} is the label map of other classes.",
            given=f"{len(there.labels)} classes there, {len(made.labels)} here, or others of the same number",
            expected="no label map, or one of the same classes and numbers",
            hint="name another folder, or give a label map that has all classes",
        )
    yield
    write_label_map(path, made)
