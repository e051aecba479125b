from __future__ import annotations

import math

import pytest

from lockstep.checkpoints.values import decode_values, encode_values
from lockstep.errors import CheckpointError


def test_json_comes_back() -> None:
    values = {
        "step": 3,
        "big": 2**70,
        "loss": 0.1 + 0.2,
        "tiny": 5e-324,
        "none": None,
        "flag": True,
        "text": 'ü"\n\ud800',
        "nested": {"list": [1, [2.5, {}]], "": []},
    }
    assert decode_values(encode_values(values)) == values


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ((1, 2), "(1, 2)"),
        ({1: "one"}, "{1: 'one'}"),
        ([math.nan], "[nan]"),
        (-math.inf, "-inf"),
        ({"deep": {2}}, "{'deep': {2}}"),
        (b"bytes", "b'bytes'"),
    ],
)
def test_what_would_come_back_otherwise_is_refused(value: object, given: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        encode_values({"fine": 1, "loader": value})
    assert str(raised.value) == (
        "The value 'loader' cannot be saved as JSON.\n"
        f"  given:    {given}\n"
        "  expected: None, bool, int, finite float, str, and lists and dicts (with str as keys) of these\n"
        "  hint:     save tuples and arrays as lists, and leave out what is not a number"
    )


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe\xfd"])
def test_other_bytes(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_values(data)
