"""`lockstep convert boxes`: ImageNet's bounding boxes, from XML to one CSV file."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.converting import showing
from lockstep.screen import log


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What the command takes."""
    command.add_argument("folder", type=Path, help="holds a folder for each synset, with a file of XML for each image")
    command.add_argument("--to", required=True, type=Path, metavar="FILE", help="the CSV file")
    command.add_argument("--labels", type=Path, metavar="FILE", help="the synsets wanted, one a line (default: all)")
    command.add_argument("--overwrite", action="store_true", help="write over a file that is there")


def run(arguments: argparse.Namespace) -> None:
    """Write the file, and say what has become of the boxes."""
    from lockstep.convert.imagenet import write_boxes
    from lockstep.readers.label_map import read_labels

    synsets = frozenset(read_labels(arguments.labels)) if arguments.labels else None
    with showing("boxes") as show:
        counts = write_boxes(arguments.folder, arguments.to, synsets, overwrite=arguments.overwrite, progress=show)
    log.info(
        "%d boxes of %d images in %s, from %d files; %d boxes skipped",
        counts.num_boxes,
        counts.num_images,
        arguments.to,
        counts.num_files,
        counts.num_skipped,
    )
