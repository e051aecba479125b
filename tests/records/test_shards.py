from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from object_server import Fault, FaultyProxy

from lockstep.errors import DataError, InputError, StoreRefusedError
from lockstep.records.shards import check_local, expand_braces, find_shards
from lockstep.storage.remote_path import AnyPath, DataPath, RemotePath


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def named(paths: Sequence[AnyPath]) -> list[str]:
    return [path.name for path in paths]


SHARDS = [f"train-{number:05}-of-00012" for number in range(12)]


def test_the_files_of_a_pattern_come_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b.tfrecord", "a.tfrecord", "c.txt", ".hidden.tfrecord", ".lockstep-index/a.tfrecord")
    (tmp_path / "folder.tfrecord").mkdir()
    assert named(find_shards(f"{tmp_path}/*.tfrecord")) == ["a.tfrecord", "b.tfrecord"]
    assert named(find_shards(tmp_path / "[bc].*")) == ["b.tfrecord", "c.txt"]
    assert named(find_shards([f"{tmp_path}/*.txt", tmp_path / "a.tfrecord"])) == ["c.txt", "a.tfrecord"]
    assert named(find_shards(f"{tmp_path}/**/?.txt")) == ["c.txt"]


def test_a_path_without_a_pattern_is_the_file_itself(tmp_path: Path) -> None:
    touch(tmp_path, "train[1]*")
    assert find_shards(tmp_path / "train[1]*") == [tmp_path / "train[1]*"]
    assert find_shards(str(tmp_path / "none")) == [tmp_path / "none"]


@pytest.mark.parametrize("pattern", ["train-*", "train-?????-of-00012", "*"])
def test_all_shards_of_a_set(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path, *SHARDS, "validation-00000-of-00001")
    assert set(SHARDS) <= set(named(find_shards(tmp_path / pattern)))


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ([7], "train-00007-of-00012"),
        ([0, 11], "train-00000-of-00012, train-00011-of-00012"),
        (range(1, 7), ", ".join(SHARDS[1:6]) + ", ..."),
    ],
)
def test_missing_shards_are_named(tmp_path: Path, absent: list[int], said: str) -> None:
    touch(tmp_path, *(name for number, name in enumerate(SHARDS) if number not in absent))
    with pytest.raises(DataError) as caught:
        find_shards(f"{tmp_path}/train-*")
    assert caught.value.what == f"Shards are missing in {tmp_path}: {said}"
    assert caught.value.given == f"{12 - len(absent)} files that are named -of-00012"
    assert caught.value.expected == "all 12 of them, or those that train-* stands for"
    assert caught.value.hint == "copy the missing ones, or name fewer by the pattern, such as train-0000?-of-00128"


def test_a_pattern_may_stand_for_some_shards(tmp_path: Path) -> None:
    touch(tmp_path, *SHARDS[:10])
    assert named(find_shards(tmp_path / "train-0000?-of-00012")) == SHARDS[:10]
    (tmp_path / SHARDS[3]).unlink()
    with pytest.raises(DataError, match=f"missing in {tmp_path}: {SHARDS[3]}\n"):
        find_shards(tmp_path / "train-0000?-of-00012")
    with pytest.raises(DataError, match=SHARDS[3]):
        find_shards(tmp_path / "train-*[3-5]-of-*")


@pytest.mark.parametrize("name", ["data_{}-of-00002.gz", "2024-{}-of-00002", "x{}-of-00002.tfrecord"])
def test_shards_by_other_names(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name.format("00001"))
    with pytest.raises(DataError) as caught:
        find_shards(tmp_path / "*")
    assert caught.value.what.endswith(": " + name.format("00000"))


def test_numbers_without_leading_zeros(tmp_path: Path) -> None:
    touch(tmp_path, *(f"part-{number}-of-12" for number in range(12) if number != 10))
    with pytest.raises(DataError, match=r"missing in .*: part-10-of-12\n"):
        find_shards(tmp_path / "part-*")


