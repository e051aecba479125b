"""Batches sliced from records that share one layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.errors import DataError
from lockstep.records.example import serialize_example
from lockstep.records.template import Field, Integer, Pixels, Template, read_each

FIELDS: dict[str, Field] = {"image": Pixels("pixels", (1, 2)), "label": Integer("class")}


def record(pixels: bytes, label: int) -> bytes:
    return serialize_example({"pixels": [pixels], "class": np.array([label])})


def rows(*records: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.stack([np.frombuffer(each, np.uint8) for each in records])


def test_a_template_reads_what_parsing_reads() -> None:
    records = [record(b"ab", 3), record(b"cd", 7)]
    fields = Template(records[0], FIELDS, "The first").read(rows(*records))
    assert fields is not None
    expected = read_each([(each, "A record") for each in records], FIELDS)
    assert all(torch.equal(fields[name], expected[name]) for name in FIELDS)
    assert fields["image"].tolist() == [[[97, 98]], [[99, 100]]]
    assert fields["label"].tolist() == [3, 7]


def test_numbers_of_several_bytes_are_read() -> None:
    fields = Template(record(b"ab", 300), FIELDS, "The first").read(rows(record(b"ab", 16_383), record(b"ab", 128)))
    assert fields is not None
    assert fields["label"].tolist() == [16_383, 128]


def test_a_record_with_another_layout_is_not_sliced() -> None:
    template = Template(record(b"ab", 3), FIELDS, "The first")
    assert template.read(rows(record(b"ab", 3).replace(b"class", b"clasp"))) is None


@pytest.mark.parametrize("pixels", [b"a", b"abc"])
def test_a_value_of_another_size_is_refused(pixels: bytes) -> None:
    with pytest.raises(DataError, match="A record has no usable feature 'pixels'"):
        read_each([(record(pixels, 1), "A record")], FIELDS)
