from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.errors import DataError
from lockstep.readers.box_table import BoxTable
from lockstep.readers.open import open_source
from lockstep.readers.paths import annotations_at
from lockstep.records.open_files import content_of

HEADER = "filename,width,height,class,xmin,ymin,xmax,ymax\n"


def written(folder: Path, table: str, *images: str) -> Path:
    for name in images:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 4)).save(folder / name)
    (folder / "labels.csv").write_text(table)
    return folder / "labels.csv"


def test_columns_have_the_names_that_tools_give_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = "x1,Y1,x2,y2,Label,image_path,more\n2,1,4,3,dog,images/b.png,\n0,0,9,2,cat,b\n,,,,,a.png,\n"
    reader = open_source(written(tmp_path, table, "images/a.png", "images/b.png", "images/c.png").parent, truth=True)
    assert isinstance(reader, BoxTable)
    assert [reader.example_id(index) for index in range(len(reader))] == ["a.png", "b.png"]
    batch = reader.read_batch(np.arange(2))
    assert batch["class_text"] == [[], ["dog", "cat"]]
    assert batch["boxes"].values.tolist() == [[0.25, 0.25, 0.75, 0.5], [0, 0, 0.5, 1]]
    assert batch["truth_boxes"].values.tolist() == [[2, 1, 2, 2], [0, 0, 9, 2]]
    assert caplog.messages == [f"Not read in {tmp_path}/images, since no annotation names them: c.png"]


def test_a_column_with_gaps_has_whole_numbers_with_a_point(tmp_path: Path) -> None:
    table = f"{HEADER}a.png,8.0,4.0,cat,0.0,1.0,8.0,4.0\nb.png,,,,,,,\nc.png,16.0,4.0,cat,0.0,1.0,8.0,4.0\n"
    reader = BoxTable(written(tmp_path, table, "a.png", "b.png", "c.png"))
    assert reader.read_batch(np.arange(2))["boxes"].values.tolist() == [[0.25, 0, 1, 1]]
    with pytest.raises(DataError, match=r"c\.png is not of the size that its annotation is for"):
        reader.read_batch(np.array([2]))


def test_an_image_has_the_size_that_the_table_says(tmp_path: Path) -> None:
    reader = BoxTable(written(tmp_path, f"{HEADER}a.png,16,4,cat,0,0,8,4\n", "a.png"))
    with pytest.raises(DataError, match="is not of the size that its annotation is for"):
        reader.read_batch(np.array([0]))


@pytest.mark.parametrize(
    ("table", "given"),
    [
        (f"{HEADER}a.png,8,4,,0,0,8,4\n", "line 2: a.png,8,4,,0,0,8,4"),
        (f"{HEADER}a.png,8,4,cat,0,0,8,4\na.png,8,4,cat,0,0,8\n", "line 3: a.png,8,4,cat,0,0,8,"),
        (f"{HEADER}a.png,8,4,cat,0,nan,8,4\n", "line 2: a.png,8,4,cat,0,nan,8,4"),
        (f"{HEADER}a.png,8,4,cat,0,0,8,4\na.png,8,5,cat,0,0,8,4\n", "line 3: a.png,8,5,cat,0,0,8,4"),
        (f"{HEADER}a.png,0,4,cat,0,0,8,4\n", "line 2: a.png,0,4,cat,0,0,8,4"),
        (f"{HEADER}a.png,8.5,4,cat,0,0,8,4\n", "line 2: a.png,8.5,4,cat,0,0,8,4"),
        (f"{HEADER}a.png,inf,4,cat,0,0,8,4\n", "line 2: a.png,inf,4,cat,0,0,8,4"),
        (f"{HEADER}a.png,8,{2**64},cat,0,0,8,4\n", f"line 2: a.png,8,{2**64},cat,0,0,8,4"),
        (f"{HEADER}a.png,8,4,cat,0,0,0.5,1\n", "boxes whose edges are all 1 at most: shares"),
        (HEADER, "no line but the first"),
        ("filename,label\na.png,cat\n", "the columns filename, label"),
        ("", "the columns (none)"),
    ],
)
def test_what_is_no_box_is_named(tmp_path: Path, table: str, given: str) -> None:
    path = written(tmp_path, table, "a.png")
    with pytest.raises(DataError) as caught:
        BoxTable(path)
    assert (caught.value.what, caught.value.given) == (f"{path} does not say the boxes on images.", given)
    assert "filename,class,xmin,ymin,xmax,ymax" in str(caught.value.expected)


def test_images_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, f"{HEADER}a.png,8,4,cat,0,0,8,4\nb.png,8,4,cat,0,0,8,4\n", "a.png")
    with pytest.raises(DataError, match=r"names images that are not there\.\n.*1 of 2: b\.png"):
        BoxTable(path)


def test_a_name_that_is_in_the_folders_of_two_sets_is_refused_unless_the_table_says_which(tmp_path: Path) -> None:
    path = written(tmp_path, f"{HEADER}a.png,8,4,cat,0,0,8,4\n", "train/a.png", "test/a.png")
    with pytest.raises(DataError, match=r"labels\.csv does not say which images it names\.\n.*a\.png, in ") as caught:
        BoxTable(path)
    assert {f"{tmp_path}/train", f"{tmp_path}/test"} == {
        *str(caught.value.given).removeprefix("a.png, in ").split(" and in ")
    }
    for named in ("a.png", "a"):
        path.write_text(f"{HEADER}train/{named},8,4,cat,0,0,8,4\n")
        reader = BoxTable(path)
        assert reader.read_batch(np.array([0]))["image"][0].source == f"{tmp_path}/train/a.png"
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    path.write_text(f"{HEADER}a,8,4,cat,0,0,8,4\n")
    assert BoxTable(path).read_batch(np.array([0]))["image"][0].source == f"{tmp_path}/a.png"


def test_an_image_without_a_size_that_cannot_be_read_is_a_bad_example(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, f"{HEADER}a.png,,,cat,0,0,8,4\nb.png,,,dog,0,0,40,90\n", "a.png", "b.png")
    (tmp_path / "b.png").write_bytes(b"")
    reader = BoxTable(path)
    assert caplog.messages == [f"1 of 2 images in {tmp_path} cannot be read, and are bad examples: b.png"]
    assert reader.classes == {1: "cat", 2: "dog"}
    assert reader.read_batch(np.array([0]))["boxes"].values.tolist() == [[0, 0, 1, 1]]
    with pytest.raises(DataError, match=r"b\.png"):
        reader.read_batch(np.array([1]))


def test_what_a_table_is_of_is_seen_by_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "a.png,8,4,cat,0,0,8,4\n" * 100_000, "a.png")
    read: list[int | None] = []

    def noting(table: Path, most_bytes: int | None = None) -> bytes:
        read.append(most_bytes)
        return content_of(table, most_bytes)

    monkeypatch.setattr("lockstep.readers.label_tables.content_of", noting)
    found = annotations_at(tmp_path)
    assert found is not None
    assert (found.kind, found.place) == ("table", path)
    assert read == [1 << 16]
    assert content_of(path, 8) == HEADER[:8].encode()
