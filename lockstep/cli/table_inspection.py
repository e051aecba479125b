"""`lockstep inspect` of Parquet and Arrow files: their rows and columns, and the rows that are damaged."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.cli.shared import check_no_flag_of_weights, damage_lines, format_error, write_found
from lockstep.errors import DataError, LockstepError
from lockstep.listing import format_size
from lockstep.readers.split_folders import TABLE, find_split
from lockstep.readers.table_columns import find_image, find_label, find_objects
from lockstep.records.shards import expand_braces, find_shards
from lockstep.records.tables import Kept, TableFile, open_table
from lockstep.storage.remote_path import AnyPath
from lockstep.terminal import in_columns


class _InspectedTable(NamedTuple):
    """What is known of one file."""

    path: AnyPath
    kind: str = ""
    num_rows: int = 0
    num_groups: int = 0
    num_bytes: int = 0
    problem: str = ""


def find_table_files(path: str) -> list[AnyPath]:
    """Find the Parquet and Arrow files that a path names, as a file, a pattern, a folder or a split; none if none."""
    if split := find_split(path):
        return [*split.files] if split.kind == "tables" else []
    return find_shards(expand_braces(path)) if TABLE.search(path) else []


def inspect_tables(arguments: argparse.Namespace, files: Sequence[AnyPath]) -> int:
    """Write the report on these files; returns the exit code, 1 if something is damaged."""
    check_no_flag_of_weights(arguments, "which is a table", "tables")
    found: list[_InspectedTable] = []
    columns: dict[str, str] = {}
    for file in files:
        try:
            table = open_table(file, Kept())
        except DataError as error:
            found.append(_InspectedTable(file, problem=format_error(error)))
            continue
        columns = columns or _columns(table)
        sizes = len(table), len(table.starts) - 1, table.version.size_bytes
        found.append(_InspectedTable(file, table.kind, *sizes, _problem(table)))
    problems = [file.problem for file in found if file.problem]
    listed = [{**file._asdict(), "path": str(file.path)} for file in found]
    facts = {"kind": "table", "files": listed, "columns": columns, "problems": problems}
    write_found(arguments, facts, [f"{arguments.path}: a table", *_format(found, columns), *damage_lines(problems)])
    return 1 if problems else 0


def _columns(table: TableFile) -> dict[str, str]:
    roles: dict[str, str] = {}
    finders: Mapping[str, Any] = {"objects": find_objects, "labels": find_label, "images": find_image}
    for role, find in finders.items():
        try:
            column = find(table, None)
        except LockstepError:  # which one is meant cannot be found out: a recipe names it
            continue
        if column is not None:
            roles[column if isinstance(column, str) else column.leaf[0]] = role
    return {
        field.name: f"{field.type}" + (f": the {roles[field.name]}" if field.name in roles else "")
        for field in table.schema
    }


def _problem(table: TableFile) -> str:
    """Read the images of all rows; returns the error of the first that cannot be read, if there is one."""
    try:
        column = find_image(table, None)
    except LockstepError:
        return ""
    try:
        if column.is_path:
            table.column(column.leaf)
        else:
            for row in range(len(table)):
                table.value(column.leaf, row)
    except DataError as error:
        return format_error(error)
    return ""


def _format(files: Sequence[_InspectedTable], columns: Mapping[str, str]) -> Iterator[str]:
    for file in files:
        if file.kind:
            size = format_size(file.num_bytes)
            yield f"  {file.path}: {file.num_rows:,} rows in {file.num_groups:,} groups, {size}, {file.kind}"
    if columns:
        yield "columns:"
        yield from (f"  {line}" for line in in_columns([*columns.items()]))
    yield f"{len(files):,} {'file' if len(files) == 1 else 'files'}, {sum(file.num_rows for file in files):,} rows"
