"""Opens data by its path: the format is found out, and the reader chosen."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.errors import DataError, InputError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.listing import hint_for_path, shorten
from lockstep.readers.box_table import BoxTable, classes_in_table
from lockstep.readers.coco import Coco
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords, Schema
from lockstep.readers.image_tables import DetectionTable, ImageTable
from lockstep.readers.label_map import Label, LabelMap, UnknownClassError
from lockstep.readers.mnist import mnist_records
from lockstep.readers.paths import (
    ANNOTATED,
    SETS,
    AnnotationsAt,
    annotations_at,
    classes_among,
    entries_of,
    has_images,
    held,
    shards_among,
    unknown_data,
    words_in,
)
from lockstep.readers.reader import Reader
from lockstep.readers.schemas import DetectionSchema, ImageNetSchema
from lockstep.readers.split_folders import RECORDS, TABLE, TAR, find_split
from lockstep.readers.table_columns import find_label, find_objects, has_outlines_and_keypoints
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.tfds import TfdsRecords
from lockstep.readers.voc import Voc, classes_in_xml, folder_of_year
from lockstep.readers.yolo import Yolo
from lockstep.readers.yolo_sets import find_yolo_sets
from lockstep.records.example import Values, parse_example
from lockstep.records.index_cache import Cache, ranges_through
from lockstep.records.open_files import OpenFiles
from lockstep.records.shards import absence_of, data_path, expand_braces, find_shards
from lockstep.records.tables import Kept, open_table
from lockstep.records.tfrecord import read_all
from lockstep.storage.remote_path import AnyPath

_NUMBER_OF_SHARD = re.compile(r"\d+(?=-of-\d|\.tar$|\.(tfrecord|record))")

_IMAGE, _PIXELS, _LABEL = "image/encoded", "image_raw", "image/class/label"
_OBJECTS = "image/object/"


class _Options(NamedTuple):
    """How data is opened, as `open_source` says."""

    everything: bool
    truth: bool
    decoding: Decoding
    cache: Cache
    image: str | None
    label: str | None
    labels: str | AnyPath | tuple[str, ...] | None
    classes_of: str | Path | None


def open_source(
    path: str | Path,
    *,
    everything: bool = False,
    truth: bool = False,
    decoding: Decoding = AS_STORED,
    cache: Cache = None,
    image_column: str | None = None,
    label_column: str | None = None,
    labels: str | AnyPath | tuple[str, ...] | None = None,
    classes_of: str | Path | None = None,
) -> Reader:
    """Open data with the right reader, found by the names in a folder, and by the first record of a file of records.

    - a folder with a folder of images for each class: `ImageFolder`
    - TFRecord files, a pattern of them, or the folder of one set of shards: `ImageRecords` with an `ImageNetSchema` or
      a `DetectionSchema`, or the records of MNIST
    - tar archives, a pattern or a range of them, or their folder: `TarShards`
    - Parquet or Arrow files, a pattern of them, or their folder, also one of Hugging Face's datasets, with the split
      after a slash: `ImageTable`, or `DetectionTable` where images have objects and no class
    - a version of a data set of TFDS, such as tfds:mnist/3.0.1/train, or its folder: `TfdsRecords`
    - a folder with annotations in XML, or of images and XML: `Voc`, its split "train" where it has one, else all of it
    - a `data.yaml`, its folder, or a folder of images with YOLO's texts: `Yolo`, likewise
    - a table of CSV with the edges of boxes, or the folder with it: `BoxTable`
    - a file of annotations.json, or a folder with one: `Coco`; its images are in the folder named after a colon, else
      in one beside the file or its folder that is named like the split, else in "images" beside the file, beside the
      file itself, or in "images" beside its folder

    Args:
        path: what to open.
        everything: also read expensive fields, if the file of annotations or the first record has them: masks,
            keypoints, additional channels, and boxes and texts of images that have one class.
        truth: of images with objects, also give what detections are scored against, in the fields "truth_...".
        decoding: how images are decoded when they are asked for; the records of MNIST hold pixels.
        cache: the folder where indices of records and of tar shards, and what is read of object stores, are kept; by
            default in the user's cache.
        image_column: of a table, the column of images, where the name and type do not tell.
        label_column: of a table, the column of labels; likewise.
        labels: of a table or of folders of images, the names of the classes, or a file with one on each line, numbered
            from 0 on; by default they are numbered in the order of their names.
        classes_of: as of `open_detection`.
    """
    reader = _open(path, _Options(everything, truth, decoding, cache, image_column, label_column, labels, classes_of))
    if labels is not None and not isinstance(reader, ImageTable | ImageFolder):
        raise InputError(
            f"The classes of {path} are not numbered by a file of labels.",
            given=f"labels={str(labels)!r}, and data that is read by {type(reader).__name__}",
            expected="a table, or a folder of images for each class: in other data the labels are numbers",
            hint="leave labels out, or data.labels in a recipe",
        )
    return reader


def _open(path: str | Path, options: _Options) -> Reader:
    named = _named_files(path)
    if isinstance(named, list):
        return _open_table(named, options)
    _check_no_columns(path, options.image, options.label)
    if named:
        return TfdsRecords(path, truth=options.truth, decoding=options.decoding, cache=options.cache)
    if found := annotations_at(path):
        asked = {"decoding": options.decoding, "truth": options.truth, "cache": options.cache}
        if found.kind == "coco":
            return _coco(found, options.everything, asked)
        if found.kind == "yolo":
            opened = partial(_yolo, found, None, **asked)
            return _with_all(opened, has_masks=True, has_keypoints=True) if options.everything else opened()
        return _boxed(found, None, asked, classes_of=options.classes_of)
    if (whole := data_path(path)).is_dir():
        return _open_folder(whole, options)
    return _open_files(find_shards(expand_braces(str(path))), str(path), options)


def open_detection(
    path: str | Path,
    *,
    split: str,
    year: int | None = None,
    label_map: LabelMap | None = None,
    zero_based: bool = False,
    masks: bool = False,
    num_keypoints: int = 0,
    num_multiclass_scores: int = 0,
    truth: bool = False,
    decoding: Decoding = AS_STORED,
    cache: Cache = None,
    image_column: str | None = None,
    objects_column: str | None = None,
    classes_of: str | Path | Mapping[int, str] | None = None,
) -> Reader:
    """Open images with objects on them, with the fields that are asked for, by one of the readers of `open_source`.

    The boxes of records and tables are not checked: that is for a `DetectionReader`.

    Args:
        path: as for `open_source`, but for a folder of VOC as given by `year`.
        split: the list of VOC, or the set of YOLO's `data.yaml`, that is read, if there are any.
        year: of VOC's challenge, if the path is the folder above that of the year.
        label_map: the label of each class by its name.
        zero_based: the categories of COCO or of a table count from 0; those of COCO tell it themselves.
        masks: read masks, too.
        num_keypoints: read keypoints, too, so many for each object.
        num_multiclass_scores: read the scores that records have for each object, so many.
        truth: also give what detections are scored against, in the fields "truth_...".
        decoding: how images are decoded when they are asked for.
        cache: the folder where indices of records, and what is read of object stores, are kept; by default in the
            user's cache.
        image_column: of a table, the column of images, where the name and type do not tell.
        objects_column: of a table, the column of objects; likewise.
        classes_of: the examples to train on. Their names number the classes of XML and of tables of CSV, where there is
            no label map, so that other sets may lack some; by default they are in the folder "train" beside one that is
            named like another set, or else those at the path itself. Or the names of the classes by their labels, as a
            run knows them.

    Raises:
        DataError: the data cannot be used; an object is of a class that the examples to train on lack.
    """
    options: dict[str, Any] = {"label_map": label_map, "check_boxes": False, "truth": truth, "decoding": decoding}
    if named := _named_files(path):
        asked = {"use_multiclass_scores": num_multiclass_scores, "year": year is not None}
        of_outlines = {"masks": masks, "num_keypoints": num_keypoints} if named == "tfds" else {}
        _check_objects_suffice(path, {**of_outlines, **asked})
    if isinstance(named, list):
        columns: dict[str, Any] = {"image": image_column, "objects": objects_column, "zero_based": zero_based}
        return DetectionTable(named, masks=masks, keypoints=num_keypoints > 0, cache=cache, **columns, **options)
    _check_no_columns(path, image_column, objects_column)
    if named:
        return TfdsRecords(path, objects=True, cache=cache, **options)
    folder = data_path(path)
    if found := _annotations(path, year):
        chosen: dict[str, Any] = {"label_map": label_map, "truth": truth, "decoding": decoding, "cache": cache}
        if found.kind == "coco":
            chosen |= {"masks": masks, "keypoints": num_keypoints > 0, "zero_based": zero_based or None}
            return Coco(found.place, found.images or _images_beside(found.place), **chosen)
        if found.kind == "yolo":
            _check_objects_suffice(path, {"year": year is not None})
            return _yolo(found, split, masks=masks, keypoints=num_keypoints > 0, **chosen)
        if found.kind != "voc":
            _check_objects_suffice(path, {"masks": masks, "num_keypoints": num_keypoints, "year": year is not None})
        return _boxed(found, split, chosen, year, classes_of)
    if not folder.is_dir():
        files = find_shards(expand_braces(str(path)))
    elif shards := shards_among(entries_of(folder)):
        files = _one_set(folder, shards)
    else:
        raise _without_annotations(folder)
    schema = DetectionSchema(
        label_map,
        masks="any" if masks else "none",
        num_keypoints=num_keypoints,
        num_multiclass_scores=num_multiclass_scores,
        check_boxes=False,
        truth=truth,
    )
    return ImageRecords(files, schema, decoding=decoding, cache=cache)


def _check_objects_suffice(path: str | Path, asked: Mapping[str, int]) -> None:
    """Refuse what tables or data sets of TFDS are not read for, by the names of what is asked for."""
    if names := [name for name, value in asked.items() if value]:
        raise InputError(
            f"{path} is not read for all that is asked of its objects.",
            given=", ".join(names),
            expected="records for these; or, of masks and keypoints, a table, annotations of COCO, or YOLO's texts",
            hint="write the objects as COCO's annotations (segmentation, keypoints) beside the images, which are read "
            "as they are, or made into records by lockstep convert coco; or leave them out",
        )


def _annotations(path: str | Path, year: int | None) -> AnnotationsAt | None:
    """Find annotations at a path; with a year, those of VOC's challenge below."""
    folder = data_path(path)
    return AnnotationsAt("voc", folder) if year and folder.is_dir() else annotations_at(path)


