"""TFRecord files that TensorFlow wrote: `make_records_golden.py` says how."""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.records.example import (
    parse_example,
    parse_sequence_example,
    serialize_example,
    serialize_sequence_example,
)
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import Compression, read_all, write_records

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "records_golden.json").read_text())
FILES: dict[str, Compression | None] = {
    "records_golden.tfrecord": None,
    "records_golden.gz": "gzip",
    "records_golden.zlib": "zlib",
    "sequences_golden.tfrecord": None,
}


def as_json(values: Any) -> dict[str, Any]:
    if isinstance(values, list):
        return {"bytes_list": [value.hex() for value in values]}
    if values.dtype == np.int64:
        return {"int64_list": values.tolist()}
    assert values.dtype == np.float32
    return {"float_list": [value.astype("<f4").tobytes().hex() for value in values]}


def from_json(values: dict[str, Any]) -> Any:
    ((kind, held),) = values.items()
    if kind == "int64_list":
        return np.array(held, dtype=np.int64)
    data = [bytes.fromhex(value) for value in held]
    return data if kind == "bytes_list" else np.frombuffer(b"".join(data), dtype="<f4").astype(np.float32)


def golden_messages(name: str) -> list[bytes]:
    """What TensorFlow serialised, serialised by us."""
    if name.startswith("records"):
        return [
            serialize_example({key: from_json(value) for key, value in each.items()}) for each in GOLDEN["examples"]
        ]
    return [
        serialize_sequence_example(
            {key: from_json(value) for key, value in each["context"].items()},
            {key: [from_json(step) for step in steps] for key, steps in each["feature_lists"].items()},
        )
        for each in GOLDEN["sequences"]
    ]


@pytest.mark.parametrize("name", FILES)
def test_tensorflows_records_are_read_in_turn_and_in_any_order(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copy(HERE / name, path)
    files = RecordFiles(path)
    assert files.files[0].index.compression == FILES[name]
    assert [files.read(index) for index in range(len(files))] == [record for _, record in read_all(path)]
    assert len(files) == (2 if name.startswith("sequences") else 3)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("records")])
def test_tensorflows_examples_have_the_values_that_it_finds(name: str) -> None:
    parsed = [parse_example(record) for _, record in read_all(HERE / name)]
    assert [{key: as_json(value) for key, value in each.items()} for each in parsed] == GOLDEN["examples"]


def test_tensorflows_sequence_examples_have_the_values_that_it_finds() -> None:
    parsed = [parse_sequence_example(record) for _, record in read_all(HERE / "sequences_golden.tfrecord")]
    found = [
        {
            "context": {key: as_json(value) for key, value in each.context.items()},
            "feature_lists": {key: [as_json(step) for step in steps] for key, steps in each.feature_lists.items()},
        }
        for each in parsed
    ]
    assert found == GOLDEN["sequences"]


@pytest.mark.parametrize("name", FILES)
def test_what_we_write_of_these_values_are_tensorflows_bytes(name: str, tmp_path: Path) -> None:
    write_records(tmp_path / name, golden_messages(name), FILES[name])
    inflate = {None: bytes, "gzip": gzip.decompress, "zlib": zlib.decompress}[FILES[name]]
    assert inflate((tmp_path / name).read_bytes()) == inflate((HERE / name).read_bytes())
