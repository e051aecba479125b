"""The part of a checkpoint that is no tensor, as JSON that comes back as it went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lockstep.errors import CheckpointError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


def encode_values(values: Mapping[str, JSON]) -> bytes:
    """The bytes of `values.json`.

    Raises:
        CheckpointError: a value that JSON does not give back as it was; it is named.
    """
    for name, value in values.items():
        if not comes_back(value):
            raise CheckpointError(
                f"The value {name!r} cannot be saved as JSON.",
                given=repr(value)[:200],
                expected="None, bool, int, finite float, str, and lists and dicts (with str as keys) of these",
                hint="save tuples and arrays as lists, and leave out what is not a number",
            )
    return (json.dumps(dict(values), indent=1) + "\n").encode()


def decode_values(data: bytes) -> dict[str, Any]:
    """What was in `values.json`.

    Raises:
        ValueError: the bytes are no JSON object.
    """
    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def comes_back(value: JSON) -> bool:
    """Whether JSON gives a value back as it was."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
