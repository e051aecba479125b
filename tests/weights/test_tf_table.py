from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tf_files import MAGIC, added, block, masked_crc, table, varint

from lockstep.errors import CheckpointError
from lockstep.records.protobuf import MalformedError
from lockstep.weights.tf_table import Table, decompress

ENTRIES = {f"layer{number:03}/weights".encode(): bytes([number]) * number for number in range(50)}
# Long enough that what is stored by Snappy as one literal is what Snappy itself would not store.
LITERAL = 60


def as_literals(content: bytes) -> bytes:
    """Snappy without any copies."""
    pieces = [content[start : start + LITERAL] for start in range(0, len(content), LITERAL)]
    return varint(len(content)) + b"".join(bytes((len(piece) - 1 << 2,)) + piece for piece in pieces)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.ckpt"


@given(
    entries=st.dictionaries(st.binary(max_size=6), st.binary(max_size=300), max_size=40),
    per_block=st.integers(1, 50),
    is_compressed=st.booleans(),
)
@settings(max_examples=50)
def test_entries_of_a_table_are_found(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[bytes, bytes], per_block: int, is_compressed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.table"
    compress = as_literals if is_compressed else None
    path.write_bytes(table(sorted(entries.items()), per_block=per_block, compress=compress))
    found = Table(path)
    assert [(key, bytes(value)) for key, value in found.items()] == sorted(entries.items())
    for key in entries:
        value = found.get(key)
        assert value is not None
        assert bytes(value) == entries[key]


@pytest.mark.parametrize("key", [b"", b"layer", b"layer010/weightt", b"z"])
def test_a_key_that_is_not_there_has_no_value(path: Path, key: bytes) -> None:
    path.write_bytes(table(ENTRIES.items(), per_block=7))
    assert Table(path).get(key) is None


def test_opening_reads_no_entries(path: Path) -> None:
    content = bytearray(table(ENTRIES.items(), per_block=25))
    content[40] ^= 1  # in the first of two blocks
    path.write_bytes(content)
    found = Table(path)
    assert found.get(b"layer049/weights") == bytes([49]) * 49
    with pytest.raises(CheckpointError, match="a block with the checksum 0x"):
        found.get(b"layer001/weights")


def with_blocks(*blocks: bytes, compression: int = 0) -> bytes:
    """A file of these blocks with a true index of them."""
    handles, contents = [], b""
    for number, content in enumerate(blocks):
        stored = content + bytes((compression,))
        handles.append((bytes([65 + number]), varint(len(contents)) + varint(len(content))))
        contents += stored + struct.pack("<I", masked_crc(stored))
    return with_index(contents, handles)


def with_index(contents: bytes, handles: list[tuple[bytes, bytes]]) -> bytes:
    index, contents = added(contents, block(handles))
    return contents + (varint(0) * 2 + index).ljust(40, b"\0") + MAGIC


def restarts(count: int = 1) -> bytes:
    return struct.pack("<II", 0, count)


# Each entry shares all of a long key with the one before, in 4 bytes.
MANY_KEYS = varint(0) + varint(2000) + varint(0) + bytes(2000) + (varint(2000) + varint(1) + varint(0) + b"k") * 2000
VALID = with_blocks(block([(b"A", b"one")]), block([(b"B", b"two")]))


@pytest.mark.parametrize(
    ("content", "given_"),
    [
        (b"", "no footer of 48 bytes, but the end at byte 0 of the file"),
        (b"x" * 47, "no footer of 48 bytes, but the end at byte 47 of the file"),
        (VALID[:-1], f"a footer without {MAGIC.hex(' ')} at byte {len(VALID) - 49} of the file"),
        (b"\xff" * 40 + MAGIC, "a number without an end at byte 0 of the file"),
        ((varint(0) * 2 + varint(9) + varint(1 << 40)).ljust(40, b"\0") + MAGIC, "a block of 1099511627776 bytes"),
        (with_blocks(b"", compression=2), "a block with the unknown compression 2 at byte 0 of the file"),
        (with_blocks(b"\7", compression=1), "0 bytes, where 7 are announced, at byte 1"),
        (with_blocks(b"abc"), "more restarts than there is room for at byte 3 of the block at byte 0"),
        (with_blocks(restarts(9)), "more restarts than there is room for at byte 8 of the block at byte 0"),
        (with_blocks(varint(1) + varint(0) * 2 + restarts()), "with more of the last key than there is, at byte 0"),
        (with_blocks(varint(0) + varint(1 << 60) + varint(0) + restarts()), "an entry longer than its block"),
        (with_blocks(MANY_KEYS + restarts()), "keys of more than 32 times the bytes of their block"),
        (with_index(VALID, [(b"A", b"\x80")]), "a number without an end"),
        (with_index(VALID, [(b"A", varint(1 << 30) + varint(3))]), "a block that is too long, or out of turn,"),
        (with_index(VALID, [(b"A", varint(0) + varint(3)), (b"B", varint(1) + varint(3))]), "out of turn, at byte 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_tables_are_refused(path: Path, content: bytes, given_: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        list(Table(path).items())
    assert caught.value.what == f"{path} is damaged or cut short, or is no table of TensorFlow's."
    assert given_ in caught.value.given
    assert caught.value.expected == "blocks of keys and values, each with its checksum, and at the end where they are"
    assert caught.value.hint == "copy the checkpoint again"


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Table(path)
    assert caught.value.what == f"{path} cannot be read."
    assert caught.value.given == "FileNotFoundError: No such file or directory"


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
def test_compressed_blocks_are_decompressed(block: tuple[bytes, bytes]) -> None:
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
