from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.augmentations.crops import Resize
from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding
from lockstep.readers.label_map import Label, LabelMap, read_label_map
from lockstep.readers.voc import Voc

TESTS = Path(__file__).parent.parent
FIXTURE = TESTS / "fixtures" / "voc"
MORE_FOLDERS = [Path(folder) for folder in os.environ.get("LOCKSTEP_VOC", "").split(os.pathsep) if folder]

OBJECT = """<object><name>{name}</name><pose>{pose}</pose><truncated>{truncated}</truncated>
<difficult>{difficult}</difficult><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>
<ymax>{box[3]}</ymax></bndbox></object>"""


def one(name: str = "cat", box: tuple[Any, ...] = (2, 1, 4, 3), **more: Any) -> str:
    """An object; the box is xmin, ymin, xmax, ymax."""
    return OBJECT.format(**{"name": name, "box": box, "pose": "Left", "truncated": 0, "difficult": 0, **more})


def xml(*objects: str, name: str = "1.png", size: str = "<width>8</width><height>4</height>") -> str:
    return f"<annotation><filename>{name}</filename><size>{size}</size>{''.join(objects)}</annotation>"


def voc_of(tmp_path: Path, annotations: Mapping[str, str], **splits: str) -> Path:
    """A folder with an annotation of each name, an image of 8 x 4 pixels for each, and these lists."""
    root = tmp_path / "VOC2012"
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for shade, (name, text) in enumerate(annotations.items()):
        (root / "Annotations" / f"{name}.xml").write_text(text)
        Image.new("RGB", (8, 4), (shade,) * 3).save(root / "JPEGImages" / f"{name}.png")
    for split, lines in splits.items():
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(lines)
    return root


def single(tmp_path: Path, *objects: str) -> Path:
    return voc_of(tmp_path, {"1": xml(*objects)}, train="1\n")


def field_of(reader: Voc, name: str) -> list[Any]:
    """The values of all images, as lists."""
    values = reader.read_batch(np.arange(len(reader)))[name]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


