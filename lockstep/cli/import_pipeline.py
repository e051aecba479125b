"""`lockstep import pipeline`: a config of TensorFlow's Object Detection API as a recipe, and a table of its fields."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.shared import Command, check_target
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.listing import hint_for_path
from lockstep.screen import write_lines

if TYPE_CHECKING:
    from lockstep.recipes.messages import Row
    from lockstep.recipes.pipeline_config import Imported

_LONGEST_FILE = 1 << 20
_LONGEST_VALUE = 32
_FATES = {"mapped": "mapped", "no effect": "without effect here", "not mapped": "not mapped"}
_HEAD = ("line", "field", "value")


def _add_arguments(importing: argparse.ArgumentParser) -> None:
    importing.add_argument("path", type=Path, metavar="FILE", help="the pipeline.config, in the text format")
    importing.add_argument(
        "--to", required=True, type=Path, metavar="RECIPE", help="the recipe's file, which ends in .toml"
    )
    importing.add_argument("--force", action="store_true", help="overwrite the file")
    importing.add_argument(
        "--substitute-model",
        action="store_true",
        help="take the nearest feature extractor where that of the config is not there; the report says which",
    )


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the recipe, and a table of what became of every field."""
    from lockstep.recipes.pipeline_config import import_pipeline
    from lockstep.recipes.toml import to_toml

    path, target = arguments.path, arguments.to
    what = "A pipeline.config is imported as a recipe, a file of TOML."
    check_target(target, [".toml"], what, overwrite=arguments.force)
    name = path.name.removesuffix(path.suffix)
    made = import_pipeline(_text(path), str(path), name, substitute_model=arguments.substitute_model)
    with atomic_write(target, failure=InputError) as file:
        file.write(to_toml(made.recipe).encode())
    counts = Counter[str](row.outcome.fate for row in made.rows)
    summary = ", ".join(f"{counts[fate]} {words}" for fate, words in _FATES.items())
    write_lines([*_table(made.rows), f"{target}: {len(made.rows)} fields, {summary}", *_more(made)])
    return 0


def _more(made: Imported) -> Iterator[str]:
    """What takes the place of parts that are not here, and why the recipe cannot be trained, if so."""
    if made.substitutes:
        fields = (f"{path}={'none' if value is None else value}" for path, value in made.substitutes.items())
        yield f"substituted: {', '.join(fields)}"
    if made.refusal:
        yield from f"`lockstep train` refuses it: {made.refusal}".splitlines()


def _text(path: Path) -> str:
    from lockstep.records.shards import check_local

    check_local(path)
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)  # a device has no size, and no end
        if len(content) > _LONGEST_FILE:
            raise InputError(
                f"{path} is no pipeline.config.",
                given=f"more than {_LONGEST_FILE:,} bytes",
                expected=f"at most {_LONGEST_FILE:,} bytes of text",
                hint="name the config, not a model",
            )
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read.",
            given=getattr(error, "strerror", None) or str(error),
            expected="a pipeline.config, in the text format of protocol buffers",
            hint=hint_for_path(path) if not path.exists() else "check the path, and who may read it",
        ) from error


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each field, below the message that it is in: its line in the file, its value, what becomes of it."""
    cells = [(str(row.place.line), f"  {row.name}", _short(row.value)) for row in rows]
    line, name, value = (max(map(len, column)) for column in zip(_HEAD, *cells, strict=True))
    yield f"{_HEAD[0]:>{line}}  {_HEAD[1]:{name}}  {_HEAD[2]:{value}}  becomes"
    within = ""
    for row, (number, field, given) in zip(rows, cells, strict=True):
        if row.within != within:
            within = row.within
            yield f"{'':{line}}  {within}"
        fate = "" if row.outcome.fate == "mapped" else f"{row.outcome.fate}: "
        yield f"{number:>{line}}  {field:{name}}  {given:{value}}  {fate}{row.outcome.text}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."


COMMAND = Command("a pipeline.config of TensorFlow's Object Detection API, as a recipe", _add_arguments, _run)
