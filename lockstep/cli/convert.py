"""`lockstep convert`: make sharded records of data sets in the formats they come in."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.cli.shared import Command, OldFlag, add_json_argument
from lockstep.errors import DataError
from lockstep.listing import format_size, hint_for_path, what_is_there
from lockstep.reporting.console import format_duration, show_progress
from lockstep.screen import log, write_json

if TYPE_CHECKING:
    from lockstep.convert.image_folder import LabelledImage
    from lockstep.convert.imagenet import BoxCounts
    from lockstep.convert.sharding import Settings, Summary

_EVERY_SPLIT = "all"


class Converter(NamedTuple):
    """A kind of data set that can be converted: its line in the help, its flags, and the function that converts it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Mapping[str, Any]]
    """Says in the log what it has done, and returns it for `--json`."""


def _add_arguments(convert: argparse.ArgumentParser) -> None:
    convert.description = "Make sharded records of a data set. The same command again goes on where it was stopped."
    kinds = convert.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, converter in CONVERTERS.items():
        parser = kinds.add_parser(name, help=converter.help, description=f"Convert {converter.help}.")
        converter.add_arguments(parser)
        add_json_argument(parser)


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if "folder" in arguments and arguments.kind != "mnist":  # which is fetched to a folder that is not there
        _check_there(arguments.folder)
    try:
        done = CONVERTERS[arguments.kind].run(arguments)
    except KeyboardInterrupt:
        log.info("Stopped. What is finished is kept: the same command goes on.")
        raise
    if arguments.json:
        write_json({"to": str(arguments.to), **done})
    return 0


def _check_there(folder: Path) -> None:
    from lockstep.records.shards import check_local

    check_local(folder)
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder}.",
            given=what_is_there(folder),
            expected="the folder of the data set",
            hint=hint_for_path(folder),
        )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder of the shards")
    _add_processes(command)
    command.add_argument(
        "--max-skipped", type=int, metavar="N", help="fail once more items cannot be converted (default: never)"
    )


def _add_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--processes", type=int, metavar="N", help="how many convert at once (default: one a core)")
    _add_force(command, "write over the shards of another conversion")