def _yolo(found: AnnotationsAt, split: str | None, **asked: Any) -> Reader:
    """Open YOLO's texts: of the set of a split where there are any, without a split of "train"; else all of them."""
    sets = find_yolo_sets(found.place).images
    named = "train" in sets if split is None else [*sets] != [""]
    return Yolo(found.place, (split or "train") if named else None, **asked)


def _boxed(
    found: AnnotationsAt,
    split: str | None,
    asked: Mapping[str, Any],
    year: int | None = None,
    classes_of: str | Path | Mapping[int, str] | None = None,
) -> Reader:
    """Open XML or a table of CSV; by the list of a split where there are any, without a split "train".

    Where no split is asked for and none is to train on, all of it is read.
    """
    named, lacking = asked.get("label_map"), ""
    if isinstance(classes_of, Mapping):
        if named is None:
            named, lacking = LabelMap(tuple(Label(*each) for each in classes_of.items())), "the run does not know"
    elif named is None and (trained := _to_train_on(found, classes_of, year)):
        named = LabelMap.alphabetical(_classes_in(trained, year))
        lacking = f"none in {trained.place}, to train on, is of"
    asked = {**asked, "label_map": named}
    try:
        if found.kind == "table":
            return BoxTable(found.place, **asked)
        lists = folder_of_year(found.place, year) / "ImageSets" / "Main"
        is_listed = (lists / "train.txt").is_file() if split is None else lists.is_dir()
        return Voc(found.place, (split or "train") if is_listed else None, year=year, **asked)
    except UnknownClassError as error:
        if named is None or not lacking:
            raise
        raise DataError(
            f"Objects in {found.place} are of a class that {lacking}.",
            given=error.given,
            expected=f"the classes to train on: {shorten([*named.ids])}",
            hint="put images with objects of it among those to train on, or take its objects out; or set "
            "data.label_map to a label map with all classes",
        ) from error


