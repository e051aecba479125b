from __future__ import annotations

from pathlib import Path

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


def test_names_come_without_endings_and_below_a_dot_and_columns_of_one_name_twice(tmp_path: Path) -> None:
    table = "x,x,image_id,label\n1,2,a,tulip\n1,2,./b.jpg,daisy\n\n1,2,images/c,daisy\n"
    reader = open_source(written(tmp_path, table, "a.jpg", "b.jpg", "images/c.jpg"))
    assert [reader.example_id(index) for index in range(len(reader))] == ["b.jpg", "images/c.jpg", "a.jpg"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("filename,label\na.jpg,daisy\na.jpg,tulip\n", "a.jpg is daisy and tulip"),
        ("filename,label\na.jpg\n", "a.jpg without a class"),
        ("filename,label\na.jpg,daisy\n../a.jpg,tulip\n", r"1 of 2: \.\./a\.jpg"),
        ("filename\na.jpg\n", "a column of files"),
        ("filename,class,xmin,ymin\na.jpg,daisy,1,2\n", "table of boxes"),
        ("", r"\(none\)"),
    ],
)
def test_a_table_that_does_not_say_the_classes_is_refused(table: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_source(written(tmp_path, table, "a.jpg"))