@pytest.mark.parametrize("name", ["train-00000-of-99999999999", "a-of-b", "123456789-of-00002"])
def test_names_that_only_look_like_shards(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)
    assert named(find_shards(tmp_path / "*")) == [name]


def test_each_folder_has_its_own_set(tmp_path: Path) -> None:
    touch(tmp_path, "a/x-0-of-1", "b/x-0-of-2", "b/x-1-of-2")
    assert len(find_shards(tmp_path / "*" / "x-*")) == 3


def test_two_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "x-0-of-1", "x-0-of-2", "x-1-of-2", "y-0-of-1")
    with pytest.raises(DataError) as caught:
        find_shards(tmp_path / "*")
    assert caught.value.what == f"There are two sets of shards in {tmp_path}."
    assert caught.value.given == "files that are named -of-1, and x-0-of-2"
    assert caught.value.expected == "one set: the other may hold the same examples"
    assert caught.value.hint == "name one by the pattern, such as *-of-2*"
    assert len(find_shards(tmp_path / "x-*-of-2")) == 2


def test_no_file_of_a_pattern_says_what_is_there(tmp_path: Path) -> None:
    touch(tmp_path, *"abcdef")
    with pytest.raises(DataError) as caught:
        find_shards(tmp_path / "train-*")
    assert caught.value.what == f"No file is named like {tmp_path}/train-*"
    assert caught.value.given == "a folder that holds a, b, c, d, e and 1 more"
    assert (caught.value.expected, caught.value.hint) == ("one file or more", "check the pattern")
    with pytest.raises(DataError, match=rf"given: +there is no folder {tmp_path}/none\n"):
        find_shards(tmp_path / "none" / "train-*")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_shards([tmp_path])
    assert caught.value.what == f"{tmp_path} is a folder."
    assert caught.value.given == "a folder that holds nothing"
    assert caught.value.expected == "a file, or a pattern of files"
    assert caught.value.hint == f"name its files, such as {tmp_path}/train-*"


@pytest.mark.parametrize(
    ("address", "scheme", "hint"),
    [
        ("s3://bucket/train-*", "s3", "mount the bucket (mount-s3 BUCKET FOLDER), or copy it (aws s3 sync),"),
        ("gs://bucket/x", "gs", "mount the bucket (gcsfuse BUCKET FOLDER), or copy it (gcloud storage rsync),"),
        (Path("gs://bucket/x"), "gs", "mount the bucket (gcsfuse BUCKET FOLDER), or copy it (gcloud storage rsync),"),
        ("HDFS://x", "hdfs", "mount it, or copy it,"),
    ],
)
def test_an_address_is_refused_with_what_to_mount(address: str | Path, scheme: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        check_local(address)
    assert caught.value.what == f"{address} is not on this machine."
    assert caught.value.given == f"an address that begins with {scheme}:"
    assert caught.value.expected == "a path in the file system"
    assert caught.value.hint == f"{hint} and give the path of the folder"


UNUSABLE = {
    "too long": ("x" * 5000, "a path of 5000 bytes"),
    "a part too long": ("a/" + "é" * 150 + "/b*", "a part of 300 bytes"),
    "range": ("x" * 5000 + "{0..3}", "a path of 5006 bytes"),
    "zero": ("a\0b*", "a zero in it"),
    "half a character": ("a\ud800", "a character that no file name has"),
}


@pytest.mark.parametrize(("path", "given_"), UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("what", [find_shards, expand_braces, check_local])
def test_what_no_system_takes_for_a_path_is_refused(what: Callable[[str], object], path: str, given_: str) -> None:
    with pytest.raises(DataError) as caught:
        what(path)
    assert caught.value.what.endswith(" cannot be the path of a file.")
    assert len(caught.value.what) < 200
    assert caught.value.given == given_
    assert caught.value.expected == "at most 4095 bytes, at most 255 between slashes, and no zero"
    assert caught.value.hint == "check the path"


@pytest.mark.parametrize("path", [None, 5, b"x", [3]], ids=str)
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InputError, match=r"paths? is of the wrong type"):
        find_shards(path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{08..10}.tar", ["08.tar", "09.tar", "10.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{0..1}", ["0", "1"]),
        ("x{7..7}y", ["x7y"]),
        ("{1..002}", ["001", "002"]),
        ("{0..1}/{00..01}.tar", ["0/00.tar", "0/01.tar", "1/00.tar", "1/01.tar"]),
        ("{a,b}-{x..y}-{1..}", ["{a,b}-{x..y}-{1..}"]),
        (Path("in") / "{1..2}", ["in/1", "in/2"]),
    ],
    ids=str,
)
def test_a_range_stands_for_its_numbers(path: str | Path, expected: list[str]) -> None:
    assert expand_braces(path) == expected


