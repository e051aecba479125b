"""`lockstep explain`: what a field of recipes means, takes and is by default, or which fields there are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.cli.shared import Command, add_json_argument
from lockstep.screen import write_json, write_lines
from lockstep.terminal import in_columns

if TYPE_CHECKING:
    from lockstep.recipes.fields import FieldsFound


def _add_arguments(explain: argparse.ArgumentParser) -> None:
    explain.add_argument(
        "field", nargs="?", metavar="FIELD", help="such as optimizer.lr, or optimizer.adam.betas of one kind alone"
    )
    add_json_argument(explain)


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.inline_toml import kind_name
    from lockstep.recipes.fields import FieldsFound, fields_at, fields_of
    from lockstep.recipes.recipe import Recipe

    path = arguments.field
    found = fields_at(path) if path else FieldsFound("", [], [Recipe])
    parts, pages = found.parts, field_pages(found)
    if arguments.json:
        listed = {kind_name(part): {each.name: each.meaning for each in fields_of(part)} for part in parts}
        write_json({"field": found.path, "pages": pages, "parts": listed})
        return 0
    for page in pages:
        write_lines(_page_lines(page))
    write_lines(_parts_lines(path, parts))
    return 0


def field_pages(found: FieldsFound) -> list[dict[str, Any]]:
    """The pages of a field; parts of which it says and takes the same share one."""
    from lockstep.inline_toml import kind_name
    from lockstep.recipes.fields import set_by

    pages: dict[Any, dict[str, Any]] = {}
    for field in found.fields:
        said = {"meaning": field.meaning, "takes": field.takes, "default": field.shown_default}
        page = pages.setdefault(tuple(said.values()), {"field": found.path, **said, "of": []})
        page["of"].append(kind_name(field.cls))
        page["example"] = page.get("example") or field.example(found.path)
    by_recipe = set_by(found.path) if pages else {}
    return [page | {"set_by": by_recipe} for page in pages.values()]


def _page_lines(page: dict[str, Any]) -> Iterator[str]:
    yield page["field"]
    yield f"  {page['meaning']}"
    yield f"  takes:    {page['takes']}"
    yield f"  default:  {page['default']}"
    yield f"  field of: {', '.join(page['of'])}"
    if page["set_by"]:
        yield f"  set by:   {', '.join(f'{name} ({value})' for name, value in page['set_by'].items())}"
    yield f"  example:  {page['example']}"
    yield ""


def _parts_lines(path: str | None, parts: Sequence[type]) -> Iterator[str]:
    """The fields of a part; of several kinds, what each of them is."""
    from lockstep.inline_toml import kind_name
    from lockstep.recipes.fields import fields_of, what_it_is

    before = f"{path}." if path else ""
    if len(parts) > 1:
        yield f"Kinds, of which `lockstep explain {before}KIND` lists the fields:"
        yield from in_columns([(f"  {kind_name(part)}", what_it_is(part)) for part in parts])
    for part in parts if len(parts) == 1 else ():
        yield what_it_is(part)
        if rows := [
            (f"  {before}{each.name}", each.meaning.partition(". ")[0].rstrip(".")) for each in fields_of(part)
        ]:
            yield from in_columns(rows)


COMMAND = Command("say what a field of recipes means and takes, or list the fields", _add_arguments, _run)
