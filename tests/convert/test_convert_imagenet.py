from __future__ import annotations

import logging
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.convert.image_folder import Box, convert_images
from lockstep.convert.imagenet import BoxCounts, imagenet_sets, read_boxes, sort_validation, write_boxes
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError, InputError
from lockstep.records.example import parse_example
from lockstep.records.record_files import RecordFiles

DOG, FOX = "n02092002", "n02119247"
ALONE = Settings(num_processes=1)


def image_bytes(kind: str = "JPEG", mode: str = "RGB") -> bytes:
    file = BytesIO()
    Image.new(mode, (4, 3)).save(file, kind)
    return file.getvalue()


def file_with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def synsets(tmp_path: Path) -> Path:
    return file_with(tmp_path / "synsets.txt", f"{FOX}\n{DOG}\n")


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    text = f"{DOG}\tScottish deerhound, deerhound\nn00000001\tother\n\n{FOX}\tblack fox\n"
    return file_with(tmp_path / "metadata.txt", text)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "imagenet"
    for name in (f"train/{DOG}/{DOG}_1.JPEG", f"train/{FOX}/{FOX}_7.JPEG", f"val/{FOX}/ILSVRC2012_val_00000001.JPEG"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image_bytes())
    return folder


def test_a_record_has_the_features_of_the_reference(
    tmp_path: Path, images: Path, synsets: Path, metadata: Path
) -> None:
    boxes = file_with(tmp_path / "boxes.csv", f"{DOG}_1.JPEG,0.1,0.2,0.3,0.4\n{DOG}_1.JPEG,0.5,0.6,0.7,0.8\n")
    sets = imagenet_sets(images, synsets, metadata, boxes)
    assert [*sets] == ["validation", "train"]
    convert_images(images, sets["train"], tmp_path / "out", "train", 1, settings=ALONE)
    records = RecordFiles(tmp_path / "out" / "train-*")
    examples = {example["image/class/synset"][0]: example for example in map(parse_example, map(records.read, (0, 1)))}
    dog, fox = ({n: list(v) for n, v in examples[name.encode()].items()} for name in (DOG, FOX))
    assert dog == {
        "image/height": [3],
        "image/width": [4],
        "image/channels": [3],
        "image/colorspace": [b"RGB"],
        "image/format": [b"JPEG"],
        "image/class/label": [2],
        "image/class/synset": [DOG.encode()],
        "image/class/text": [b"Scottish deerhound, deerhound"],
        "image/object/bbox/xmin": [np.float32(0.1), np.float32(0.5)],
        "image/object/bbox/ymin": [np.float32(0.2), np.float32(0.6)],
        "image/object/bbox/xmax": [np.float32(0.3), np.float32(0.7)],
        "image/object/bbox/ymax": [np.float32(0.4), np.float32(0.8)],
        "image/object/bbox/label": [2, 2],
        "image/filename": [f"{DOG}_1.JPEG".encode()],
        "image/encoded": [image_bytes()],
    }
    assert fox.keys() == dog.keys()
    assert fox["image/class/label"] == [1]
    assert [fox[name] for name in fox if "bbox" in name] == [[]] * 5


def test_only_files_named_jpeg_count(images: Path, synsets: Path, metadata: Path) -> None:
    for name in ("x.jpg", "x.JPEG.txt", "deep/x.JPEG"):
        (images / "train" / DOG / name).parent.mkdir(exist_ok=True)
        (images / "train" / DOG / name).touch()
    found = imagenet_sets(images, synsets, metadata)["train"]
    assert sorted(image.path for image in found) == [f"train/{DOG}/{DOG}_1.JPEG", f"train/{FOX}/{FOX}_7.JPEG"]


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGB"), ("JPEG", "CMYK")])
def test_the_odd_ones_become_jpegs_in_colours(
    tmp_path: Path, images: Path, synsets: Path, metadata: Path, kind: str, mode: str
) -> None:
    (images / "val" / FOX / "ILSVRC2012_val_00000001.JPEG").write_bytes(image_bytes(kind, mode))
    found = imagenet_sets(images, synsets, metadata)["validation"]
    convert_images(images, found, tmp_path / "out", "validation", 1, settings=ALONE)
    example = parse_example(RecordFiles(tmp_path / "out" / "validation-*").read(0))
    image = Image.open(BytesIO(example["image/encoded"][0]))
    assert (image.format, image.mode) == ("JPEG", "RGB")