def test_photographs_and_their_objects(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    root = FIXTURE / "bccd"
    reader = Voc(root, "val", decoding=Decoding("pillow"))
    assert (len(reader), reader.cost, reader.example_id(0)) == (1, "decode", "BloodImage_00338.jpg")
    assert reader.classes == {1: "Platelets", 2: "RBC", 3: "WBC"}
    batch = reader.read_batch(np.array([0]))
    (image,) = batch["image"]
    assert (image.source, image.size) == (f"{root}/JPEGImages/BloodImage_00338.jpg", (640, 480))
    assert batch["source_id"] == ["BloodImage_00338.jpg"]
    found = ElementTree.parse(root / "Annotations" / "BloodImage_00338.xml").getroot().findall("object")
    names = [each.findtext("name", "") for each in found]
    edges = ("ymin", "xmin", "ymax", "xmax")
    corners = np.array([[float(each.findtext(f"bndbox/{edge}", "")) for edge in edges] for each in found])
    (without,) = np.flatnonzero((corners[:, 2:] <= corners[:, :2]).any(1))
    kept = [place for place in range(len(found)) if place != without]
    np.testing.assert_allclose(batch["boxes"][0], corners[kept] / (480, 640, 480, 640), rtol=0, atol=1e-6)
    assert batch["class_text"] == [[names[place] for place in kept]]
    assert [reader.classes[label] for label in batch["labels"][0].tolist()] == batch["class_text"][0]
    assert batch["truncated"][0].tolist() == [found[place].findtext("truncated") == "1" for place in kept]
    types = {name: batch[name][0].dtype for name in ("boxes", "labels", "difficult", "truncated")}
    assert types == {
        "boxes": torch.float32,
        "labels": torch.int64,
        "difficult": torch.bool,
        "truncated": torch.bool,
    }
    odd = f"1 of {len(found)} objects in {root} have no area on their image, and are left out"
    assert caplog.messages == [f"{odd}: {names[without]} on BloodImage_00338.jpg"]


def test_classes_are_numbered_alike_in_all_splits() -> None:
    readers = [Voc(FIXTURE / "bccd", split) for split in ("train", "val", "trainval", None)]
    assert [len(reader) for reader in readers] == [1, 1, 2, 2]
    assert all(reader.classes == readers[0].classes for reader in readers)


def test_other_tools_name_the_folders_otherwise() -> None:
    reader = Voc(FIXTURE / "raccoon", None)
    assert [reader.example_id(index) for index in range(len(reader))] == ["raccoon-125.jpg"]
    assert reader.classes == {1: "raccoon"}
    assert reader.read_batch(np.array([0]))["image"][0].decode().shape[0] == 3


def test_all_files_may_lie_in_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (2, 1):
        (tmp_path / f"{number}.xml").write_text(xml(one(), name=f"image {number}.PNG"))
    for name in ("image 1.PNG", "image 2.PNG", "3.png"):
        Image.new("RGB", (8, 4)).save(tmp_path / name)
    reader = Voc(tmp_path, None)
    assert [reader.example_id(index) for index in range(len(reader))] == ["image 1.PNG", "image 2.PNG"]
    assert len(field_of(reader, "image")) == 2
    assert caplog.messages == [f"Not read in {tmp_path}, since no annotation names them: 3.png"]


def test_an_annotation_that_names_the_image_of_another_is_of_the_image_named_like_it(tmp_path: Path) -> None:
    for stem in ("a", "b"):
        (tmp_path / f"{stem}.xml").write_text(xml(one(), name="b.png"))
        Image.new("RGB", (8, 4)).save(tmp_path / f"{stem}.png")
    reader = Voc(tmp_path, None)
    assert [reader.example_id(index) for index in range(2)] == ["a.png", "b.png"]


def test_boxes_are_divided_by_the_size_as_they_are(tmp_path: Path) -> None:
    root = single(tmp_path, one(box=(1, 1, 8, 4)), one(box=("2.5", " 1e0 ", 4, 3)))
    assert field_of(Voc(root), "boxes") == [[[0.25, 0.125, 1, 1], [0.25, 0.3125, 0.75, 0.5]]]


def test_boxes_are_clipped_and_those_without_area_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = single(
        tmp_path, one(box=(-1, 2, 9, 5)), one("dog", (4, 1, 4, 3)), one(box=(4, 3, 2, 1)), one(box=(8, 0, 9, 4))
    )
    caplog.set_level(logging.INFO, "lockstep")
    assert field_of(Voc(root), "boxes") == [[[0.5, 0, 1, 1]]]
    assert caplog.messages == [
        f"1 of 4 boxes in {root} reach out of their image, and are clipped to it",
        f"3 of 4 objects in {root} have no area on their image, and are left out: "
        "dog on 1.png, cat on 1.png, cat on 1.png",
    ]


def test_what_is_known_of_objects_is_kept(tmp_path: Path) -> None:
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox>"
    bare = f"<object><name> a b </name><part><name>head</name><bndbox/></part>{box}</object>"
    root = single(tmp_path, one(pose="Right", difficult=1), one(truncated=1), one(pose=" "), bare)
    reader = Voc(root)
    assert reader.classes == {1: "a b", 2: "cat"}
    assert field_of(reader, "class_text") == [["cat", "cat", "cat", "a b"]]
    assert field_of(reader, "difficult") == [[True, False, False, False]]
    assert field_of(reader, "truncated") == [[False, True, False, False]]
    assert field_of(reader, "view") == [["Right", "Left", "Unspecified", "Unspecified"]]
    assert field_of(Voc(root, difficult=False), "view") == [["Left", "Unspecified", "Unspecified"]]


def test_images_without_objects_are_kept(tmp_path: Path) -> None:
    root = voc_of(tmp_path, {"1": xml(), "2": xml(one(), name="2.png")}, train="1\n2\n")
    assert field_of(Voc(root), "labels") == [[], [1]]
    assert Voc(root).read_batch(np.array([0]))["boxes"][0].shape == (0, 4)
    (root / "Annotations" / "2.xml").write_text(xml(name="2.png"))
    assert field_of(Voc(root), "labels") == [[], []]


def test_a_list_has_its_order_and_the_first_word_of_a_line_counts(tmp_path: Path) -> None:
    root = voc_of(tmp_path, {name: xml(name=f"{name}.png") for name in "abc"}, cat_train="c  1\r\n\na -1\r\n")
    reader = Voc(root, "cat_train")
    assert [reader.example_id(index) for index in range(len(reader))] == ["c.png", "a.png"]


def test_the_folder_may_be_that_of_all_years(tmp_path: Path) -> None:
    root = single(tmp_path, one())
    assert len(Voc(tmp_path, year=2012)) == len(Voc(root)) == 1
    with pytest.raises(DataError) as caught:
        Voc(tmp_path, year=2007)
    assert caught.value.what == f"There is no folder {tmp_path}/VOC2007."
    assert caught.value.given == f"year=2007; in {tmp_path} there is VOC2012"
    assert caught.value.expected == "the folder above those of the years, VOCdevkit"
    assert caught.value.hint == "name another year, or without one the folder that holds the annotations"
    with pytest.raises(DataError) as caught:
        Voc(tmp_path)
    assert caught.value.what == f"There are no annotations in {tmp_path}."
    assert caught.value.given == "no *.xml, but VOC2012"
    assert caught.value.expected == "a folder with Annotations or annotations in it, or the files themselves"
    assert caught.value.hint == "give the year, such as year=2012 (--year VOC2012)"
    with pytest.raises(InputError, match="year is str"):
        Voc(tmp_path, year="2012")  # type: ignore[arg-type]


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_annotations_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "nowhere"
    with pytest.raises(DataError, match=r"no \*\.xml\n.*\n.*check the path"):
        Voc(folder)


def test_a_label_map_gives_the_labels(tmp_path: Path) -> None:
    root = voc_of(tmp_path, {"1": xml(one("dog"), one("cat")), "2": "broken"}, train="1\n")
    label_map = read_label_map(TESTS / "fixtures" / "label_maps" / "pascal_label_map.pbtxt")
    reader = Voc(root, label_map=label_map)
    assert field_of(reader, "labels") == [[12, 8]]
    assert field_of(reader, "class_text") == [["dog", "cat"]]
    assert reader.classes == label_map.names


def test_a_label_map_that_lacks_a_class_is_refused(tmp_path: Path) -> None:
    root = single(tmp_path, one("dog"), one("cat"))
    with pytest.raises(DataError) as caught:
        Voc(root, label_map=LabelMap((Label(1, "dog"),)))
    assert caught.value.what == "cat is not in the label map."
    assert caught.value.given == f"an object of it is on 1.png; the class 'cat' of {root}"
    assert caught.value.expected == "a class that the label map has, by its name or its display name: dog"
    assert caught.value.hint == "add it to the label map, or take its objects out of the annotations"
    with pytest.raises(InputError, match="label_map is dict"):
        Voc(root, label_map={"dog": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "expected", "hint"),
    [
        ({"val": "1", "cat_val": "1", "test": "1"}, "in {}: test, val, cat_val", "name one of these"),
        ({}, "a list of names; there is none in {}", "read all annotations with split=None (--set all)"),
    ],
    ids=["others", "none"],
)
def test_an_unknown_split_names_those_there_are(
    tmp_path: Path, lines: Mapping[str, str], expected: str, hint: str
) -> None:
    root = voc_of(tmp_path, {"1": xml()}, **lines)
    with pytest.raises(DataError) as caught:
        Voc(root, "train")
    assert caught.value.what == "The split 'train' cannot be read."
    assert "No such file" in str(caught.value.given)
    assert caught.value.expected == expected.format(root / "ImageSets" / "Main")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("lines", "problem"),
    [("2\n1\n2\n", "2 more than once"), ("\n", "no names"), ("", "no names")],
    ids=["twice", "blank", "empty"],
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, lines: str, problem: str) -> None:
    root = voc_of(tmp_path, {"1": xml(), "2": xml()}, train=lines)
    with pytest.raises(DataError) as caught:
        Voc(root)
    assert caught.value.what == f"{root}/ImageSets/Main/train.txt is no list of images."
    assert caught.value.given == problem
    assert caught.value.expected == "one name or more, each on a line of its own and once"
    assert caught.value.hint == "repair the list"


