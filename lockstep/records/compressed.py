"""Compressed TFRecord files: one gzip or zlib stream around all records, as TensorFlow writes them.

A file is known by its first bytes, whatever its name. Several streams may follow one another, as `cat` joins
them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from lockstep.errors import DataError
from lockstep.records.framing import HEAD_BYTES, Compression, Source, bad_head, is_head

_WINDOW_BITS: dict[Compression, int] = {"gzip": 16 + zlib.MAX_WBITS, "zlib": zlib.MAX_WBITS}
_ANY_WINDOW_BITS = 32 + zlib.MAX_WBITS
_BLOCK_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b\x08"
_DEFLATE, _WIDEST_WINDOW, _WITH_DICTIONARY = 8, 7, 32


def compression_of(head: bytes, source: Source) -> Compression | None:
    """How a file is compressed, from its first 12 bytes (fewer if it is shorter); None if it is not.

    Raises:
        DataError: so many bytes are neither the start of a record nor of a gzip or zlib stream.
    """
    if not head or is_head(head):
        return None
    if head.startswith(_GZIP_MAGIC[: len(head)]):
        return "gzip"
    if _is_zlib(head):
        return "zlib"
    if len(head) < HEAD_BYTES:
        return None
    raise bad_head(head, source, 0, 0)


def _is_zlib(head: bytes) -> bool:
    """Whether these are the first two bytes of a zlib stream (RFC 1950)."""
    if len(head) < 2:
        return False
    method, window, flags = head[0] & 15, head[0] >> 4, head[1]
    whole = (head[0] << 8 | flags) % 31 == 0
    return method == _DEFLATE and window <= _WIDEST_WINDOW and whole and not flags & _WITH_DICTIONARY


class InflateError(Exception):
    """What is wrong with a compressed stream."""

    def of(self, source: Source, record: int, start: int) -> DataError:
        """The error that says so of the first record that is not known to be whole."""
        return source.damaged(
            "cannot be decompressed",
            record,
            start,
            given=str(self),
            expected=f"a whole {source.compression} stream of records",
            hint="copy or convert the file again",
        )


class Inflated:
    """What a compressed file holds, read from its start to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._blocks = inflated_blocks(file)
        self._block, self._place = b"", 0

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end.

        Raises:
            InflateError: the stream is damaged or cut short.
        """
        parts = []
        while size > 0:
            if self._place == len(self._block):
                self._block, self._place = next(self._blocks, b""), 0
                if not self._block:
                    break
            parts.append(self._block[self._place : self._place + size])
            self._place += len(parts[-1])
            size -= len(parts[-1])
        return b"".join(parts)


def inflated_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield what a compressed file holds, in blocks of at most 64 KiB: however far it expands, no more is in memory.

    Raises:
        InflateError: the stream is damaged or cut short.
    """
    stream = zlib.decompressobj(_ANY_WINDOW_BITS)
    data = b""
    while True:
        data = data or file.read(_BLOCK_BYTES)
        if stream.eof:
            if not data:
                return
            stream = zlib.decompressobj(_ANY_WINDOW_BITS)
        try:
            block = stream.decompress(data, _BLOCK_BYTES)
        except zlib.error as error:
            raise InflateError(str(error)) from None
        if block:
            yield block
        elif not data and not stream.eof:
            raise InflateError("the compressed stream ends before its end mark")
        data = stream.unused_data if stream.eof else stream.unconsumed_tail


def deflating(compression: Compression | None) -> tuple[Callable[[bytes], bytes], Callable[[], bytes]]:
    """What compresses the next bytes of a file, and what gives its last ones."""
    if compression is None:
        return bytes, bytes
    stream = zlib.compressobj(wbits=_WINDOW_BITS[compression])
    return stream.compress, stream.flush