def _to_train_on(found: AnnotationsAt, given: str | Path | None, year: int | None) -> AnnotationsAt | None:
    """Find other annotations with names, whose classes number those that were found; None: these number themselves."""
    folder = found.place.parent if found.kind == "table" else found.place
    if isinstance(folder, Path) and folder.name in ("", ".."):  # that in which the command is given
        folder = folder.resolve()
    if given is None and folder.name.lower() not in SETS:
        return None
    place = _beside(folder) if given is None else data_path(given)
    other = _annotations(str(place), year) if place not in (folder, found.place) and place.exists() else None
    is_named = other is not None and other.kind in ("voc", "table") and other.place != found.place
    return other if is_named else None


def _beside(folder: AnyPath) -> AnyPath:
    """Return the folder of the examples to train on that is beside one of another set: "train", or "Train"."""
    usual = folder.parent / "train"
    beside = [usual] if usual.exists() else entries_of(folder.parent)
    return next((each for each in beside if each.name.lower() == usual.name), usual)


def _classes_in(found: AnnotationsAt, year: int | None) -> set[str]:
    return classes_in_table(found.place) if found.kind == "table" else classes_in_xml(found.place, year)


def _without_annotations(folder: AnyPath) -> DataError:
    entries = entries_of(folder)
    sets = [entry for entry in entries if entry.name.lower() in SETS and entry.is_dir()]
    return DataError(
        f"{folder} has no objects on images that are known.",
        given=held(entries),
        expected=f"records, or {ANNOTATED}",
        hint=f"name one of its folders: {sets[0]}" if sets else "check the path",
    )


