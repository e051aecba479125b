"""`lockstep import`: what other systems have written, in the formats of this one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli import import_checkpoint, import_pipeline
from lockstep.cli.shared import Command

KINDS = {"checkpoint": import_checkpoint.COMMAND, "pipeline": import_pipeline.COMMAND}


def _add_arguments(importing: argparse.ArgumentParser) -> None:
    kinds = importing.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, kind in KINDS.items():
        kind.add_arguments(kinds.add_parser(name, help=kind.help, description=f"Import {kind.help}."))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    return KINDS[arguments.kind].run(arguments, argv)


COMMAND = Command("make a recipe, or a file of weights, of what other systems have written", _add_arguments, _run)
