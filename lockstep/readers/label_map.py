"""Files of class names: label maps, and lists with one label a line.

A label map is a `StringIntLabelMap` in protocol buffers' text format, as TensorFlow's object detection API reads it:

    item {
      name: "/m/01g317"
      id: 1
      display_name: "person"
    }
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lockstep.durable import atomic_write
from lockstep.errors import DataError
from lockstep.records.shards import check_local

BACKGROUND = "background"
_TOKEN = re.compile(
    r"""(?:[\s,;]|\#[^\n]*)*
    (?:(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<open>[{<\[])|(?P<close>[}>\]])|(?P<colon>:)|(?P<word>[\w.+-]+)|(?P<end>\Z)|(?P<other>.))""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_TO_ESCAPE = re.compile(r'[\x00-\x1f\x7f"\\]')


@dataclass(frozen=True)
class Label:
    """A class: its number, its name in the data, and a name for people if the first is a code."""

    id: int
    name: str
    display_name: str = ""


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


def read_label_map(path: str | Path) -> LabelMap:
    """Read a label map: `id`, `name` and `display_name` of each item; other fields are skipped."""
    fields = parse_text_format(_read(path), str(path))
    labels = tuple(_label(item, path) for name, item in fields if name == "item" and isinstance(item, list))
    if not labels:
        raise _unusable(str(path), f"the fields {', '.join(sorted({name for name, _ in fields})) or '(none)'}")
    _check(labels, str(path))
    return LabelMap(labels)


def write_label_map(path: str | Path, label_map: LabelMap) -> None:
    """Write a label map, whole or not at all."""
    check_local(path)
    with atomic_write(Path(path), parents=True, failure=DataError) as file:
        file.write("\n".join(map(_item, label_map.labels)).encode())


def read_labels(path: str | Path) -> tuple[str, ...]:
    """Read a file with one label a line; space around labels and empty lines at the end are ignored."""
    labels = tuple(line.strip() for line in _read(path).rstrip().splitlines())
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


def _label(item: list[Field], path: str | Path) -> Label:
    fields = dict(item)
    try:
        number = fields.get("id", Word("0"))
        names = [fields.get(name, "") for name in ("name", "display_name")]
        if not isinstance(number, Word) or not all(isinstance(name, str) for name in names):
            raise ValueError
        return Label(int(number.text), *map(str, names))
    except ValueError:
        raise _unusable(str(path), f"the item {item}") from None


def _check(labels: tuple[Label, ...], source: str) -> None:
    ids = Counter(label.id for label in labels)
    names = Counter(label.name for label in labels)
    for label in labels:
        if label.id < 0:
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
    return "\n".join(["item {", *lines, "}", ""])


def _read(path: str | Path) -> str:
    check_local(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read.",
            given=str(error),
            expected="a text file in UTF-8 that may be read",
            hint="check the path, and who may read it",
        ) from error


@dataclass(frozen=True)
class Word:
    """A number, a truth value or the name of an enumeration's value, as it is written."""

    text: str


Value = str | Word | list["Field"]
"""A string, a word, or the fields of a message."""
Field = tuple[str, Value]


def parse_text_format(text: str, source: str) -> list[Field]:
    """Parse a message in protocol buffers' text format, without a schema, to fields in the order of the text.

        name: "a" "b"  other: 'c'   # adjacent strings are one
        number: -1.5  word: TRUE
        message { inner: 1 }  another: < inner: 2 >
        many: [1, 2]

    Written after the language's specification at protobuf.dev, without extensions and expanded `Any`.
    """
    tokens = _Tokens(text, source)
    root = _Level([], "")
    within = [root]
    while within:
        level, token = within[-1], tokens.take()
        if token.text == level.closing:
            within.pop()
        elif opened := _read_value(tokens, level, token):
            within.append(opened)
    return root.fields


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


class _Level(NamedTuple):
    """A message or a list that is not closed yet."""

    fields: list[Field]
    closing: str
    """The bracket that closes it; "" for the end of the text."""
    name: str = ""
    """The field that the values of a list belong to; "" for a message."""


def _read_value(tokens: _Tokens, level: _Level, token: _Token) -> _Level | None:
    """Add the field that begins with a token, or the next value of a list; return the level that it opens, if any."""
    name = level.name
    if not name:
        name, token = tokens.name(token)
    if token.kind == "open":
        closing = _CLOSING[token.text]
        if closing == "]":
            return _Level(level.fields, closing, name)
        message: list[Field] = []
        level.fields.append((name, message))
        return _Level(message, closing)
    if token.kind == "word":
        level.fields.append((name, Word(token.text)))
    else:
        level.fields.append((name, tokens.string(token, joined=not level.name)))
    return None


class _Tokens:
    """The tokens of a text, in turn."""

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source
        self._tokens = [_token(match) for match in _TOKEN.finditer(text)]
        self._place = 0

    def take(self) -> _Token:
        """Take the next token; the last one is the end of the text."""
        token = self._tokens[self._place]
        self._place += 1
        return token

    def name(self, token: _Token) -> tuple[str, _Token]:
        """Take the name of a field and the first token of its value."""
        if token.kind != "word":
            raise self.unexpected(token, "the name of a field")
        value = self.take()
        if value.kind == "colon":
            value = self.take()
        elif value.text not in ("{", "<"):
            raise self.unexpected(value, f"a colon after {token.text}")
        return token.text, value

    def string(self, token: _Token, joined: bool) -> str:
        """Take a string, with the strings directly after it if `joined`."""
        if token.kind != "string":
            raise self.unexpected(token, "a value")
        content = _unescaped(token.text[1:-1])
        while joined and self._tokens[self._place].kind == "string":
            content += _unescaped(self.take().text[1:-1])
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self.unexpected(token, "a string of UTF-8") from None

    def unexpected(self, token: _Token, expected: str) -> DataError:
        """Make the error for a token in a wrong place."""
        line = self._text.count("\n", 0, token.place) + 1
        return DataError(
            f"{self._source} is not in protocol buffers' text format: line {line} cannot be read.",
            given=token.text[:100] or "the end of the text",
            expected=expected,
            hint="fix that line, or give a file of this format",
        )


def quoted(text: str) -> str:
    """Quote a string as the text format writes it."""
    return '"' + _TO_ESCAPE.sub(lambda match: f"\\{ord(match[0]):03o}", text) + '"'


def _token(match: re.Match[str]) -> _Token:
    kind = match.lastgroup or ""
    return _Token(kind, match[kind], match.start(kind))


def _unescaped(content: str) -> bytes:
    return _ESCAPE.sub(_escaped_bytes, content.encode(errors="surrogatepass"))


def _escaped_bytes(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, letter = match.groups()
    if octal:
        return bytes((int(octal, 8) & 0xFF,))
    if hexadecimal:
        return bytes((int(hexadecimal, 16),))
    if code := short or long:
        return chr(int(code, 16)).encode(errors="surrogatepass")
    return _LETTERS.get(letter, letter)