def _open_folder(folder: AnyPath, options: _Options) -> Reader:
    entries = entries_of(folder)
    if shards := shards_among(entries):
        return _open_files(_one_set(folder, shards), str(folder), options)
    classes_among(folder, entries)
    return ImageFolder(folder, options.labels, decoding=options.decoding, cache=options.cache)


def _one_set(folder: AnyPath, names: Sequence[str]) -> list[AnyPath]:
    """Find all files of the set of shards that these names belong to; an error if there are several sets."""
    patterns = sorted({_NUMBER_OF_SHARD.sub("*", glob.escape(name), count=1) for name in names})
    if len(patterns) > 1:
        raise DataError(
            f"There are several sets of shards in {folder}.",
            given=shorten(patterns),
            expected="one set: others may be there to validate or to test",
            hint=f"name one by a pattern: '{folder / patterns[0]}'",
        )
    return find_shards(f"{glob.escape(str(folder))}/{patterns[0]}")


def _open_files(files: Sequence[AnyPath], given: str, options: _Options) -> Reader:
    if missing := next((file for file in files if not file.is_file()), None):
        raise unknown_data(given, absence_of(missing), hint_for_path(missing))
    everything, truth, decoding, cache, *_ = options
    if TAR.search(files[0].name):
        return TarShards(files, decoding=decoding, cache=cache)
    features = _first_features(files, given)
    if _PIXELS in features:
        return mnist_records(files, cache=cache)
    if _IMAGE not in features:
        raise unknown_data(given, f"records with the features {shorten(sorted(features)) or '(none)'}")
    schema: Schema
    if _LABEL in features or not any(name.startswith(_OBJECTS) for name in features):
        schema = ImageNetSchema(boxes=everything, text=everything)
    else:
        schema = replace(DetectionSchema.of_all(features) if everything else DetectionSchema(), truth=truth)
    return ImageRecords(files, schema, decoding=decoding, cache=cache)


