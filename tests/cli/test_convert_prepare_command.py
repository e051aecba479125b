from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from lockstep.cli.convert import CONVERTERS
from lockstep.convert.prepare import Preparation, prepared_record
from lockstep.errors import DataError, InputError
from lockstep.listing import format_size
from lockstep.records.example import serialize_example
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import write_records

PHOTO = (Path(__file__).parent.parent / "fixtures" / "images" / "hopper.jpg").read_bytes()
RECORDS = [serialize_example({"image/encoded": [PHOTO], "image/class/text": [b"%d" % i]}) for i in range(3)]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "train-00000-of-00001"
    write_records(path, RECORDS)
    return path


def prepare(*words: object) -> None:
    command = argparse.ArgumentParser()
    CONVERTERS["prepare"].add_arguments(command)
    CONVERTERS["prepare"].run(command.parse_args([*map(str, words), "--processes", "1"]))


def records_in(path: Path) -> list[bytes]:
    records = RecordFiles(path)
    return [records.read(index) for index in range(len(records))]


@pytest.mark.parametrize(
    ("words", "preparation"),
    [
        ([], Preparation(320, 90, "420")),
        (["--short-side", "16", "--quality", "50", "--subsampling", "444"], Preparation(16, 50, "444")),
    ],
    ids=["default", "asked for"],
)
def test_images_are_prepared_as_the_flags_say(
    words: list[str], preparation: Preparation, shard: Path, tmp_path: Path
) -> None:
    prepare(shard, "--to", tmp_path / "out", *words)
    found = records_in(tmp_path / "out" / "train-00000-of-00001")
    assert found == [prepared_record(record, preparation) for record in RECORDS]


def test_sizes_before_and_after_are_told(shard: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstep"):
        prepare(shard, "--to", tmp_path / "out", "--short-side", "16")
    before, after = (path.stat().st_size for path in (shard, tmp_path / "out" / shard.name))
    share = f"{100 * after / before:.0f} %"
    name = "short_side=16 quality=90 420"
    assert caplog.messages[-1] == f"{name}: {format_size(before)} before, {format_size(after)} after ({share})"


def test_shards_may_be_called_otherwise(shard: Path, tmp_path: Path) -> None:
    prepare(shard, "--to", tmp_path / "out", "--name", "small")
    assert (tmp_path / "out" / "small-00000-of-00001").exists()


def test_what_is_there_is_written_over_when_asked(shard: Path, tmp_path: Path) -> None:
    prepare(shard, "--to", tmp_path / "out")
    other = [shard, "--to", tmp_path / "out", "--short-side", 16]
    with pytest.raises(DataError, match="There are shards in"):
        prepare(*other)
    prepare(*other, "--force")
    assert records_in(tmp_path / "out" / shard.name)[0] == prepared_record(RECORDS[0], Preparation(16))


def test_a_flag_out_of_range_is_refused(shard: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quality is out of range"):
        prepare(shard, "--to", tmp_path / "out", "--quality", "0")
