"""`lockstep convert imagenet`: ImageNet, with bounding boxes."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.converting import add_output, add_shards, convert_sets


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What the command takes."""
    command.add_argument("folder", type=Path, help="holds the folders train and validation (or val), by synset")
    add_output(command)
    command.add_argument(
        "--labels", required=True, type=Path, metavar="FILE", help="one synset a line, numbered from 1"
    )
    command.add_argument(
        "--metadata", required=True, type=Path, metavar="FILE", help="lines of a synset, a tab and its name"
    )
    command.add_argument("--boxes", type=Path, metavar="FILE", help="the CSV file of lockstep convert boxes")
    add_shards(command, train=1024, validation=128)


def run(arguments: argparse.Namespace) -> None:
    """Convert the images for validation, then those for training."""
    from lockstep.convert.imagenet import imagenet_sets

    convert_sets(arguments, imagenet_sets(arguments.folder, arguments.labels, arguments.metadata, arguments.boxes))
