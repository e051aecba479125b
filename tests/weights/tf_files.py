"""Writes what TensorFlow's checkpoints consist of, for files that TensorFlow itself would not write."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import google_crc32c

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
RESTART_INTERVAL = 16


def varint(value: int) -> bytes:
    encoded = bytearray()
    value &= (1 << 64) - 1
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: int | bytes) -> bytes:
    """A field of protocol buffers: a varint, or bytes with their length."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def fixed32(number: int, value: int) -> bytes:
    return varint(number << 3 | 5) + struct.pack("<I", value)


def shape(*sizes: int) -> bytes:
    return b"".join(field(2, field(1, size)) for size in sizes)


def extents(*pairs: tuple[int, int]) -> bytes:
    """A TensorSliceProto; a length of -1 is all of the dimension."""
    return b"".join(field(1, field(1, start) + field(2, size) if size >= 0 else b"") for start, size in pairs)


def header(num_shards: int = 1, *, big_endian: bool = False, least_version: int = 0) -> bytes:
    return field(1, num_shards) + field(2, int(big_endian)) + field(3, field(1, 1) + field(2, least_version))


def entry(
    dtype: int,
    sizes: Iterable[int],
    *,
    data: bytes = b"",
    shard: int = 0,
    offset: int = 0,
    size: int | None = None,
    slices: Iterable[bytes] = (),
) -> bytes:
    """A BundleEntryProto, with the checksum of `data`."""
    place = field(3, shard) + field(4, offset) + field(5, len(data) if size is None else size)
    parts = b"".join(field(7, part) for part in slices)
    return field(1, dtype) + field(2, shape(*sizes)) + place + fixed32(6, masked_crc(data)) + parts


def masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def block(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    content, restarts, last = b"", [0], b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % RESTART_INTERVAL == 0:
            restarts = [*restarts, len(content)] if number else restarts
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return content + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(
    entries: Iterable[tuple[bytes, bytes]], *, per_block: int = 1000, compress: Callable[[bytes], bytes] | None = None
) -> bytes:
    """A table of these entries, which are sorted; each block compressed by Snappy, if `compress` does that."""
    rows, blocks = list(entries), []
    contents = b""
    for first in range(0, len(rows), per_block):
        rows_here = rows[first : first + per_block]
        handle, contents = added(contents, block(rows_here), compress)
        blocks.append((rows_here[-1][0], handle))
    metadata, contents = added(contents, block([]), compress)
    index, contents = added(contents, block(blocks), compress)
    return contents + (metadata + index).ljust(40, b"\0") + MAGIC


def added(contents: bytes, content: bytes, compress: Callable[[bytes], bytes] | None = None) -> tuple[bytes, bytes]:
    """The handle of a block, and the file with it at its end."""
    stored = compress(content) + b"\1" if compress else content + b"\0"
    handle = varint(len(contents)) + varint(len(stored) - 1)
    return handle, contents + stored + struct.pack("<I", masked_crc(stored))


def write_bundle(prefix: Path, entries: dict[bytes, bytes], data: bytes = b"", head: bytes | None = None) -> Path:
    """A bundle with one file of data."""
    rows = {b"": header() if head is None else head} | entries
    Path(f"{prefix}.index").write_bytes(table(sorted(rows.items())))
    Path(f"{prefix}.data-00000-of-00001").write_bytes(data)
    return prefix
