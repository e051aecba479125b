"""`lockstep convert voc` and `lockstep convert coco`: images with objects on them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.converting import add_output, report, settings_of

if TYPE_CHECKING:
    from lockstep.readers.label_map import LabelMap

_EVERY = "all"


def add_voc_arguments(command: argparse.ArgumentParser) -> None:
    """What `lockstep convert voc` takes."""
    command.add_argument(
        "--data-dir", required=True, metavar="DIR", help="holds the folder Annotations; with --year, those of the years"
    )
    command.add_argument(
        "--set",
        default="train",
        metavar="NAME",
        help=f"train (default), val, trainval, test or another list; {_EVERY} for every annotation",
    )
    command.add_argument("--year", metavar="YEAR", help="VOC2007, VOC2012 or merged, which is both")
    command.add_argument("--ignore-difficult", action="store_true", help="leave out the objects that are marked so")
    _add_shards(command, "that of the set")


def run_voc(arguments: argparse.Namespace) -> None:
    """Convert a data set in PASCAL VOC's format."""
    from lockstep.convert.detection import convert_voc

    with settings_of(arguments, arguments.set) as settings:
        summary = convert_voc(
            arguments.data_dir,
            arguments.to,
            split=None if arguments.set == _EVERY else arguments.set,
            year=arguments.year,
            label_map=_label_map(arguments),
            ignore_difficult=arguments.ignore_difficult,
            base=arguments.name,
            num_shards=arguments.shards,
            settings=settings,
        )
    report([summary], arguments.to)


def add_coco_arguments(command: argparse.ArgumentParser) -> None:
    """What `lockstep convert coco` takes."""
    command.add_argument(
        "--annotations", required=True, metavar="FILE", help="such as annotations/instances_train2017.json"
    )
    command.add_argument("--images", required=True, metavar="DIR", help="the folder of the images, such as train2017")
    command.add_argument("--masks", action="store_true", help="write the objects' masks too")
    command.add_argument("--keypoints", action="store_true", help="write their keypoints too")
    command.add_argument(
        "--zero-based", action="store_true", help="the file numbers its categories from 0: the labels are the ids + 1"
    )
    _add_shards(command, "that of the file of annotations")


def run_coco(arguments: argparse.Namespace) -> None:
    """Convert a data set in COCO's format."""
    from lockstep.convert.detection import convert_coco

    with settings_of(arguments, Path(arguments.annotations).stem) as settings:
        summary = convert_coco(
            arguments.annotations,
            arguments.images,
            arguments.to,
            masks=arguments.masks,
            keypoints=arguments.keypoints,
            label_map=_label_map(arguments),
            zero_based=arguments.zero_based,
            base=arguments.name,
            num_shards=arguments.shards,
            settings=settings,
        )
    report([summary], arguments.to)


def _add_shards(command: argparse.ArgumentParser, default_name: str) -> None:
    command.add_argument(
        "--label-map", type=Path, metavar="FILE", help="the number of each class (default: label_map.pbtxt is written)"
    )
    command.add_argument("--name", metavar="NAME", help=f"of the shards, before their number (default: {default_name})")
    command.add_argument("--shards", type=int, metavar="N", help="default: one for each 1000 images")
    add_output(command)


def _label_map(arguments: argparse.Namespace) -> LabelMap | None:
    from lockstep.readers.label_map import read_label_map

    return read_label_map(arguments.label_map) if arguments.label_map else None