def test_a_synset_without_a_folder_keeps_its_number(
    images: Path, synsets: Path, metadata: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (images / "val" / "n00000009").mkdir()
    with caplog.at_level(logging.WARNING, "lockstep"):
        sets = imagenet_sets(images, file_with(synsets, f"{DOG}\n{FOX}\n"), metadata)
    assert [(image.label, image.text) for image in sets["validation"]] == [(2, "black fox")]
    assert f"No folder in {images / 'val'} for {DOG}" in caplog.text
    assert f"Not converted in {images / 'val'}: n00000009" in caplog.text


def test_a_folder_without_images_is_refused(images: Path, synsets: Path, metadata: Path) -> None:
    message = r"There are no images of ImageNet in .*val\.\n.*\n.*\n.*imagenet-validation sorts"
    for path in (images / "val" / FOX).iterdir():
        path.rename(images / "val" / path.name)
    with pytest.raises(DataError, match=message):
        imagenet_sets(images, synsets, metadata)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{DOG}\tdog\n", rf"metadata\.txt lacks names\.\n  given:    none for {FOX}\n"),
        (f"{DOG} dog\n", rf"metadata\.txt does not name synsets\.\n  given:    a line with 0 tabs, '{DOG} dog'"),
    ],
    ids=["missing", "no tab"],
)
def test_metadata_that_name_no_synsets_are_refused(
    images: Path, synsets: Path, metadata: Path, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        imagenet_sets(images, synsets, file_with(metadata, text))


def test_metadata_that_are_missing_are_named(images: Path, synsets: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt does not name synsets\.\n  given:    .*No such file"):
        imagenet_sets(images, synsets, tmp_path / "nothing.txt")


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


def test_written_boxes_are_counted(tmp_path: Path) -> None:
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


SYNSETS = ["n01751748", "n09193705", "n01751748"]
NAMES = [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 3)]


@pytest.fixture
def labels_of_validation(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("".join(f"{synset}\n" for synset in SYNSETS))
    return path


@pytest.fixture
def validation_images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(name.encode())
    return folder


def check_sorted(output: Path) -> None:
    paths = [output / synset / name for synset, name in zip(SYNSETS, NAMES, strict=True)]
    assert sorted(path for path in output.rglob("*") if path.is_file()) == sorted(paths)
    assert [path.read_bytes() for path in paths] == [name.encode() for name in NAMES]


@pytest.mark.parametrize(("how", "left", "links"), [("link", 3, 2), ("copy", 3, 1), ("move", 0, 1)])
def test_each_image_goes_to_its_class(
    validation_images: Path, labels_of_validation: Path, tmp_path: Path, how: str, left: int, links: int
) -> None:
    output = tmp_path / "out"
    for _ in range(2):  # Done twice it is done once.
        assert sort_validation(validation_images, labels_of_validation, output, how) == 3
        check_sorted(output)
        assert len(list(validation_images.iterdir())) == left
        assert (output / SYNSETS[0] / NAMES[0]).stat().st_nlink == links


def test_validation_images_may_be_sorted_within_their_folder(
    validation_images: Path, labels_of_validation: Path
) -> None:
    seen: list[tuple[int, int]] = []
    sort_validation(
        validation_images,
        labels_of_validation,
        validation_images,
        "move",
        progress=lambda done, total: seen.append((done, total)),
    )
    check_sorted(validation_images)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_stopped_sorting_of_validation_images_goes_on(
    validation_images: Path, labels_of_validation: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    (output / SYNSETS[0]).mkdir(parents=True)
    (validation_images / NAMES[0]).rename(output / SYNSETS[0] / NAMES[0])
    sort_validation(validation_images, labels_of_validation, output, "move")
    check_sorted(output)


def test_another_file_in_its_place_is_left_alone(
    validation_images: Path, labels_of_validation: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "out" / SYNSETS[1] / NAMES[1]
    taken.parent.mkdir(parents=True)
    taken.write_bytes(b"mine")
    with pytest.raises(DataError, match=rf"{NAMES[1]} is another file than .*\n.*with other bytes\n.*\n.*move it away"):
        sort_validation(validation_images, labels_of_validation, tmp_path / "out")
    assert taken.read_bytes() == b"mine"


def test_nothing_is_done_when_an_image_is_missing(
    validation_images: Path, labels_of_validation: Path, tmp_path: Path
) -> None:
    (validation_images / NAMES[2]).unlink()
    message = rf"images are missing in .*\n  given:    1 of 3, first {NAMES[2]}\n.*\n.*all of it"
    with pytest.raises(DataError, match=message):
        sort_validation(validation_images, labels_of_validation, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "given"),
    [("", "no lines"), ("a\n\nb\n", "line 2, ''"), ("../a\n", "line 1, '../a'"), ("..\n", r"line 1, '\.\.'")],
    ids=["empty", "gap", "path", "above"],
)
def test_labels_that_name_no_folders_are_refused(
    validation_images: Path, labels_of_validation: Path, text: str, given: str
) -> None:
    labels_of_validation.write_text(text)
    with pytest.raises(DataError, match=rf"labels\.txt does not name the classes .*\n  given:    {given}\n"):
        sort_validation(validation_images, labels_of_validation, validation_images)


def test_labels_that_are_missing_are_named(validation_images: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"given:    .*No such file"):
        sort_validation(validation_images, tmp_path / "nothing.txt", validation_images)


def test_another_way_is_refused(validation_images: Path, labels_of_validation: Path) -> None:
    with pytest.raises(InputError, match=r"how cannot be 'steal'\.\n.*\n  expected: 'link' or 'copy' or 'move'"):
        sort_validation(validation_images, labels_of_validation, validation_images, "steal")


def test_what_the_system_refuses_is_told(validation_images: Path, labels_of_validation: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / SYNSETS[0]).touch()
    message = r"cannot be put into .*out\.\n  given:    .*(exists|Not a directory).*\n.*\n.*where links cannot be made"
    with pytest.raises(DataError, match=message):
        sort_validation(validation_images, labels_of_validation, tmp_path / "out")


def test_a_name_with_a_comma_and_quotes_comes_back(tmp_path: Path) -> None:
    name = 'a, "b"'
    write_boxes(folder_of(tmp_path, {f"{DOG}/{name}.xml": annotation((DOG, 0, 0, 100, 50))}), tmp_path / "boxes.csv")
    assert read_boxes(tmp_path / "boxes.csv") == {f"{name}.JPEG": (Box(0, 0, 0.5, 0.5),)}
