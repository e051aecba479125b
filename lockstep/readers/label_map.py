"""Files of class names: label maps, and lists with one label a line.

A label map is a `StringIntLabelMap` in protocol buffers' text format, as TensorFlow's object detection API reads it:

    item {
      name: "/m/01g317"
      id: 1
      display_name: "person"
    }
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.records.open_files import content_of
from lockstep.records.shards import check_local, data_path
from lockstep.records.text_format import Field, Word, parse_text_format, quoted
from lockstep.storage.remote_path import AnyPath

_MOST_BYTES = 1 << 25
BACKGROUND = "background"
UNKNOWN_LABEL = -1
"""The label of an object of a record whose class the label map lacks."""


class ZeroBasedError(DataError):
    """Data of objects whose classes count from 0, where 0 is the label of the background."""


class UnknownClassError(DataError):
    """Objects of a class that the label map lacks."""


@dataclass(frozen=True)
class Label:
    """A class: its number, its name in the data, and a name for people if the first is a code."""

    id: int
    name: str
    display_name: str = ""
    keypoints: tuple[tuple[int, str], ...] = ()
    """Number and name of each of its keypoints, in the order of the file: the number is its place, from 0 on, among
    those that the data has of an object."""


@dataclass(frozen=True)
class LabelMap:
    """Classes by number and by name, in the order of their file.

    Raises:
        DataError: a negative id, the id 0 for anything but the background, a class without a name, or an id or a name
            that comes twice.
    """

    labels: tuple[Label, ...]

    def __post_init__(self) -> None:
        _check(self.labels, "The label map")

    @classmethod
    def alphabetical(cls, names: Iterable[str]) -> LabelMap:
        """Number these names from 1 on in alphabetical order."""
        return cls(tuple(Label(number, name) for number, name in enumerate(sorted({*names}), 1)))

    @cached_property
    def ids(self) -> dict[str, int]:
        """The number of each class by its name, and by its display name if that is unique."""
        shown = Counter(label.display_name for label in self.labels)
        unique = {label.display_name: label.id for label in self.labels if shown[label.display_name] == 1}
        unique.pop("", None)
        return {**unique, **{label.name: label.id for label in self.labels if label.name}}

    @cached_property
    def names(self) -> dict[int, str]:
        """The display name of each class, or else its name, by its number."""
        return {label.id: label.display_name or label.name for label in self.labels}


def read_label_map(path: str | AnyPath) -> LabelMap:
    """Read a label map: `id`, `name`, `display_name` and `keypoints` of each item; other fields are skipped."""
    fields = parse_text_format(_read(path), str(path))
    labels = tuple(
        _label(field.value, field.place.line, path)
        for field in fields
        if field.name == "item" and isinstance(field.value, list)
    )
    if not labels:
        raise _unusable(str(path), f"the fields {', '.join(sorted({field.name for field in fields})) or '(none)'}")
    _check(labels, str(path))
    return LabelMap(labels)


def write_label_map(path: str | Path, label_map: LabelMap) -> None:
    """Write a label map, whole or not at all."""
    check_local(path)
    with atomic_write(Path(path), parents=True, failure=DataError) as file:
        file.write("\n".join(map(_item, label_map.labels)).encode())


def read_labels(path: str | AnyPath | tuple[str, ...]) -> tuple[str, ...]:
    """Read a file with one label a line; space around labels and empty lines at the end are ignored.

    In place of the file there may be the labels themselves.
    """
    labels = path if isinstance(path, tuple) else tuple(line.strip() for line in _read(path).rstrip().splitlines())
    twice = [label for label, count in Counter(labels).items() if count > 1]
    problem = ""
    if "" in labels:
        problem = f"line {labels.index('') + 1} is empty"
    elif twice:
        problem = (
            f"{twice[0]!r} twice: lines {', '.join(str(n) for n, label in enumerate(labels, 1) if label == twice[0])}"
        )
    if problem or not labels:
        raise DataError(
            f"{path} is no list of labels.",
            given=problem or "no labels",
            expected="one label a line, each once: a label's number is that of its line",
            hint="write each label on a line of its own",
        )
    return labels


def _label(item: list[Field], line: int, path: str | AnyPath) -> Label:
    fields = {field.name: field.value for field in item}
    try:
        number = fields.get("id", Word("0"))
        names = [fields.get(name, "") for name in ("name", "display_name")]
        if not isinstance(number, Word) or not all(isinstance(name, str) for name in names):
            raise ValueError
        return Label(int(number.text), str(names[0]), str(names[1]), tuple(_keypoints(item)))
    except ValueError:
        raise _unusable(str(path), f"the item in line {line}") from None


def _keypoints(item: list[Field]) -> Iterator[tuple[int, str]]:
    """Give number and name of each keypoint of an item; a ValueError says that they have none."""
    for field in item:
        if field.name == "keypoints":
            parts = {part.name: part.value for part in field.value} if isinstance(field.value, list) else {"id": ""}
            number, name = parts.get("id", Word("0")), parts.get("label", "")
            if not isinstance(number, Word) or not isinstance(name, str) or not 0 <= int(number.text) < 2**16:
                raise ValueError
            yield int(number.text), name


def _check(labels: tuple[Label, ...], source: str) -> None:
    ids = Counter(label.id for label in labels)
    names = Counter(label.name for label in labels)
    for label in labels:
        if not 0 <= label.id < 2**31:
            raise _unusable(source, f"the id {label.id} of {label.name!r}")
        if label.id == 0 and BACKGROUND not in (label.name, label.display_name):
            raise _unusable(source, f"the id 0 of {label.name!r}")
        if not (label.name or label.display_name):
            raise _unusable(source, f"no name for the id {label.id}")
        if ids[label.id] > 1:
            raise _unusable(source, f"the id {label.id} twice, of {label.name!r} among others")
        if label.name and names[label.name] > 1:
            raise _unusable(source, f"the name {label.name!r} twice, of the id {label.id} among others")


def _unusable(source: str, given: str) -> DataError:
    return DataError(
        f"{source} cannot be used as a label map.",
        given=given,
        expected="items with an id above 0 (0 for the background) and a name, both of this item alone",
        hint="give every class an id and a name of its own",
    )


def _item(label: Label) -> str:
    lines = [f"  name: {quoted(label.name)}"] if label.name else []
    lines.append(f"  id: {label.id}")
    if label.display_name:
        lines.append(f"  display_name: {quoted(label.display_name)}")
    lines += [f"  keypoints {{ id: {number} label: {quoted(name)} }}" for number, name in label.keypoints]
    return "\n".join(["item {", *lines, "}", ""])


def _read(path: str | AnyPath) -> str:
    file = data_path(path)
    try:
        content = content_of(file, _MOST_BYTES + 1)  # a device has no end
        if len(content) > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES >> 20} MiB")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="a text file in UTF-8 that may be read",
            hint="check the path, and who may read it",
        ) from error