@pytest.mark.parametrize("split", ["a\0b", "x" * 5000], ids=["zero", "long"])
def test_a_split_that_cannot_be_a_files_name_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(DataError, match=r"The split '[\s\S]*' cannot be read\."):
        Voc(single(tmp_path), split)


def test_a_list_that_is_no_text_is_refused(tmp_path: Path) -> None:
    root = single(tmp_path)
    (root / "ImageSets" / "Main" / "train.txt").write_bytes(b"\xff\xfe1")
    with pytest.raises(DataError, match=r"The split 'train' cannot be read\.\n.*codec"):
        Voc(root)


def test_an_image_listed_without_annotation_is_named(tmp_path: Path) -> None:
    root = voc_of(tmp_path, {"1": xml()}, train="1\n3\n2\n")
    with pytest.raises(DataError) as caught:
        Voc(root)
    assert caught.value.what == "The split 'train' lists images without annotations."
    assert caught.value.given == f"no 3.xml, 2.xml in {root}/Annotations"
    assert caught.value.expected == "one for each of 3 images"
    assert caught.value.hint == "copy them there, or take the images out of the list"


@pytest.mark.parametrize(
    ("word", "value"),
    [("True", True), ("true", True), ("1", True), ("False", False), ("Unspecified", False), ("", False)],
)
def test_flags_are_words_or_numbers(tmp_path: Path, word: str, value: bool) -> None:
    reader = Voc(single(tmp_path, one(difficult=word, truncated=word)))
    assert (field_of(reader, "difficult"), field_of(reader, "truncated")) == ([[value]], [[value]])


