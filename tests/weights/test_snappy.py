from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tf_files import varint

from lockstep.records.protobuf import MalformedError
from lockstep.weights.snappy import decompress

Copy = tuple[int, int, int]


def literal(content: bytes) -> bytes:
    size = len(content) - 1
    if size < 60:
        return bytes((size << 2,)) + content
    extra = (size.bit_length() + 7) // 8
    return bytes((59 + extra << 2,)) + size.to_bytes(extra, "little") + content


def copy(kind: int, offset: int, size: int) -> bytes:
    if kind == 1:
        return bytes((offset >> 8 << 5 | size - 4 << 2 | 1, offset & 255))
    return bytes((size - 1 << 2 | kind,)) + offset.to_bytes(2 if kind == 2 else 4, "little")


def repeated(content: bytearray, offset: int, size: int) -> None:
    for _ in range(size):
        content.append(content[-offset])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """What a block holds, and the block: literals of any length, and copies of all three kinds."""
    content, encoded = bytearray(), b""
    for _ in range(draw(st.integers(0, 8))):
        if content and draw(st.booleans()):
            kind = draw(st.integers(1, 3))
            least, most = (4, 11) if kind == 1 else (1, 64)
            size = draw(st.integers(least, most))
            offset = draw(st.integers(1, min(len(content), 2047 if kind == 1 else 65535)))
            encoded += copy(kind, offset, size)
            repeated(content, offset, size)
        else:
            added = draw(st.binary(min_size=1, max_size=20)) * draw(st.sampled_from([1, 3, 60, 300]))
            encoded += literal(added)
            content += added
    return bytes(content), varint(len(content)) + encoded


@given(blocks())
@settings(max_examples=50)
def test_what_was_compressed_comes_back(block: tuple[bytes, bytes]) -> None:
    content, encoded = block
    assert decompress(encoded) == content


@given(st.binary(max_size=60))
@settings(max_examples=50)
def test_any_bytes_are_a_small_block_or_malformed(data: bytes) -> None:
    with suppress(MalformedError):
        assert len(decompress(data)) <= 22 * len(data)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "a number without an end"),
        (varint(1 << 40) + literal(b"abc"), "1099511627776 bytes announced in 10"),
        (varint(3) + literal(b"abc")[:-1], "a literal longer than its block"),
        (varint(3) + bytes((61 << 2,)), "a literal longer than its block"),
        (varint(9) + literal(b"abcde") + copy(2, 6, 4), "a copy of what is not there"),
        (varint(9) + literal(b"abcde") + copy(2, 0, 4), "a copy of what is not there"),
        (varint(9) + literal(b"abcde") + copy(3, 5, 4)[:-1], "a copy without its offset"),
        (varint(8) + literal(b"abcde") + copy(2, 5, 4), "more than the 8 bytes announced"),
        (varint(10) + literal(b"abcde") + copy(2, 5, 4), "9 bytes, where 10 are announced,"),
    ],
    ids=str,
)
def test_malformed_blocks_are_refused(data: bytes, what: str) -> None:
    with pytest.raises(MalformedError) as caught:
        decompress(data)
    assert caught.value.what == what
