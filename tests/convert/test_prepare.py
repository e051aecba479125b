from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.convert.prepare import Preparation, prepare, prepared_record
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError, InputError
from lockstep.records.example import serialize_example
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import Compression, write_records

PHOTO = (Path(__file__).parent.parent / "fixtures" / "images" / "hopper.jpg").read_bytes()
RECORDS = [serialize_example({"image/encoded": [PHOTO], "image/class/text": [b"%d" % i]}) for i in range(5)]
SMALL = Preparation(16)
ALONE = Settings(num_processes=1)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A pattern of two shards, of three records and of two."""
    write_records(tmp_path / "in" / "train-00000-of-00002", RECORDS[:3])
    write_records(tmp_path / "in" / "train-00001-of-00002", RECORDS[3:])
    return tmp_path / "in" / "train-*"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_there_are_as_many_shards_with_all_records_in_their_order(shards: Path, tmp_path: Path) -> None:
    done = prepare(shards, tmp_path / "out", SMALL, settings=ALONE)
    files = contents(tmp_path / "out")
    assert sorted(files) == ["train-00000-of-00002", "train-00001-of-00002"]
    found = RecordFiles(tmp_path / "out" / "train-*")
    assert [found.read(i) for i in range(len(found))] == [prepared_record(record, SMALL) for record in RECORDS]
    assert (done.summary.num_records, done.summary.num_bytes) == (5, sum(map(len, files.values())))
    assert done.num_bytes_before == sum(map(len, contents(shards.parent).values()))


def test_processes_write_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    prepare(shards, tmp_path / "one", SMALL, settings=ALONE)
    prepare(shards, tmp_path / "two", SMALL, settings=Settings(num_processes=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "compression", "base", "written"),
    [
        ("pets.record", None, None, "pets-00000-of-00001"),
        ("data-00000-of-00001.gz", "gzip", None, "data-00000-of-00001"),
        ("pets.record", None, "val", "val-00000-of-00001"),
    ],
    ids=["no shard", "compressed", "named"],
)
def test_shards_keep_their_name(
    name: str, compression: Compression | None, base: str | None, written: str, tmp_path: Path
) -> None:
    write_records(tmp_path / "in" / name, RECORDS[:1], compression)
    prepare(tmp_path / "in" / name, tmp_path / "out", SMALL, base=base, settings=ALONE)
    assert contents(tmp_path / "out").keys() == {written}


def test_shards_of_two_names_need_one(tmp_path: Path) -> None:
    paths = [tmp_path / "in" / "a.record", tmp_path / "in" / "b.record"]
    for path in paths:
        write_records(path, RECORDS[:1])
    with pytest.raises(InputError) as caught:
        prepare(paths, tmp_path / "out", SMALL, settings=ALONE)
    assert caught.value.what == "The shards have no name in common."
    assert caught.value.given == "a, b"
    assert prepare(paths, tmp_path / "out", SMALL, base="both", settings=ALONE).summary.num_shards == 2


def test_the_folder_of_the_shards_is_refused(shards: Path, tmp_path: Path) -> None:
    before = contents(shards.parent)
    link = tmp_path / "link"
    link.symlink_to(shards.parent)
    for output in (shards.parent, link):
        with pytest.raises(InputError) as caught:
            prepare(shards, output, SMALL, settings=ALONE)
        assert caught.value.what == "Prepared shards cannot be written among those that they are made of."
        assert caught.value.given == f"the folder {output}, which holds train-00000-of-00002"
    assert contents(shards.parent) == before


def test_another_preparation_and_other_shards_are_another_conversion(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    prepare(shards, output, SMALL, settings=ALONE)
    assert prepare(shards, output, SMALL, settings=ALONE).summary.num_kept == 2
    with pytest.raises(DataError, match="There are shards in"):
        prepare(shards, output, Preparation(32), settings=ALONE)
    shutil.copytree(shards.parent, tmp_path / "copy")
    write_records(tmp_path / "copy" / "train-00001-of-00002", RECORDS[:2])
    with pytest.raises(DataError, match="There are shards in"):
        prepare(tmp_path / "copy" / "train-*", output, SMALL, settings=ALONE)


def test_a_record_that_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.record"
    write_records(path, [RECORDS[0], serialize_example({"label": [b"no image"]})])
    with pytest.raises(DataError) as caught:
        prepare(path, tmp_path / "out", SMALL, settings=ALONE)
    assert caught.value.what.startswith(f"Record 1 of {path}")
    assert contents(tmp_path / "out") == {}
