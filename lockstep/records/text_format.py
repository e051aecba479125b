"""Protocol buffers' text format, read without a schema.

    name: "a" "b"  other: 'c'   # adjacent strings are one
    number: -1.5  word: TRUE
    message { inner: 1 }  another: < inner: 2 >
    many: [1, 2]

Written after the language's specification at protobuf.dev, without extensions and expanded `Any`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import DataError

# Whatever the text, each character is looked at a few times at most: nothing is given back (`*+`), and a string
# that is not closed is one token up to the end of its line.
_TOKEN = re.compile(
    r"""(?:[\s,;]++|\#[^\n]*+)*+
    (?:(?P<string>"(?:[^"\\\n]++|\\.)*+"|'(?:[^'\\\n]++|\\.)*+')|(?P<unclosed>["'][^\n]*+)
    |(?P<open>[{<\[])|(?P<close>[}>\]])|(?P<colon>:)|(?P<word>[\w.+-]++)|(?P<end>\Z)|(?P<other>.))""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_TO_ESCAPE = re.compile(r'[\x00-\x1f\x7f"\\]')


class Place(NamedTuple):
    """Where something stands in a text, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


@dataclass(frozen=True)
class Word:
    """A number, a truth value or the name of an enumeration's value, as it is written."""

    text: str


Value = str | Word | list["Field"]
"""A string, a word, or the fields of a message."""


class Field(NamedTuple):
    """A field of a message, or one item of a field that is written as a list."""

    name: str
    value: Value
    place: Place
    value_place: Place
    """Place of the value; for a message that of its bracket."""


def parse_text_format(text: str, source: str) -> list[Field]:
    """Parse a message to fields in the order of the text.

    Raises:
        DataError: the text is in another format; the line and the column are named.
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


def quoted(text: str) -> str:
    """Quote a string as the text format writes it."""
    return '"' + _TO_ESCAPE.sub(lambda match: f"\\{ord(match[0]):03o}", text) + '"'


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


class _Level(NamedTuple):
    """A message or a list that is not closed yet."""

    fields: list[Field]
    closing: str
    """The bracket that closes it; "" for the end of the text."""
    name: _Token | None = None
    """The name of the field that the values of a list belong to; None for a message."""


def _read_value(tokens: _Tokens, level: _Level, token: _Token) -> _Level | None:
    """Add the field that begins with a token, or the next value of a list; return the level that it opens, if any."""
    name = level.name
    if name is None:
        name, token = tokens.name(token)
    opened: _Level | None = None
    value: Value
    if token.kind == "open":
        closing = _CLOSING[token.text]
        if closing == "]":
            return _Level(level.fields, closing, name)
        value = []
        opened = _Level(value, closing)
    elif token.kind == "word":
        value = Word(token.text)
    else:
        value = tokens.string(token, joined=level.name is None)
    level.fields.append(Field(name.text, value, tokens.place(name), tokens.place(token)))
    return opened


class _Tokens:
    """The tokens of a text, in turn."""

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._tokens = map(_token, _TOKEN.finditer(text))
        self._next = next(self._tokens)
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def take(self) -> _Token:
        token, self._next = self._next, next(self._tokens, self._next)
        return token

    def place(self, token: _Token) -> Place:
        line = bisect_right(self._lines, token.start)
        return Place(line, token.start - self._lines[line - 1] + 1)

    def name(self, token: _Token) -> tuple[_Token, _Token]:
        """Take the first token of the value of a field with this name."""
        if token.kind != "word":
            raise self.unexpected(token, "the name of a field")
        value = self.take()
        if value.kind == "colon":
            value = self.take()
        elif value.text not in ("{", "<"):
            raise self.unexpected(value, f"a colon after {token.text}")
        return token, value

    def string(self, token: _Token, joined: bool) -> str:
        """Take a string, with the strings directly after it if `joined`."""
        if token.kind != "string":
            raise self.unexpected(token, "a value")
        texts = [token.text]
        while joined and self._next.kind == "string":
            texts.append(self.take().text)
        try:
            return b"".join(_unescaped(text[1:-1]) for text in texts).decode()
        except (ValueError, OverflowError):  # no UTF-8, or no code point
            raise self.unexpected(token, "a string of UTF-8") from None

    def unexpected(self, token: _Token, expected: str) -> DataError:
        """Make the error for a token in a wrong place."""
        if token.kind == "unclosed":
            expected = f"a closing {token.text[0]} on the same line"
        return DataError(
            f"{self._source} is not in protocol buffers' text format: {self.place(token)} cannot be read.",
            given=token.text[:100] or "the end of the text",
            expected=expected,
            hint="fix that line, or give a file of this format",
        )


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
