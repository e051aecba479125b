"""What is kept beside the shards of a conversion, read and written without converting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.convert.conversion_state import Shard, SkippedItem, conversion_fingerprint, start_or_resume
from lockstep.errors import DataError

NAMES = ["train-00000-of-00002", "train-00001-of-00002"]


def test_the_fingerprint_tells_items_options_and_number_apart() -> None:
    conversions = [(["a"], {}, 1), (["b"], {}, 1), (["a"], {"x": 1}, 1), (["a"], {}, 2), (["a", "b"], {}, 1)]
    assert len({conversion_fingerprint(*each) for each in conversions}) == len(conversions)
    assert conversion_fingerprint(["a"], {"x": 1, "y": 2}, 1) == conversion_fingerprint(["a"], {"y": 2, "x": 1}, 1)


def test_finished_shards_are_found_again_while_they_have_their_size(tmp_path: Path) -> None:
    state = start_or_resume(tmp_path, "train", NAMES, "made of this", overwrite=False)
    shards = {number: Shard(1, 3, (SkippedItem("a", "odd"),)) for number in (0, 1)}
    for number, shard in shards.items():
        (tmp_path / NAMES[number]).write_bytes(b"123")
        state.add(number, shard)
    assert start_or_resume(tmp_path, "train", NAMES, "made of this", overwrite=False).finished == shards
    (tmp_path / NAMES[1]).write_bytes(b"1234")
    with pytest.raises(DataError, match="changed since it was finished with 3 bytes"):
        start_or_resume(tmp_path, "train", NAMES, "made of this", overwrite=False)
    assert start_or_resume(tmp_path, "train", NAMES, "made of this", overwrite=True).finished == {0: shards[0]}
