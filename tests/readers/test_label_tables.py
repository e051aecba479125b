from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.errors import DataError
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.open import open_source


def written(folder: Path, table: str, *images: str) -> Path:
    for name in images:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / name)
    (folder / "labels.csv").write_text(table, encoding="utf-8-sig")
    return folder


def test_a_table_beside_images_says_their_classes(tmp_path: Path) -> None:
    table = "Class,FileName\ntulip,b 2.jpg\ndaisy,a.jpg\ndaisy,images/c.jpg\n"
    reader = open_source(written(tmp_path, table, "b 2.jpg", "a.jpg", "images/c.jpg", "not-in-the-table.jpg"))
    assert isinstance(reader, ImageFolder)
    assert reader.classes == ("daisy", "tulip")
    assert reader.counts == {"daisy": 2, "tulip": 1}
    assert [reader.example_id(index) for index in range(len(reader))] == ["a.jpg", "images/c.jpg", "b 2.jpg"]


def test_a_file_of_labels_numbers_the_classes_of_all_splits(tmp_path: Path) -> None:
    folder, labels = written(tmp_path / "images", "filename,label\na.jpg,daisy\n", "a.jpg"), tmp_path / "labels.txt"
    labels.write_text("tulip\ndaisy\n")
    reader = open_source(folder, labels=labels)
    assert isinstance(reader, ImageFolder)
    assert reader.classes == ("tulip", "daisy")
    assert reader.read_batch(np.array([0]))["label"].tolist() == [1]
    labels.write_text("tulip\n")
    with pytest.raises(DataError, match="no daisy"):
        open_source(folder, labels=labels)


def test_columns_of_one_name_are_told_apart_by_their_place(tmp_path: Path) -> None:
    reader = open_source(written(tmp_path, ",filename,,label\n0,a.jpg,,daisy\n", "a.jpg"))
    assert isinstance(reader, ImageFolder)
    assert reader.counts == {"daisy": 1}


def test_names_come_without_endings_and_below_a_dot_and_columns_of_one_name_twice(tmp_path: Path) -> None:
    table = "x,x,image_id,label\n1,2,a,tulip\n1,2,./b.jpg,daisy\n\n1,2,images/c,daisy\n"
    reader = open_source(written(tmp_path, table, "a.jpg", "b.jpg", "images/c.jpg"))
    assert [reader.example_id(index) for index in range(len(reader))] == ["b.jpg", "images/c.jpg", "a.jpg"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("filename,label\na.jpg,daisy\n../a.jpg,tulip\n", r"1 of 2: \.\./a\.jpg"),
        ("filename\na.jpg\n", "a column of files"),
        ("filename,class,xmin,ymin\na.jpg,daisy,1,2\n", "table of boxes"),
        ("", r"\(none\)"),
        ("filename,label\na.jpg,\n", r"line 2: a\.jpg,"),
        ("filename,label\n\na.jpg\n", r"line 3: a\.jpg"),
        ("filename,label\na.jpg,daisy\na.jpg,tulip\n", r"'a\.jpg' as 'daisy' and as 'tulip'"),
        ("filename,label\n", "no line but the first"),
    ],
)
def test_a_table_that_does_not_say_the_classes_is_refused(table: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_source(written(tmp_path, table, "a.jpg"))
