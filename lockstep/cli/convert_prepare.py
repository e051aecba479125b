"""`lockstep convert prepare`: shards whose images are made smaller, for good."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.converting import report, settings_of, size
from lockstep.screen import log


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What the command takes."""
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
    command.add_argument("--processes", type=int, metavar="N", help="how many convert at once (default: one a core)")
    command.add_argument("--overwrite", action="store_true", help="write over the shards of another conversion")
    # As many records as before: one that cannot be prepared ends the command.
    command.set_defaults(max_skipped=0)


def run(arguments: argparse.Namespace) -> None:
    """Prepare the shards, and tell what has become of their size."""
    from lockstep.convert.prepare import Preparation, prepare

    preparation = Preparation(arguments.short_side, arguments.quality, arguments.subsampling)
    with settings_of(arguments, "prepare") as settings:
        done = prepare(arguments.shards, arguments.to, preparation, base=arguments.name, settings=settings)
    report([done.summary], arguments.to)
    before, after = done.num_bytes_before, done.summary.num_bytes
    log.info("%s: %s before, %s after (%.0f %%)", preparation, size(before), size(after), 100 * after / before)
