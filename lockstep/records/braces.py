"""Ranges in braces, as WebDataset's users write the names of shards: train-{000000..000999}.tar."""

from __future__ import annotations

import math
import os
import re
from itertools import product
from pathlib import Path

from lockstep.errors import DataError
from lockstep.records.shards import check_local

_RANGE = re.compile(r"\{(\d{1,18}\.\.\d{1,18})\}")
_MOST = 1_000_000


def expand_braces(path: str | Path) -> list[str]:
    """The paths that {first..last} in a path stands for, in order; the path itself where there is none.

    Of several ranges the last one runs fastest. A number has as many digits as the longer of the two, if one of these
    begins with a zero. A path that exists is itself, whatever characters it has.

    Raises:
        InputError: it is no path.
        DataError: a range falls, or the path stands for more than a million; or as `check_local`.
    """
    check_local(path)
    path = str(path)
    texts = _RANGE.split(path)  # in turn: what is not in a range, and what is
    if len(texts) == 1 or os.path.exists(path):  # noqa: PTH110 (that of pathlib raises where it may not look)
        return [path]
    spans = [tuple(map(int, text.split(".."))) for text in texts[1::2]]
    count = math.prod(max(0, last + 1 - first) for first, last in spans)
    if not 0 < count <= _MOST:
        raise DataError(
            f"{path} cannot be expanded.",
            given=f"{count} paths" if count else "a range that falls",
            expected=f"ranges that rise, for at most {_MOST} paths",
            hint="write the first shard's number, two dots and the last one's: {000000..000999}",
        )
    choices = [_numbers(text) if place % 2 else [text] for place, text in enumerate(texts)]
    return ["".join(parts) for parts in product(*choices)]


def _numbers(text: str) -> list[str]:
    """The numbers of a range."""
    first, last = text.split("..")
    is_padded = any(len(number) > 1 and number.startswith("0") for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 1
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
