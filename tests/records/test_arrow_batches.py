"""What heads of record batches say of themselves, beside pyarrow; and heads that are damaged."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from lockstep.records.arrow_batches import batches_of_file, decoded_bytes


def parts_of(data: bytes, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
    return [data[max(0, offset) : offset + size] for size, offset in wanted]


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_rows_and_sizes_are_those_of_the_decoded_batches(tmp_path: Path, compression: str) -> None:
    numbers = np.random.default_rng(3).integers(0, 9, 1000)
    words = pa.array([f"{number}" * 9 for number in numbers])
    table = pa.table({"a": numbers, "b": words.dictionary_encode(), "c": [None if n else "x" for n in numbers]})
    feather.write_feather(table, tmp_path / "a", compression=compression, chunksize=300)
    data = (tmp_path / "a").read_bytes()
    dictionaries, batches = batches_of_file(lambda wanted: parts_of(data, wanted), len(data))
    with pa.ipc.open_file(tmp_path / "a") as file:
        read = [file.get_batch(number) for number in range(file.num_record_batches)]
    assert [batch.head.num_rows for batch in batches] == [batch.num_rows for batch in read] == [300, 300, 300, 100]
    assert [batch.head.num_rows for batch in dictionaries] == [9]
    for found, batch in zip(batches, read, strict=True):
        size = decoded_bytes(lambda wanted: parts_of(data, wanted), found)
        dictionary = batch.column("b").dictionary.nbytes
        assert batch.nbytes - dictionary <= size <= batch.nbytes - dictionary + 64 * 8, "buffers are padded"


def test_damaged_heads_raise_what_the_reader_of_a_file_names(tmp_path: Path) -> None:
    feather.write_feather(pa.table({"a": ["x" * 50] * 20}), tmp_path / "a", compression="zstd", chunksize=10)
    data, random, told = (tmp_path / "a").read_bytes(), np.random.default_rng(3), 0
    for _ in range(500):
        changed = bytearray(data)
        for place in random.integers(0, len(data), 3).tolist():
            changed[place] = int(random.integers(256))
        try:
            for batch in batches_of_file(lambda wanted, found=changed: parts_of(bytes(found), wanted), len(data))[1]:
                assert decoded_bytes(lambda wanted, found=changed: parts_of(bytes(found), wanted), batch) >= 0
        except (ValueError, IndexError, struct.error):
            told += 1
    assert 50 < told < 500


def test_heads_that_overlap_are_not_read(tmp_path: Path) -> None:
    feather.write_feather(pa.table({"a": ["x" * 50] * 20}), tmp_path / "a", compression="zstd", chunksize=10)
    data, read = bytearray((tmp_path / "a").read_bytes()), list[tuple[int, int]]()
    for number in range(len(data) - 24):
        start, size, body = struct.unpack_from("<qi4xq", data, number)
        if data[start : start + 4] == b"\xff" * 4 and 0 < size < 1000 and 0 < body < 10_000 and 8 < start < len(data):
            struct.pack_into("<i", data, number + 8, len(data) - start)

    def parts(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        read.extend(wanted)
        return parts_of(bytes(data), wanted)

    with pytest.raises(ValueError, match="beyond the end"):
        batches_of_file(parts, len(data))
    assert sum(size for size, _ in read) <= len(data)
