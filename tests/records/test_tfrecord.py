from __future__ import annotations

import gzip
import io
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import DataError, InputError
from lockstep.records.tfrecord import (
    Compression,
    Inflated,
    InflateError,
    RecordSource,
    compression_of,
    frame,
    inflated_blocks,
    write_records,
)

SOURCE = RecordSource(Path("x"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None),
        (frame(b"payload"), None),
        (frame(b"p" * 0x9C78), None),  # its length begins as zlib does
        (gzip.compress(b"", mtime=0), "gzip"),
        (gzip.compress(b"payload", mtime=0), "gzip"),
        (zlib.compress(b""), "zlib"),
        (zlib.compress(b"payload", 0), "zlib"),
        (zlib.compress(b"payload", 9), "zlib"),
        (zlib.compress(b"payload", wbits=9), "zlib"),
        (b"\x1f", "gzip"),
        (frame(b"payload")[:11], None),
    ],
)
def test_a_file_is_known_by_its_first_bytes(data: bytes, expected: Compression | None) -> None:
    assert compression_of(data[:12], SOURCE) == expected


@pytest.mark.parametrize("data", [b"BZh91AY&SY and more", b"\x28\xb5\x2f\xfd zstandard", b"\x1f\x8b\x07 no deflate"])
def test_an_unknown_compression_is_an_invalid_header(data: bytes) -> None:
    with pytest.raises(DataError, match="Record 0 of x, at byte 0, has no valid header"):
        compression_of(data[:12], SOURCE)


def test_a_bomb_is_given_out_in_small_blocks() -> None:
    bomb = zlib.compress(bytes(10**7), 9)
    blocks = list(inflated_blocks(io.BytesIO(bomb)))
    assert sum(map(len, blocks)) == 10**7
    assert max(map(len, blocks)) <= 1 << 16


@pytest.mark.parametrize("level", [0, 1, 9])
def test_what_is_read_in_pieces_is_the_whole(level: int) -> None:
    draw = random.Random(level)
    data = draw.randbytes(200_000) + bytes(300_000)
    stream = Inflated(io.BytesIO(gzip.compress(data, level)))
    pieces = []
    while piece := stream.read(draw.choice([1, 12, 70_000])):
        pieces.append(piece)
    assert b"".join(pieces) == data
    assert stream.read(1) == b""


def test_streams_may_follow_one_another_but_nothing_else() -> None:
    streams = [gzip.compress(b"a"), zlib.compress(b"b"), zlib.compress(b""), gzip.compress(b"c")]
    assert b"".join(inflated_blocks(io.BytesIO(b"".join(streams)))) == b"abc"
    blocks = inflated_blocks(io.BytesIO(streams[0] + b"garbage"))
    assert next(blocks) == b"a"
    with pytest.raises(InflateError, match="Error -3"):
        next(blocks)


def test_a_stream_that_needs_a_dictionary_is_refused() -> None:
    stream = zlib.compressobj(zdict=b"words")
    data = stream.compress(b"some words") + stream.flush()
    with pytest.raises(DataError, match="has no valid header"):
        compression_of(data[:12], SOURCE)


@pytest.mark.parametrize(
    ("payloads", "given", "hint"),
    [
        (b"abc", "payloads is bytes", "write [payload] for a file of one record"),
        ("abc", "payloads is str", "write [payload] for a file of one record"),
        (3, "payloads is int", "write [payload] for a file of one record"),
        ([b"a", "b"], "payloads[1] is str", "encode it, as text.encode() or example.SerializeToString() do"),
        ([1], "payloads[0] is int", "encode it, as text.encode() or example.SerializeToString() do"),
        ([bytearray(b"a")], "payloads[0] is bytearray", "write bytes(payload)"),
        (
            [(1, b"a")],
            "payloads[0] is tuple",
            "take the second value of each pair of read_all: (payload for _, payload in read_all(path))",
        ),
    ],
)
def test_records_that_are_no_bytes_are_refused_and_nothing_is_left(
    tmp_path: Path, payloads: Any, given: str, hint: str
) -> None:
    with pytest.raises(InputError) as refusal:
        write_records(tmp_path / "new" / "records", payloads)
    assert (refusal.value.given, refusal.value.hint) == (given, hint)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
