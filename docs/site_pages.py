"""What the site has beside the pages of the repository: public names, fields of recipes and commands, each linked.

Docstrings and parsers say it all, here nothing is said. Before a build they become Markdown in `docs/generated`. A name
in back-ticks on any page, such as `ls.Towers(2)` or `exchange.exact=true`, then leads to what is said of it.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util import logging

import lockstep
from lockstep.cli.explain import field_pages
from lockstep.cli.main import parser
from lockstep.inline_toml import kind_name
from lockstep.recipes.fields import FieldsFound, all_fields, what_it_is

FOLDER = "docs/generated"
DECISIONS = "docs/decisions"
PACKAGES = [lockstep, *(each for name in lockstep.__all__ if inspect.ismodule(each := getattr(lockstep, name)))]
PUBLIC = {f"{package.__name__}.{name}": getattr(package, name) for package in PACKAGES for name in package.__all__}
HOMES = {
    f"{value.__module__}.{value.__qualname__}": name for name, value in PUBLIC.items() if hasattr(value, "__qualname__")
}
"""The public names by where the classes and functions are defined."""
TOPICS = {"model": "the model", "data": "data and augmentations", "optimizer": "the optimizer", "run": "the run"}
"""The pages of fields: of these parts, and of all others."""
COLUMNS = "100"
_log = logging.getLogger(__name__)


def library_pages() -> Iterator[tuple[str, str]]:
    """The page of each package: what its names, those in `__all__`, say of themselves."""
    for package in PACKAGES:
        lines = [f".. automodule:: {package.__name__}"]
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value):
                lines += ["", f".. autoclass:: {package.__name__}.{name}", "   :members:"]
            elif not inspect.ismodule(value):
                lines += ["", f".. autofunction:: {package.__name__}.{name}"]
        title = package.__name__.replace("lockstep", "ls", 1)
        yield package.__name__, f"# {title}\n\n```{{eval-rst}}\n" + "\n".join(lines) + "\n```\n"


def field_topics() -> Iterator[tuple[str, str]]:
    """The pages of the fields of recipes, each field below its path."""
    texts: dict[str, list[str]] = {topic: [f"# Fields of {said}\n"] for topic, said in TOPICS.items()}
    for path, fields in sorted(all_fields().items()):
        first = path.partition(".")[0]
        texts[first if first in TOPICS else "run"] += _field(FieldsFound(path, fields, fields[0].parts))
    for topic, lines in texts.items():
        yield f"fields-{topic}", "\n".join(lines)


def _field(found: FieldsFound) -> Iterator[str]:
    yield f"({_label(found.path)})=\n## `{found.path}`\n"
    pages = field_pages(found)
    for page in pages:
        of = f" Of {', '.join(f'`{each}`' for each in page['of'])}." if len(pages) > 1 else ""
        yield f"{_markdown(page['meaning'])}{of}\n"
        yield f"- takes {_markdown(page['takes'])}\n- default: `{page['default']}`"
        if page["set_by"]:
            yield f"- set by {', '.join(f'{name} (`{value}`)' for name, value in page['set_by'].items())}"
        yield f"- `{page['example']}`\n"
    if len(found.parts) > 1:
        yield "| kind | |\n|---|---|"
        yield from (f"| `{kind_name(part)}` | {_markdown(what_it_is(part))} |" for part in found.parts)
        yield ""


def _label(path: str) -> str:
    return f"field-{path.lower()}"


def _markdown(text: str) -> str:
    """Plain text as Markdown: what is not in back-ticks stands for itself."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]|$#{}])", r"\\\1", part) for part in parts)


def command_page() -> Iterator[tuple[str, str]]:
    """The page of all commands, as `--help` shows them."""
    os.environ["COLUMNS"] = COLUMNS
    lines = ["# Commands and their flags\n"]
    for name, command in _commands(parser()):
        lines.append(f"## `{name}`\n\n```text\n{command.format_help().rstrip()}\n```\n")
    yield "commands", "\n".join(lines)


def _commands(top: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield top.prog, top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)


def write_pages(app: Sphinx, config: Any) -> None:
    """Write what has changed, and remove what is not made any more."""
    folder = Path(app.srcdir, FOLDER)
    folder.mkdir(exist_ok=True)
    made = dict([*library_pages(), *field_topics(), *command_page()])
    for name, text in made.items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for page in folder.glob("*.md"):
        if page.stem not in made:
            page.unlink()


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the contents of the site: those of the home page are its lists of links, by heading.

    Pages that a page lists at its end are in no other contents: to draw those of hundreds of pages on each takes minutes.
    """
    folder, _, name = page.rpartition("/")
    if page == "docs/index":
        for heading, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", source[0], re.M | re.S):
            pages = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\.md\)", text, re.M)
            source[0] += "\n".join(["", "", "```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""])
    elif listed := _listed_on(Path(app.srcdir), page):
        source[0] += "\n".join(["", *(f"- [](/{each})" for each in listed), ""])
    elif folder == FOLDER or (folder == DECISIONS and name != "README") or folder.startswith("data/"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def _listed_on(root: Path, page: str) -> list[str]:
    """The pages that a page lists at its end."""
    patterns = {
        "docs/reference/api": f"{FOLDER}/lockstep*.md",
        "docs/reference/recipes": f"{FOLDER}/fields-*.md",
        "docs/reference/command-line": f"{FOLDER}/commands.md",
        f"{DECISIONS}/README": f"{DECISIONS}/0*.md",
    }
    return sorted(str(each.relative_to(root)) for each in root.glob(patterns[page])) if page in patterns else []


def read_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring: `code`, plain text and Google's sections. None is a warning."""
    if not any(lines):
        _log.warning("%s is public, and has no docstring", name)
    parts = re.split(r"(`{1,2}[^`]+`{1,2})", "\n".join(lines))
    text = "".join(f"\\ ``{part.strip('`')}``\\ " if part.startswith("`") else _plain(part) for part in parts)
    of_value = what in ("attribute", "property")
    lines[:] = text.splitlines() if of_value else GoogleDocstring(text).lines()


def _plain(text: str) -> str:
    return re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", text)


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Make links of the names in back-ticks and of the types in signatures that the site has a place for."""
    for literal in list(document.findall(nodes.literal)):
        if not isinstance(literal.parent, nodes.title | nodes.reference | addnodes.pending_xref):
            if link := _link_of(literal.astext(), app.env.docname):
                literal.replace_self(link)
                link += literal
    for link in list(document.findall(addnodes.pending_xref)):
        if link["refdomain"] == "py" and link["reftype"] != "obj":
            target = HOMES.get(link["reftarget"], link["reftarget"])
            if target in PUBLIC:
                link["reftarget"] = target
            else:
                link.replace_self(link.children)


def _link_of(text: str, page: str) -> addnodes.pending_xref | None:
    name = re.fullmatch(r"ls((?:\.\w+)+)(?:\(.*\))?", text, re.S)
    if name and f"lockstep{name[1]}" in PUBLIC:
        return addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=f"lockstep{name[1]}", refdoc=page, refwarn=True
        )
    path = text.partition("=")[0].strip()
    if "." in path and path in all_fields():
        return addnodes.pending_xref(
            "", refdomain="std", reftype="ref", reftarget=_label(path), refdoc=page, refexplicit=True, refwarn=True
        )
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect all of it to a build."""
    app.connect("config-inited", write_pages)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("doctree-read", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
