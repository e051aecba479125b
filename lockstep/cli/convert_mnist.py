"""`lockstep convert mnist`: MNIST's original files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lockstep.cli.converting import size
from lockstep.reporting.console import format_duration
from lockstep.screen import log


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What the command takes."""
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


def run(arguments: argparse.Namespace) -> None:
    """Write the records that are not there."""
    from lockstep.convert.mnist import convert_mnist

    started = time.monotonic()
    written = convert_mnist(arguments.to, arguments.layout, arguments.folder)
    log.info(
        "%d records in %d files in %s, %s, in %s",
        sum(each.num_records for each in written),
        len(written),
        arguments.to,
        size(sum(each.path.stat().st_size for each in written)),
        format_duration(time.monotonic() - started),
    )
