"""Splits by their names: in folders of Hugging Face's datasets, of the hub, of tables alone, and of TFDS."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.source import check_source
from lockstep.errors import DataError, InputError
from lockstep.readers.paths import check_there, class_folders, found_from
from lockstep.readers.split_folders import find_split

GOLDEN = Path(__file__).parents[1] / "golden" / "tables"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "tables")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tables" / "tfds"))
    return tmp_path / "tables"


def names(path: str | Path) -> list[str]:
    split = find_split(path)
    assert split is not None
    return [file.name for file in split.files]


def test_a_split_is_named_after_a_slash(tables: Path) -> None:
    assert names(tables / "saved" / "train") == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert names(tables / "hub" / "train") == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert names(tables / "hub" / "data" / "test") == ["test-00000-of-00001.parquet"]
    assert names("tfds:shapes/1.2.0/test") == ["shapes-test.tfrecord-00000-of-00001"]
    assert names(tables / "tfds" / "boxed") == ["boxed-train.tfrecord-00000-of-00001"]
    assert names(tables / "objects") == ["data-00000-of-00001.arrow"], "its only split"


def test_folders_of_tables_are_one_set_or_splits_by_their_names(tmp_path: Path) -> None:
    for name in ("part-0000.parquet", "part-0001.parquet", "_SUCCESS", ".part-0000.parquet"):
        (tmp_path / name).touch()
    assert names(tmp_path) == ["part-0000.parquet", "part-0001.parquet"]
    (tmp_path / "other").mkdir()
    for name in ("train.parquet", "validation.parquet"):
        (tmp_path / "other" / name).touch()
    assert names(tmp_path / "other" / "validation") == ["validation.parquet"]


def test_what_is_none_of_them_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "a.parquet").touch()
    for path in (tmp_path / "cat", tmp_path / "gone", tmp_path / "*.parquet", tmp_path / "a.parquet", "a" * 5000):
        assert find_split(path) is None
    assert find_split(tmp_path / "cat" / "dog") is None


@pytest.mark.parametrize("split", ["test", "validation"])
def test_examples_held_out_are_not_taken_without_their_name(tmp_path: Path, split: str) -> None:
    (tmp_path / f"{split}-00000-of-00001.parquet").touch()
    assert names(tmp_path / split)
    with pytest.raises(DataError, match=f"has no split to train on(.|\n)*the split {split}(.|\n)*{tmp_path}/{split}"):
        find_split(f"{tmp_path}/")


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    for name in (
        "test-00000-of-00001-3f.parquet",
        "train-00000-of-00003-ab.parquet",
        "train-00002-of-00003-cd.parquet",
    ):
        (tmp_path / name).touch()
    assert names(tmp_path / "test") == ["test-00000-of-00001-3f.parquet"]
    with pytest.raises(DataError, match=r"Files are missing(.|\n)*none with the number 00001(.|\n)*all 3"):
        find_split(tmp_path / "train")
    (tmp_path / "train-00001-of-00003-ef.parquet").touch()
    assert len(names(tmp_path / "train")) == 3
    (tmp_path / "train-00001-of-00002.parquet").touch()
    with pytest.raises(DataError, match=r"two sets of shards(.|\n)*-of-00002 and -of-00003"):
        find_split(tmp_path / "train")


def test_a_missing_file_of_tfds_is_told(tables: Path) -> None:
    (tables / "tfds" / "shapes" / "1.2.0" / names("tfds:shapes/1.2.0/train")[0]).unlink()
    assert names("tfds:shapes/1.2.0/test")
    with pytest.raises(DataError, match=r"Files are missing in (.|\n)*no shapes-train(.|\n)*its dataset_info\.json"):
        find_split("tfds:shapes/1.2.0/train")


@pytest.mark.parametrize("place", ["", "data/"])
def test_a_table_in_a_folder_of_other_data_does_not_hide_it(tmp_path: Path, place: str) -> None:
    for name in ("cat/0.png", "data/deep/1.png", f"{place}metadata.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert class_folders(tmp_path) == ("cat", "data")
    (tmp_path / "data" / "deep" / "1.png").unlink()
    assert names(tmp_path) == ["metadata.parquet"], "not all folders are those of classes"
    for name in ("a.tar", "a.tfrecord", "Annotations"):
        (tmp_path / name).touch()
        assert find_split(tmp_path) is None
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("{}/saved", r"saved has several splits(.|\n)*train, test(.|\n)*name one: .*/saved/train"),
        ("{}/hub", r"hub has several splits"),
        ("{}/saved/val", r"names none of the splits(.|\n)*val(.|\n)*one of train, test"),
        ("{}/hub/traim", r"names none of the splits(.|\n)*traim(.|\n)*one of test, train"),
        ("tfds:shapes/1.2.0/dev", r"names none of the splits(.|\n)*name one: tfds:shapes/1\.2\.0/train"),
        ("tfds:none/1.0.0", r"There is no data set tfds:none/1\.0\.0(.|\n)*TFDS_DATA_DIR"),
        ("tfds:shapes/1.0.0", r"names none of the splits"),
    ],
)
def test_what_is_not_there_is_told(tables: Path, path: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        find_split(path.format(tables))


def test_of_two_versions_none_is_taken_by_itself(tables: Path) -> None:
    shutil.copytree(tables / "tfds" / "shapes" / "1.2.0", tables / "tfds" / "shapes" / "1.10.0")
    told = r"several versions of (.|\n)*1\.2\.0, 1\.10\.0 in (.|\n)*name one: {}/1\.10\.0"
    for path in ("tfds:shapes", str(tables / "tfds" / "shapes")):
        with pytest.raises(DataError, match=told.format(path)):
            find_split(path)
    with pytest.raises(DataError, match=r"several versions of (.|\n)*name one: tfds:shapes/1\.10\.0/train"):
        find_split("tfds:shapes/train")
    assert names("tfds:shapes/1.2.0/train")
    (tables / "tfds" / "shapes" / "1.10.0").rename(tables / "other")
    (tables / "tfds" / "shapes" / "1.2.0").rename(tables / "1.2.0")
    (tables / "tfds" / "shapes" / "config").mkdir()
    (tables / "1.2.0").rename(tables / "tfds" / "shapes" / "config" / "1.2.0")
    assert names("tfds:shapes/train") == names("tfds:shapes/config/1.2.0/train")
    shutil.copytree(tables / "tfds" / "shapes" / "config", tables / "tfds" / "shapes" / "other")
    with pytest.raises(
        DataError, match=r"several configurations of (.|\n)*config, other(.|\n)*tfds:shapes/other/train"
    ):
        find_split("tfds:shapes/train")
    assert names("tfds:shapes/other/train")


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("saved/train/state.json", lambda _: "{", "state.json cannot be read"),
        ("saved/train/state.json", lambda _: "{}", "does not say what the data is(.|\n)*no _data_files"),
        ("saved/train/state.json", lambda text: text.replace("data-", "../data-"), r"_data_files with '\.\./data-"),
        ("saved/train/state.json", lambda text: text.replace("data-", "more-"), "Files are missing(.|\n)*no more-0"),
        ("saved/dataset_dict.json", lambda _: '{"splits": ["/"]}', "splits with '/'"),
        ("tfds/shapes/1.2.0/dataset_info.json", lambda _: "[]", "does not say what the data is"),
        (
            "tfds/shapes/1.2.0/dataset_info.json",
            lambda text: text.replace('"tfrecord"', '"array_record"'),
            "files of array_record(.|\n)*TFRecord files",
        ),
        (
            "tfds/shapes/1.2.0/dataset_info.json",
            lambda text: text.replace("{DATASET}", "../x"),
            r"filepathTemplate with '\.\./x",
        ),
    ],
)
def test_what_folders_say_of_themselves_is_checked(
    tables: Path, file: str, change: Callable[[str], str], told: str
) -> None:
    (tables / file).write_text(change((tables / file).read_text()))
    folder = (tables / file).parent
    with pytest.raises(DataError, match=told):
        find_split(folder)


def test_recipes_and_commands_find_them(tables: Path) -> None:
    for path in (f"{tables}/saved/train", "tfds:shapes/1.2.0/train"):
        check_there(path)
        check_source(path)
    assert class_folders(tables / "objects") == ()
    assert found_from(tables, "saved/train") == f"{tables}/saved/train"
    with pytest.raises(DataError, match="There is no data set"):
        check_there("tfds:nothing")
    assert find_split(tables / "hub" / "traim.toml") is None
    with pytest.raises(DataError, match="names none of the splits"):
        check_source(f"{tables}/hub/dev")
    with pytest.raises(InputError, match="neither a recipe nor data"):
        check_source(f"{tables}/dev")


def test_no_library_of_theirs_is_read(tables: Path) -> None:
    info = json.loads((tables / "tfds" / "shapes" / "1.2.0" / "dataset_info.json").read_text())
    del info["fileFormat"], info["splits"][0]["filepathTemplate"]  # as older versions left them out
    (tables / "tfds" / "shapes" / "1.2.0" / "dataset_info.json").write_text(json.dumps(info))
    assert names("tfds:shapes/1.2.0/train") == ["shapes-train.tfrecord-00000-of-00001"]