def test_a_file_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    root = voc_of(tmp_path, {"1": xml(name="../../../dev/zero")}, train="1\n")
    with pytest.raises(DataError, match=rf"The annotations name files that are not in {root}/JPEGImages\.\n"):
        Voc(root)


def test_images_are_not_turned_away_from_their_boxes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be turned as EXIF asks for"):
        Voc(single(tmp_path), decoding=Decoding(exif=True))


BOMB = '<!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no element found: line 1, column 0"),
        ("<annotation><filename>1.png", "no element found: line 1, column 27"),
        (BOMB + xml(one("&b;")), "a DOCTYPE lolz"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd">' + xml(), "a DOCTYPE a"),
        ("<annotation/>", "no size/height"),
        (xml(size="<width>8</width><height> </height>"), "no size/height"),
        (xml(size="<width>8</width><height>0</height>"), "a size of 8 x 0 pixels"),
        (xml(size="<width>1e99</width><height>4</height>"), "a size of 1e+99 x 4 pixels"),
        (xml(size="<width>8.5</width><height>4</height>"), "a size of 8.5 x 4 pixels"),
        (xml(size="<width>wide</width><height>4</height>"), "size/width 'wide'"),
        (xml(name=""), "no filename"),
        (xml(one(), one("")), "object 2: no name"),
        (xml("<object><name>cat</name></object>"), "object 1: no bndbox/ymin"),
        (xml(one(box=(1, 2, "x", 4))), "object 1: bndbox/xmax 'x'"),
        (xml(one(box=(1, 2, 3, "inf"))), "object 1: bndbox/ymax 'inf'"),
        (xml(one(box=(1, 2, 3, "1_0"))), "object 1: bndbox/ymax '1_0'"),
        ('<?xml version="1.0" encoding="foo"?>' + xml(), "unknown encoding: foo"),
        (
            '<?xml version="1.0" encoding="hex"?>' + xml(),
            "'hex' is not a text encoding; use codecs.decode() to handle arbitrary codecs",
        ),
        (xml(one(difficult="no")), "object 1: difficult 'no'"),
        (xml(one(truncated=2)), "object 1: truncated '2'"),
    ],
    ids=range(20),
)
def test_an_annotation_that_does_not_fit_is_named(tmp_path: Path, text: str, problem: str) -> None:
    root = voc_of(tmp_path, {"1": text}, train="1\n")
    with pytest.raises(DataError) as caught:
        Voc(root)
    assert caught.value.what == f"{root}/Annotations/1.xml cannot be used as an annotation in PASCAL VOC's format."
    assert caught.value.given == problem
    needed = "filename, size (width, height), and for each object name and bndbox, without a DOCTYPE"
    assert caught.value.expected == f"XML with {needed}"
    assert caught.value.hint == "repair the file, or leave it and its image out"


