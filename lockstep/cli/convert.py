"""`lockstep convert`: data sets in the formats they come in, made into sharded records. Loads no torch by itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.cli import (
    convert_boxes,
    convert_detection,
    convert_imagenet,
    convert_images,
    convert_mnist,
    convert_prepare,
    convert_validation,
)
from lockstep.screen import log

_STOPPED = 130


class Kind(NamedTuple):
    """One of the conversions."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


KINDS = {
    "images": Kind("folders of images, one a class", convert_images.add_arguments, convert_images.run),
    "imagenet": Kind("ImageNet, with bounding boxes", convert_imagenet.add_arguments, convert_imagenet.run),
    "imagenet-validation": Kind(
        "ImageNet's validation images into a folder for each class",
        convert_validation.add_arguments,
        convert_validation.run,
    ),
    "boxes": Kind(
        "ImageNet's bounding boxes, from XML to one CSV file", convert_boxes.add_arguments, convert_boxes.run
    ),
    "mnist": Kind("MNIST's original files", convert_mnist.add_arguments, convert_mnist.run),
    "voc": Kind("a data set in PASCAL VOC's format", convert_detection.add_voc_arguments, convert_detection.run_voc),
    "coco": Kind("a data set in COCO's format", convert_detection.add_coco_arguments, convert_detection.run_coco),
    "prepare": Kind("shards into shards of smaller images", convert_prepare.add_arguments, convert_prepare.run),
}


def add_arguments(convert: argparse.ArgumentParser) -> None:
    """What the command takes."""
    convert.description = "Make sharded records of a data set. The same command again goes on where it was stopped."
    kinds = convert.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, kind in KINDS.items():
        kind.add_arguments(kinds.add_parser(name, help=kind.help, description=f"Convert {kind.help}."))


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Run the command."""
    try:
        KINDS[arguments.kind].run(arguments)
    except KeyboardInterrupt:
        log.info("Stopped. What is finished is kept: the same command goes on.")
        return _STOPPED
    return 0
