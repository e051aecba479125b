"""`lockstep convert imagenet-validation`: ImageNet's validation images into a folder for each class."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.converting import showing
from lockstep.screen import log


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What the command takes."""
    command.add_argument("folder", type=Path, help="holds ILSVRC2012_val_00000001.JPEG and those after it")
    command.add_argument(
        "--labels", required=True, type=Path, metavar="FILE", help="the synset of each image, one a line"
    )
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder above those of the classes")
    command.add_argument(
        "--how", choices=("link", "copy", "move"), default="link", help="default: link, which takes no room"
    )


def run(arguments: argparse.Namespace) -> None:
    """Put each image into its folder."""
    from lockstep.convert.imagenet import sort_validation

    with showing("validation images") as show:
        num_images = sort_validation(arguments.folder, arguments.labels, arguments.to, arguments.how, progress=show)
    log.info("%d images in folders of their classes in %s", num_images, arguments.to)