def test_a_document_type_is_refused_in_any_encoding(tmp_path: Path) -> None:
    root = single(tmp_path)
    path = root / "Annotations" / "1.xml"
    path.write_bytes(('<?xml version="1.0" encoding="utf-16"?>' + BOMB + xml()).encode("utf-16"))
    with pytest.raises(DataError, match="a DOCTYPE lolz"):
        Voc(root)


def test_an_annotation_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    root = voc_of(tmp_path, {}, train="1\n")
    (root / "Annotations" / "1.xml").mkdir()
    with pytest.raises(DataError, match=r"1\.xml cannot be used .*\n.*Is a directory"):
        Voc(root)


def test_a_missing_image_is_named_at_once(tmp_path: Path) -> None:
    root = single(tmp_path)
    (root / "JPEGImages" / "1.png").unlink()
    with pytest.raises(DataError, match=rf"Images are missing in {root}/JPEGImages\.\n.*no 1\.png\n.*all 1 that"):
        Voc(root)


def test_an_image_of_another_size_is_named_when_read(tmp_path: Path) -> None:
    root = single(tmp_path)
    Image.new("RGB", (4, 8)).save(root / "JPEGImages" / "1.png")
    with pytest.raises(
        DataError, match=rf"{root}/JPEGImages/1\.png is not of the size .*\n.*4 x 8 pixels\n.*8 x 4 pixels"
    ):
        Voc(root).read_batch(np.array([0]))


def test_difficult_is_a_switch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="difficult is of the wrong type"):
        Voc(single(tmp_path), difficult=1)  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_loader_augments_an_epoch_of_it(tmp_path: Path, num_processes: int) -> None:
    annotations = {name: xml(*[one()] * count, name=f"{name}.png") for count, name in enumerate("abcd")}
    root = voc_of(tmp_path, annotations, train="a b c d".replace(" ", "\n"))
    loader = Loader(Voc(root), batch_size=4, seed=5, augment=Resize(4), num_processes=num_processes)
    with closing(loader.batches(range(1), 1)) as batches:
        batch = next(batches)
    ids = loader.example_ids(0, 4)
    assert sorted(ids) == ["a.png", "b.png", "c.png", "d.png"]
    assert batch["image"].shape == (4, 3, 4, 4)
    shades = ["abcd".index(name[0]) for name in ids]
    assert batch["image"][:, 0, 0, 0].tolist() == shades
    assert [len(boxes) for boxes in batch["boxes"]] == shades
    assert [view.count("Left") for view in batch["view"]] == shades


@pytest.mark.skipif(not MORE_FOLDERS, reason="LOCKSTEP_VOC names no folders with more data in this format")
@pytest.mark.parametrize("root", MORE_FOLDERS, ids=lambda path: path.name)
def test_more_data_sets_are_read(root: Path) -> None:
    reader = Voc(root, None)
    batch = reader.read_batch(np.arange(len(reader)))
    texts = [path.read_text() for path in sorted(root.glob("[Aa]nnotations/*.xml"))]
    assert len(reader) == len(texts)
    given = np.array([text.count("<object>") for text in texts])
    kept = np.array([len(boxes) for boxes in batch["boxes"]])
    assert 0 <= (given - kept).sum() <= 2
    assert all(bool((boxes[:, 2:] > boxes[:, :2]).all()) for boxes in batch["boxes"])
    assert all(image.decode().shape[0] == 3 for image in batch["image"][:10])
    for path in root.glob("ImageSets/Main/*.txt"):
        assert len(Voc(root, path.stem)) == len(path.read_text().split())


def test_the_truth_has_the_numbers_of_the_annotation_and_all_objects(tmp_path: Path) -> None:
    objects = one(box=(1.5, 1, 9, 3), difficult=1), one("dog", (2, 2, 2, 4))
    reader = Voc(single(tmp_path, *objects), difficult=False, truth=True)
    batch = reader.read_batch(np.array([0]))
    assert batch["boxes"].lengths.tolist() == [0]
    assert batch["truth_boxes"][0].tolist() == [[1.5, 1, 7.5, 2], [2, 2, 0, 2]]
    assert batch["truth_boxes"].values.dtype == torch.float64
    assert batch["truth_labels"][0].tolist() == [1, 2]
    assert batch["truth_difficult"][0].tolist() == [True, False]
    assert "truth_boxes" not in Voc(tmp_path / "VOC2012").read_batch(np.array([0]))
