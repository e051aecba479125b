from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.convert.image_record import Box
from lockstep.convert.imagenet import BoxCounts, read_boxes, write_boxes
from lockstep.errors import DataError

DOG, FOX = "n02092002", "n02119247"


def annotation(*objects: tuple[str, float, float, float, float], size: tuple[int, int] = (200, 100)) -> str:
    """The XML of an image that was shown in this width and height, with objects: name, left, top, right, bottom."""
    edges = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax>"
        f"<ymax>{ymax}</ymax></bndbox></object>"
        for name, xmin, ymin, xmax, ymax in objects
    )
    shown = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><folder>x</folder><filename>%s</filename>{shown}{edges}</annotation>"


def folder_of(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / "boxes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "boxes"


def lines_of(tmp_path: Path, files: dict[str, str], *synsets: str) -> list[str]:
    write_boxes(folder_of(tmp_path, files), tmp_path / "boxes.csv", synsets or None)
    return (tmp_path / "boxes.csv").read_text().splitlines()


def test_boxes_are_shares_of_the_size_that_was_shown(tmp_path: Path) -> None:
    files = {
        f"{FOX}/{FOX}_2.xml": annotation((FOX, 20, 10, 100, 99)),
        f"{DOG}/{DOG}_1.xml": annotation((DOG, 0, 0, 200, 100), (DOG, 1, 33, 3, 67)),
    }
    assert lines_of(tmp_path, files) == [
        f"{DOG}_1.JPEG,0.0000,0.0000,1.0000,1.0000",
        f"{DOG}_1.JPEG,0.0050,0.3300,0.0150,0.6700",
        f"{FOX}_2.JPEG,0.1000,0.1000,0.5000,0.9900",
    ]


@pytest.mark.parametrize(
    ("edges", "line"),
    [
        ((100, 90, 20, 10), "0.1000,0.1000,0.5000,0.9000"),
        ((-20, 10, 300, 90), "0.0000,0.1000,1.0000,0.9000"),
        ((20.9, 10.9, 100.9, 90.9), "0.1000,0.1000,0.5000,0.9000"),
        ((20, 10, 20, 90), None),
        ((20, 90, 100, 90), None),
        ((250, 10, 300, 90), None),
    ],
    ids=["exchanged", "outside in part", "no whole pixels", "no width", "no height", "outside"],
)
def test_odd_boxes_are_put_right_or_skipped(tmp_path: Path, edges: tuple[float, ...], line: str | None) -> None:
    files = {f"{FOX}/{FOX}_1.xml": annotation((FOX, *edges))}  # type: ignore[arg-type]
    assert lines_of(tmp_path, files) == ([f"{FOX}_1.JPEG,{line}"] if line else [])


def test_only_synsets_that_are_wanted_are_kept(tmp_path: Path) -> None:
    files = {
        f"{DOG}/{DOG}_1.xml": annotation((DOG, 0, 0, 2, 1), ("Scottish_deerhound", 0, 0, 4, 1), (FOX, 0, 0, 6, 1)),
        f"{FOX}/{FOX}_1.xml": annotation((DOG, 0, 0, 2, 1)),
        "n00000001/n00000001_1.xml": annotation(("n00000001", 0, 0, 2, 1)),
    }
    assert lines_of(tmp_path, files, DOG, FOX) == [
        f"{DOG}_1.JPEG,0.0000,0.0000,0.0100,0.0100",
        f"{DOG}_1.JPEG,0.0000,0.0000,0.0200,0.0100",
    ]


def test_what_was_written_is_counted(tmp_path: Path) -> None:
    files = {
        f"{DOG}/{DOG}_1.xml": annotation((DOG, 0, 0, 2, 1), (FOX, 0, 0, 6, 1), (DOG, 0, 0, 9, 0)),
        f"{FOX}/{FOX}_1.xml": annotation((DOG, 0, 0, 2, 1)),
        "n00000001/n00000001_1.xml": "not read",
    }
    seen: list[tuple[int, int]] = []
    folder = folder_of(tmp_path, files)
    counts = write_boxes(
        folder, tmp_path / "boxes.csv", {DOG, FOX}, progress=lambda done, total: seen.append((done, total))
    )
    assert counts == BoxCounts(num_files=3, num_images=1, num_boxes=1, num_skipped=3)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_file_that_declares_a_document_type_is_refused(tmp_path: Path) -> None:
    bomb = '<!DOCTYPE a [<!ENTITY b "c">]>' + annotation((FOX, 0, 0, 2, 1))
    with pytest.raises(DataError, match=rf"{FOX}_1\.xml cannot be used .*\n  given:    a DOCTYPE a\n"):
        lines_of(tmp_path, {f"{FOX}/{FOX}_1.xml": bomb})
    assert [path.name for path in tmp_path.iterdir()] == ["boxes"]


def test_a_file_is_not_written_over_unless_told_so(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"{FOX}/{FOX}_1.xml": annotation((FOX, 0, 0, 2, 1))})
    (tmp_path / "boxes.csv").write_text("mine")
    with pytest.raises(DataError, match=r"boxes\.csv is there already\.\n.*\n.*\n  hint:     name another file"):
        write_boxes(folder, tmp_path / "boxes.csv")
    assert (tmp_path / "boxes.csv").read_text() == "mine"
    write_boxes(folder, tmp_path / "boxes.csv", overwrite=True)
    assert read_boxes(tmp_path / "boxes.csv") == {f"{FOX}_1.JPEG": (Box(0, 0, 0.01, 0.01),)}


def test_a_folder_without_boxes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There are no bounding boxes in .*\n  given:    no file SYNSET/NAME\.xml"):
        write_boxes(tmp_path, tmp_path / "boxes.csv")


def test_boxes_are_read_by_image(tmp_path: Path) -> None:
    path = tmp_path / "boxes.csv"
    path.write_text("a.JPEG,0.0060,0.2620,0.7545,0.9940\nb.JPEG,0,0,1,1\na.JPEG,0.5,0.5,0.5,0.6\n")
    assert read_boxes(path) == {
        "a.JPEG": (Box(0.006, 0.262, 0.7545, 0.994), Box(0.5, 0.5, 0.5, 0.6)),
        "b.JPEG": (Box(0, 0, 1, 1),),
    }


@pytest.mark.parametrize(
    "line", ["a.JPEG,0,0,1", "a.JPEG,0,0,1,x", "a.JPEG,0,0,1,1.5", "a.JPEG,0.5,0,0.4,1", "nan,,,,"]
)
def test_a_line_that_is_no_box_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "boxes.csv"
    path.write_text(f"b.JPEG,0,0,1,1\n{line}\n")
    with pytest.raises(
        DataError, match=rf"boxes\.csv is no list of bounding boxes\.\n  given:    line 2: '{re.escape(line)}"
    ):
        read_boxes(path)


def test_a_list_of_boxes_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"given:    .*No such file"):
        read_boxes(tmp_path / "boxes.csv")
