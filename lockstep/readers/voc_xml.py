"""One file of annotations in PASCAL VOC's format (http://host.robots.ox.ac.uk/pascal/VOC), as labelImg writes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, NoReturn
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

from lockstep.errors import DataError

_EDGES = ("ymin", "xmin", "ymax", "xmax")
_MOST_PIXELS = 2**31  # on a side
_UNSPECIFIED = "Unspecified"  # VOC's own word for what nobody has named
_FLAGS = {"0": False, "1": True, "false": False, "true": True, _UNSPECIFIED.lower(): False, "": False}


class VocObject(NamedTuple):
    """An object on an image."""

    name: str
    box: tuple[float, ...]
    """Top, left, bottom and right in pixels, as the file has them."""
    difficult: bool
    """Marked as hard to recognise: evaluations leave it out."""
    truncated: bool
    """Marked as reaching out of its box."""
    view: str
    """The side from which it is seen."""


class VocAnnotation(NamedTuple):
    """What a file says of an image."""

    file_name: str
    height: int
    """Of the image, in pixels."""
    width: int
    objects: tuple[VocObject, ...]


def read_voc_xml(path: Path) -> VocAnnotation:
    """Read one file. An object's parts, such as hands, are skipped.

    `difficult` and `truncated` are 0 or 1, or false or true as some tools write them; missing or "Unspecified" is 0.

    Raises:
        DataError: the file cannot be read, is no XML, declares a document type (which could define entities that grow
            without bound), or lacks a value.
    """
    try:
        parser = XMLParser(target=_Builder())
        parser.feed(path.read_bytes())
        return _annotation(parser.close())
    except (OSError, ParseError, ValueError, LookupError) as error:  # the last for an unknown encoding
        raise DataError(
            f"{path} cannot be used as an annotation in PASCAL VOC's format.",
            given=str(error),
            expected="XML with filename, size (width, height), and for each object name and bndbox, without a DOCTYPE",
            hint="repair the file, or leave it and its image out",
        ) from error


class _Builder(TreeBuilder):
    """Refuses a document type before anything that it defines is read."""

    def doctype(self, name: str, public_id: str | None, system: str | None) -> NoReturn:
        raise ValueError(f"a DOCTYPE {name}")


def _annotation(root: Element) -> VocAnnotation:
    height, width = (_number(root, f"size/{name}") for name in ("height", "width"))
    if not all(side.is_integer() and 0 < side < _MOST_PIXELS for side in (height, width)):
        raise ValueError(f"a size of {width:g} x {height:g} pixels")
    objects = tuple(_object(each, place) for place, each in enumerate(root.iterfind("object"), 1))
    return VocAnnotation(_text(root, "filename"), int(height), int(width), objects)


def _object(found: Element, place: int) -> VocObject:
    try:
        box = tuple(_number(found, f"bndbox/{edge}") for edge in _EDGES)
        view = found.findtext("pose", "").strip() or _UNSPECIFIED
        return VocObject(_text(found, "name"), box, _flag(found, "difficult"), _flag(found, "truncated"), view)
    except ValueError as error:
        raise ValueError(f"object {place}: {error}") from None


def _text(found: Element, name: str) -> str:
    text = found.findtext(name, "").strip()
    if not text:
        raise ValueError(f"no {name}")
    return text


def _number(found: Element, name: str) -> float:
    text = _text(found, name)
    try:
        number = math.nan if "_" in text else float(text)  # 1_000 is a number in Python alone
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} {text!r:.40}")
    return number


def _flag(found: Element, name: str) -> bool:
    text = found.findtext(name, "").strip()
    if text.lower() not in _FLAGS:
        raise ValueError(f"{name} {text!r:.40}")
    return _FLAGS[text.lower()]