def test_a_file_of_that_name_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "{0..1}.tar"
    path.touch()
    assert expand_braces(path) == [str(path)]


@pytest.mark.parametrize(
    ("path", "given_"),
    [
        ("{5..4}.tar", "a range that falls"),
        ("{0..1000000}.tar", "1000001 paths"),
        ("{0..1000}/{0..999}.tar", "1001000 paths"),
        ("{0..999999999999999999}.tar", "1000000000000000000 paths"),
    ],
)
def test_ranges_that_fall_or_are_too_long_are_refused(path: str, given_: str) -> None:
    with pytest.raises(DataError) as caught:
        expand_braces(path)
    assert caught.value.what == f"{path} cannot be expanded."
    assert caught.value.given == given_
    assert caught.value.expected == "ranges that rise, for at most 1000000 paths"
    assert "{000000..000999}" in caught.value.hint


# In an object store ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stored() -> DataPath:
    folder = DataPath(f"memory://{uuid.uuid4().hex}/data")
    for name in (*SHARDS, ".hidden-train", "other.tfrecord", "below/a.tfrecord"):
        (folder / name).write_bytes(name.encode())
    return folder


def test_files_of_a_store_are_found_by_pattern_and_range(stored: DataPath) -> None:
    assert named(find_shards(f"{stored}/train-*")) == SHARDS
    assert named(find_shards(f"{stored}/*train*")) == SHARDS
    assert named(find_shards(f"{stored}/**/*.tfrecord")) == ["a.tfrecord", "other.tfrecord"]
    assert named(find_shards([f"{stored}/train-0000[12]-of-*", stored / "other.tfrecord"])) == [
        *SHARDS[1:3],
        "other.tfrecord",
    ]
    assert named(find_shards(expand_braces(f"{stored}/train-{{00003..00005}}-of-00012"))) == SHARDS[3:6]
    assert find_shards(f"{stored}/train-*")[3].stat().st_size == len(SHARDS[3])


def test_what_is_not_whole_in_a_store_is_refused(stored: DataPath) -> None:
    (stored / SHARDS[4]).unlink()
    for wanted, what in {
        f"{stored}/train-*": f"Shards are missing in {stored}: {SHARDS[4]}",
        f"{stored}": f"{stored} is a folder.",
        f"{stored}/val-*": f"No file is named like {stored}/val-*",
    }.items():
        with pytest.raises(DataError) as caught:
            find_shards(wanted)
        assert caught.value.what == what
    with pytest.raises(DataError, match=rf"Files are missing in {stored}") as caught:
        find_shards(expand_braces(f"{stored}/train-{{00003..00005}}-of-00012"))
    assert caught.value.given == f"no {SHARDS[4]}"


def test_a_bucket_that_is_not_there_is_named(object_store: FaultyProxy) -> None:
    with pytest.raises(DataError) as caught:
        find_shards("s3://no-such-bucket/train-*")
    assert caught.value.given == "there is no bucket s3://no-such-bucket"


def test_a_bucket_without_rights_is_named(bucket: RemotePath, object_store: FaultyProxy) -> None:
    object_store.faults = [Fault("status", 100, method="", status=403)]
    with pytest.raises(StoreRefusedError) as caught:
        find_shards(f"{bucket}/train-*")
    assert caught.value.what == f"{bucket} may not be read."
    assert caught.value.exit_code == 2