def _named_files(path: str | Path) -> list[AnyPath] | Literal["tfds"] | None:
    """Return the files of a table at a path, or say that it is a data set of TFDS; None if it is neither."""
    if split := find_split(path):
        return [*split.files] if split.kind == "tables" else "tfds"
    return find_shards(expand_braces(path)) if TABLE.search(str(path)) else None


def _open_table(files: Sequence[AnyPath], options: _Options) -> Reader:
    first, decoding = open_table(files[0], Kept(), OpenFiles(ranges=ranges_through(options.cache))), options.decoding
    is_labelled = options.label is not None or options.labels is not None or find_label(first, None) is not None
    if not is_labelled and (objects := find_objects(first, None)):
        given: dict[str, Any] = {"image": options.image, "truth": options.truth, "cache": options.cache}
        opened: Callable[..., Reader] = partial(DetectionTable, files, decoding=decoding, **given)
        return _with_all(opened, *has_outlines_and_keypoints(first, objects)) if options.everything else opened()
    columns: dict[str, Any] = {"image": options.image, "label": options.label, "labels": options.labels}
    return ImageTable(files, **columns, decoding=decoding, cache=options.cache)


def _check_no_columns(path: str | Path, *names: str | None) -> None:
    if any(names):
        raise InputError(
            f"{path} has no columns to choose from.",
            given=f"the column {next(filter(None, names))!r}",
            expected="Parquet or Arrow files, where columns are named",
            hint="leave image_column, label_column and objects_column out",
        )


def _coco(found: AnnotationsAt, everything: bool, asked: Mapping[str, Any]) -> Reader:
    """Open a file of annotations, with everything also with masks and keypoints, if all objects have them."""
    opened = partial(Coco, found.place, found.images or _images_beside(found.place), **asked)
    return _with_all(opened, *words_in(found.place, b'"segmentation"', b'"keypoints"')) if everything else opened()


def _with_all(opened: Callable[..., Reader], has_masks: bool, has_keypoints: bool) -> Reader:
    """Open with masks and keypoints, as far as there are some."""
    choices = [(has_masks, has_keypoints), (has_masks, False), (False, has_keypoints)]
    for masks, keypoints in dict.fromkeys(each for each in choices if any(each)):
        with suppress(DataError):  # the word may be in a category's name, or only some objects may have it
            return opened(masks=masks, keypoints=keypoints)
    return opened()


def _first_features(files: Sequence[AnyPath], given: str) -> dict[str, Values]:
    for file in files:
        try:
            first = next(read_all(file), None)
        except DataError as error:
            if RECORDS.search(file.name):
                raise
            raise unknown_data(given, f"{file}, which is no file of records") from error
        if first:
            return parse_example(first[1], f"The first record of {file}")
    raise DataError(
        f"There are no records in {given}.",
        given=f"{len(files)} {'file' if len(files) == 1 else 'files'} without a record",
        expected="one record or more",
        hint="check the path or the pattern; write the records again",
    )


def _images_beside(annotations: AnyPath) -> AnyPath:
    """Find the images' folder of instances_train2017.json: train2017, images, or the file's own folder."""
    split = annotations.stem.rpartition("_")[2]
    here, above = annotations.parent, annotations.parent.parent
    folders = [here / split, above / split, here / "images" / split, above / "images" / split, here / "images"]
    folders += [] if has_images(here) else [above / "images"]
    return next((folder for folder in folders if folder.is_dir()), here)
