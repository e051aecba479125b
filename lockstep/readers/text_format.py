"""Protocol buffers' text format, read without a schema: fields by name, in the order of the text.

    name: "a" "b"  other: 'c'   # adjacent strings are one
    number: -1.5  word: TRUE
    message { inner: 1 }  another: < inner: 2 >
    many: [1, 2]

Written after the language's specification at protobuf.dev; extensions and expanded `Any` are not part of it here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import DataError


@dataclass(frozen=True)
class Word:
    """A number, a truth value or the name of an enumeration's value, as it is written."""

    text: str


Value = str | Word | list["Field"]
"""A string, a word, or the fields of a message."""
Field = tuple[str, Value]

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


def parse_text_format(text: str, source: str) -> list[Field]:
    """The fields of the message that a text holds; a field that is repeated comes as often as it stands there.

    Raises:
        DataError: the text is of another format; `source` and the line are named.
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
    """A message or a list that has been opened."""

    fields: list[Field]
    closing: str
    """What closes it; "" is the end of the text."""
    name: str = ""
    """Of a list: the field that its values belong to."""


def _read_value(tokens: _Tokens, level: _Level, token: _Token) -> _Level | None:
    """Add the field that begins with a token, or the next value of a list; a message or a list is opened, and given."""
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
        """The next token; the last one is the end of the text."""
        token = self._tokens[self._place]
        self._place += 1
        return token

    def name(self, token: _Token) -> tuple[str, _Token]:
        """The name of a field, and the first token of its value."""
        if token.kind != "word":
            raise self.unexpected(token, "the name of a field")
        value = self.take()
        if value.kind == "colon":
            value = self.take()
        elif value.text not in ("{", "<"):
            raise self.unexpected(value, f"a colon after {token.text}")
        return token.text, value

    def string(self, token: _Token, joined: bool) -> str:
        """A string, with those that follow it directly if they are to be joined."""
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
        """The error for a token that cannot stand where it does."""
        line = self._text.count("\n", 0, token.place) + 1
        return DataError(
            f"{self._source} is not in protocol buffers' text format: line {line} cannot be read.",
            given=token.text[:100] or "the end of the text",
            expected=expected,
            hint="fix that line, or give a file of this format",
        )


def quoted(text: str) -> str:
    """A string as the text format writes it."""
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
