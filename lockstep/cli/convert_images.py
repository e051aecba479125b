"""`lockstep convert images`: folders of images, one a class."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.converting import add_output, add_shards, convert_sets


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What the command takes."""
    command.add_argument(
        "folder", type=Path, help="holds the folders train and validation (or val); with a share, those of the classes"
    )
    add_output(command)
    command.add_argument(
        "--labels", type=Path, metavar="FILE", help="one class a line, numbered from 1 (default: the folders, sorted)"
    )
    add_shards(command, train=2, validation=2)
    split = command.add_mutually_exclusive_group()
    split.add_argument(
        "--validation-share", type=float, metavar="SHARE", help="validate with a share of each class; 0 has all train"
    )
    split.add_argument("--validation-per-class", type=int, metavar="N", help="validate with N images of each class")


def run(arguments: argparse.Namespace) -> None:
    """Convert the images for validation, then those for training."""
    from lockstep.convert.image_folder import image_sets, split_images

    share, per_class = arguments.validation_share, arguments.validation_per_class
    if share is None and per_class is None:
        sets = image_sets(arguments.folder, arguments.labels)
    else:
        sets = split_images(arguments.folder, arguments.labels, share=share, per_class=per_class)
    convert_sets(arguments, sets)