def _add_force(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--force", action="store_true", help=what)
    command.add_argument("--overwrite", dest="force", action=OldFlag, new="--force", nargs=0)


def _add_num_shards(command: argparse.ArgumentParser, *, train: int, validation: int) -> None:
    for name, default in (("train", train), ("validation", validation)):
        command.add_argument(f"--{name}-shards", type=int, default=default, metavar="N", help=f"default: {default}")


def _add_images(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", type=Path, help="holds the folders train and validation (or val); with a share, those of the classes"
    )
    _add_output(command)
    command.add_argument(
        "--labels", type=Path, metavar="FILE", help="one class a line, numbered from 1 (default: the folders, sorted)"
    )
    _add_num_shards(command, train=2, validation=2)
    split = command.add_mutually_exclusive_group()
    split.add_argument(
        "--validation-share", type=float, metavar="SHARE", help="validate with a share of each class; 0 has all train"
    )
    split.add_argument("--validation-per-class", type=int, metavar="N", help="validate with N images of each class")


def _convert_images(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.image_folder import image_sets, split_images

    share, per_class = arguments.validation_share, arguments.validation_per_class
    if share is None and per_class is None:
        sets = image_sets(arguments.folder, arguments.labels)
    else:
        sets = split_images(arguments.folder, arguments.labels, share=share, per_class=per_class)
    return _convert_sets(arguments, sets)


def _add_imagenet(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="holds the folders train and validation (or val), by synset")
    _add_output(command)
    command.add_argument(
        "--labels", required=True, type=Path, metavar="FILE", help="one synset a line, numbered from 1"
    )
    command.add_argument(
        "--metadata", required=True, type=Path, metavar="FILE", help="lines of a synset, a tab and its name"
    )
    command.add_argument("--boxes", type=Path, metavar="FILE", help="the CSV file of lockstep convert boxes")
    _add_num_shards(command, train=1024, validation=128)


def _convert_imagenet(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.imagenet import imagenet_sets

    return _convert_sets(
        arguments, imagenet_sets(arguments.folder, arguments.labels, arguments.metadata, arguments.boxes)
    )


def _convert_sets(arguments: argparse.Namespace, sets: Mapping[str, Sequence[LabelledImage]]) -> Mapping[str, Any]:
    from lockstep.convert.image_folder import convert_images

    num_shards = {"train": arguments.train_shards, "validation": arguments.validation_shards}
    summaries = []
    for name, images in sets.items():
        with _settings(arguments, name) as settings:
            summary = convert_images(arguments.folder, images, arguments.to, name, num_shards[name], settings=settings)
        summaries.append(summary)
    return _log_summary(summaries, arguments.to)


def _add_validation(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="holds ILSVRC2012_val_00000001.JPEG and those after it")
    command.add_argument(
        "--labels", required=True, type=Path, metavar="FILE", help="the synset of each image, one a line"
    )
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder above those of the classes")
    command.add_argument(
        "--how", choices=("link", "copy", "move"), default="link", help="default: link, which takes no room"
    )


def _sort_validation(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.imagenet import sort_validation

    with show_progress("validation images") as show:
        num_images = sort_validation(arguments.folder, arguments.labels, arguments.to, arguments.how, progress=show)
    log.info("%d images in folders of their classes in %s", num_images, arguments.to)
    return {"images": num_images}


def _add_boxes(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="holds a folder for each synset, with a file of XML for each image")
    command.add_argument("--to", required=True, type=Path, metavar="FILE", help="the CSV file")
    command.add_argument("--labels", type=Path, metavar="FILE", help="the synsets wanted, one a line (default: all)")
    _add_force(command, "write over a file that is there")


def _convert_boxes(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.imagenet import write_boxes
    from lockstep.readers.label_map import read_labels

    synsets = frozenset(read_labels(arguments.labels)) if arguments.labels else None
    with show_progress("boxes") as show:
        counts = write_boxes(arguments.folder, arguments.to, synsets, overwrite=arguments.force, progress=show)
    log.info(
        "%d boxes of %d images in %s, from %d files; %d boxes skipped",
        counts.num_boxes,
        counts.num_images,
        arguments.to,
        counts.num_files,
        counts.num_skipped,
    )
    return _plain(counts)


def _add_mnist(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", type=Path, nargs="?", help="of the original files; what is missing is fetched (default: the cache)"
    )
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder of the records")
    command.add_argument(
        "--layout",
        choices=("raw", "png"),
        default="raw",
        help="raw: train, validation and test.tfrecords with pixels (default); "
        "png: mnist_train and mnist_test.tfrecord with PNGs, as slim has them",
    )


def _convert_mnist(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.mnist import convert_mnist

    started = time.monotonic()
    written = convert_mnist(arguments.to, arguments.layout, arguments.folder)
    seconds = time.monotonic() - started
    num_records = sum(each.num_records for each in written)
    num_bytes = sum(each.path.stat().st_size for each in written)
    log.info(
        "%d records in %d files in %s, %s, in %s",
        num_records,
        len(written),
        arguments.to,
        format_size(num_bytes),
        format_duration(seconds),
    )
    return {"records": num_records, "files": len(written), "bytes": num_bytes, "seconds": seconds}


def _add_voc(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-dir", required=True, metavar="DIR", help="holds the folder Annotations; with --year, those of the years"
    )
    command.add_argument(
        "--set",
        default="train",
        metavar="NAME",
        help=f"train (default), val, trainval, test or another list; {_EVERY_SPLIT} for every annotation",
    )
    command.add_argument("--year", metavar="YEAR", help="VOC2007, VOC2012 or merged, which is both")
    command.add_argument("--ignore-difficult", action="store_true", help="leave out the objects that are marked so")
    _add_detection(command, "that of the set")


def _convert_voc(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.detection import convert_voc

    split = None if arguments.set == _EVERY_SPLIT else arguments.set
    how = {"split": split, "year": arguments.year, "ignore_difficult": arguments.ignore_difficult}
    return _convert_objects(convert_voc, arguments, arguments.set, arguments.data_dir, **how)


def _add_coco(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--annotations", required=True, metavar="FILE", help="such as annotations/instances_train2017.json"
    )
    command.add_argument("--images", required=True, metavar="DIR", help="the folder of the images, such as train2017")
    command.add_argument("--masks", action="store_true", help="write the objects' masks too")
    command.add_argument("--keypoints", action="store_true", help="write their keypoints too")
    command.add_argument(
        "--zero-based",
        action="store_true",
        help="the labels are the ids + 1 (default: if there is a class of the id 0)",
    )
    _add_detection(command, "that of the file of annotations")


def _convert_coco(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.detection import convert_coco

    title, places = Path(arguments.annotations).stem, (arguments.annotations, arguments.images)
    how = {"masks": arguments.masks, "keypoints": arguments.keypoints, "zero_based": arguments.zero_based or None}
    return _convert_objects(convert_coco, arguments, title, *places, **how)


def _add_any_detection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "data",
        metavar="PATH",
        help="VOC's folder, images with XML, YOLO's data.yaml or folder, CSV, COCO's annotations",
    )
    command.add_argument(
        "--split", default="train", metavar="NAME", help="the list or set, if there are any: train (default), val, test"
    )
    _add_detection(command, "that of the split")


def _convert_any_detection(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.detection import convert_detection

    split = arguments.split
    return _convert_objects(convert_detection, arguments, split, arguments.data, split=split)


def _add_detection(command: argparse.ArgumentParser, default_name: str) -> None:
    command.add_argument(
        "--label-map", metavar="FILE", help="the number of each class (default: label_map.pbtxt is written)"
    )
    command.add_argument("--name", metavar="NAME", help=f"of the shards, before their number (default: {default_name})")
    command.add_argument("--shards", type=int, metavar="N", help="default: one for each 1000 images")
    _add_output(command)


def _convert_objects(
    convert: Callable[..., Summary], arguments: argparse.Namespace, title: str, *places: str, **how: Any
) -> Mapping[str, Any]:
    """Convert the data in some places by the flags that all formats of objects share, and by `how`."""
    from lockstep.readers.label_map import read_label_map

    label_map = read_label_map(arguments.label_map) if arguments.label_map else None
    names = {"label_map": label_map, "base": arguments.name, "num_shards": arguments.shards}
    with _settings(arguments, title) as settings:
        summary = convert(*places, arguments.to, **names, **how, settings=settings)
    return _log_summary([summary], arguments.to)


def _add_prepare(command: argparse.ArgumentParser) -> None:
    command.add_argument("shards", nargs="+", help='files of records with images, or patterns such as "train-*"')
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="another folder than that of the shards")
    command.add_argument(
        "--short-side", type=int, default=320, metavar="N", help="pixels at most; no image grows (default: 320)"
    )
    command.add_argument("--quality", type=int, default=90, metavar="N", help="of the JPEGs, 1 to 100 (default: 90)")
    command.add_argument(
        "--subsampling", default="420", metavar="444|422|420", help="of the JPEGs' colours (default: 420)"
    )
    command.add_argument("--name", metavar="NAME", help="of the new shards, before their number (default: as it is)")
    _add_processes(command)
    # The records must be as many as before: one that cannot be prepared ends the command.
    command.set_defaults(max_skipped=0)


def _prepare(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from lockstep.convert.prepare import Preparation, prepare

    preparation = Preparation(arguments.short_side, arguments.quality, arguments.subsampling)
    with _settings(arguments, "prepare") as settings:
        done = prepare(arguments.shards, arguments.to, preparation, base=arguments.name, settings=settings)
    facts = _log_summary([done.summary], arguments.to)
    before, after = done.num_bytes_before, done.summary.num_bytes
    sizes = format_size(before), format_size(after)
    log.info("%s: %s before, %s after (%.0f %%)", preparation, *sizes, 100 * after / before)
    return {**facts, "bytes_before": before}


@contextmanager
def _settings(arguments: argparse.Namespace, title: str) -> Iterator[Settings]:
    """Make the settings of a conversion from its flags; progress is shown below a title until the block ends."""
    from lockstep.convert.sharding import Settings

    with show_progress(title) as show:
        yield Settings(arguments.processes, arguments.max_skipped, arguments.force, show)


def _log_summary(summaries: Sequence[Summary], output: Path) -> dict[str, Any]:
    total = reduce(add, summaries)
    kept = f" ({total.num_kept} of them before)" if total.num_kept else ""
    skipped = f", {len(total.skipped)} skipped (listed in {output}/.*.conversion.json)" if total.skipped else ""
    log.info(
        "%d records in %d shards%s in %s, %s, in %s%s",
        total.num_records,
        total.num_shards,
        kept,
        output,
        format_size(total.num_bytes),
        format_duration(total.seconds),
        skipped,
    )
    return _plain(total)


def _plain(counted: Summary | BoxCounts) -> dict[str, Any]:
    return {name.removeprefix("num_"): value for name, value in asdict(counted).items()}


CONVERTERS = {
    "images": Converter("folders of images, one a class", _add_images, _convert_images),
    "imagenet": Converter("ImageNet, with bounding boxes", _add_imagenet, _convert_imagenet),
    "imagenet-validation": Converter(
        "ImageNet's validation images into a folder for each class", _add_validation, _sort_validation
    ),
    "boxes": Converter("ImageNet's bounding boxes, from XML to one CSV file", _add_boxes, _convert_boxes),
    "mnist": Converter("MNIST's original files", _add_mnist, _convert_mnist),
    "detection": Converter("images with objects, in whatever format", _add_any_detection, _convert_any_detection),
    "voc": Converter("a data set in PASCAL VOC's format", _add_voc, _convert_voc),
    "coco": Converter("a data set in COCO's format", _add_coco, _convert_coco),
    "prepare": Converter("shards into shards of smaller images", _add_prepare, _prepare),
}

COMMAND = Command(
    "make sharded records of a data set",
    _add_arguments,
    _run,
    flags={
        "num_shards": "--shards",
        "num_processes": "--processes",
        "share": "--validation-share",
        "per_class": "--validation-per-class",
        "short_side": "--short-side",
        "quality": "--quality",
        "subsampling": "--subsampling",
        "zero_based": "--zero-based",
    },
)
