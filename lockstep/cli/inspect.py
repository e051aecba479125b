"""`lockstep inspect`: list what is in a checkpoint, a run, files of records or tables, and what is damaged."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli.shared import Command, add_json_argument


def _add_arguments(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument(
        "path",
        help="weights of any supported system, a run (or run@STEP), a record file or table, its pattern or folder",
    )
    shown = inspect.add_mutually_exclusive_group()
    shown.add_argument("--diff", metavar="OTHER", help="compare with these weights; the exit code is 1 if they differ")
    shown.add_argument("--values", metavar="NAME", help="show the values of this tensor")
    shown.add_argument("--norms", action="store_true", help="show the 2-norm of each tensor")
    shown.add_argument(
        "--anchors", action="store_true", help="of a detector's recipe: how objects fit its anchors, and better ones"
    )
    add_json_argument(inspect)
    inspect.description = "List what is there. All of it is read and verified; exit code 1 if some is damaged."


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if arguments.anchors:
        from lockstep.cli.anchor_inspection import inspect_anchors

        return inspect_anchors(arguments)
    from lockstep.cli.inspection import diff_weights, find_record_files, inspect_records, inspect_weights, show_values
    from lockstep.cli.table_inspection import find_table_files, inspect_tables
    from lockstep.training.run_weights import open_weights

    if tables := find_table_files(arguments.path):
        return inspect_tables(arguments, tables)
    if files := find_record_files(arguments.path):
        return inspect_records(arguments, files)
    source = open_weights(arguments.path, slots=True)
    if arguments.diff is not None:
        return diff_weights(arguments, source)
    if arguments.values is not None:
        return show_values(arguments, source)
    return inspect_weights(arguments, source)


COMMAND = Command("list what is in a checkpoint, a run, a record file or a table", _add_arguments, _run)
