"""What a path names is found out by looking: each kind of data, and what is none of them."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import DataError
from lockstep.readers.coco import Coco
from lockstep.readers.fingerprint import fingerprint_of
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.mnist import FILES, mnist_reader
from lockstep.readers.open import open_source
from lockstep.readers.paths import check_there
from lockstep.readers.reader import Reader
from lockstep.readers.records import Records
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.voc import Voc
from lockstep.records import record_index, tar_members
from lockstep.records.example import Values, serialize_example
from lockstep.records.tfrecord import write_records

MNIST = Path(__file__).parents[2] / "data" / "mnist"
WIDTH, HEIGHT = 4, 3


def image_bytes() -> bytes:
    file = BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(file, "PNG")
    return file.getvalue()


def image_in(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_bytes())
    return path


def classified() -> dict[str, Values]:
    return {"image/encoded": [image_bytes()], "image/class/label": np.array([7])}


def with_objects() -> dict[str, Values]:
    edges = {f"image/object/bbox/{edge}": np.array([0.5], np.float32) for edge in ("ymin", "xmin", "ymax", "xmax")}
    return {"image/encoded": [image_bytes()], "image/object/class/label": np.array([2]), **edges}


def raw_digit() -> dict[str, Values]:
    return {"image_raw": [bytes(784)], "label": np.array([5])}


def records_in(path: Path, features: dict[str, Values], count: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, [serialize_example(features)] * count)
    return path


def tar_in(path: Path, keys: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key in keys:
            for ending, data in (("png", image_bytes()), ("cls", b"3")):
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
    return path


def voc_in(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        image_in(folder / "JPEGImages" / f"{name}.png")
        (folder / "Annotations").mkdir(exist_ok=True)
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.png</filename>"
            f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
            "<object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>3</xmax><ymax>2</ymax></bndbox></object>"
            "</annotation>"
        )
    return folder


def coco_in(annotations: Path, images: Path) -> Path:
    image_in(images / "1.png")
    annotations.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "images": [{"id": 1, "file_name": "1.png", "width": WIDTH, "height": HEIGHT}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 2, 2], "area": 4, "iscrowd": 0}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    annotations.write_text(json.dumps(found))
    return annotations


def fields_of(reader: Reader) -> set[str]:
    return {*reader.read_batch(np.array([0]))}


def test_a_folder_with_a_folder_for_each_class(tmp_path: Path) -> None:
    image_in(tmp_path / "cat/1.png")
    image_in(tmp_path / "dog/1.png")
    reader = open_source(tmp_path)
    assert isinstance(reader, ImageFolder)
    assert reader.classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("features", "kind", "fields"),
    [
        (classified, ImageRecords, {"image", "label"}),
        (lambda: {**classified(), **with_objects()}, ImageRecords, {"image", "label"}),
        (lambda: {"image/encoded": [image_bytes()]}, ImageRecords, {"image", "label"}),
        (with_objects, ImageRecords, {"image", "boxes", "labels"}),
        (raw_digit, Records, {"image", "label"}),
    ],
    ids=["classes", "classes_and_boxes", "images_alone", "objects", "digits"],
)
@pytest.mark.parametrize("name", ["data.tfrecord", "train-00000-of-00001", "of no special name"])
def test_records_are_known_by_their_first(
    tmp_path: Path, name: str, features: Callable[[], dict[str, Values]], kind: type, fields: set[str]
) -> None:
    reader = open_source(records_in(tmp_path / name, features()))
    assert isinstance(reader, kind)
    assert fields <= fields_of(reader)
    assert ("boxes" in fields_of(reader)) is ("boxes" in fields)


@pytest.mark.parametrize("given", ["{}", "{}/train-*", "{}/train-?????-of-00002"])
def test_shards_are_named_by_their_folder_or_a_pattern(tmp_path: Path, given: str) -> None:
    records_in(tmp_path / "train-00000-of-00002", classified(), count=0)
    records_in(tmp_path / "train-00001-of-00002", classified(), count=3)
    (tmp_path / "labels.txt").write_text("cat")
    assert len(open_source(given.format(tmp_path))) == 3


def test_a_folder_whose_name_is_a_pattern(tmp_path: Path) -> None:
    records_in(tmp_path / "a[1]*/b[2]-00000-of-00001", classified())
    assert len(open_source(tmp_path / "a[1]*")) == 1


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    records_in(tmp_path / "train-00001-of-00002", classified())
    with pytest.raises(DataError, match=r"Shards are missing in .*: train-00000-of-00002"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "names",
    [("train-00000-of-00001", "test-00000-of-00001"), ("train.record", "test.record"), ("train-0.tar", "test-0.tar")],
    ids=["shards", "records", "tar"],
)
def test_of_several_sets_one_has_to_be_named(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        records_in(tmp_path / name, classified())
    with pytest.raises(
        DataError, match=r"There are several sets of shards in .*\n.*given: .*test.*train.*\n"
    ) as caught:
        open_source(tmp_path)
    assert caught.value.hint.startswith(f"name one by a pattern: '{tmp_path}/test")


@pytest.mark.parametrize("given", ["{}", "{}/train-*.tar", "{}/train-{{0..1}}.tar"], ids=["folder", "pattern", "range"])
def test_tar_shards(tmp_path: Path, given: str) -> None:
    tar_in(tmp_path / "train-0.tar", ["a", "b"])
    tar_in(tmp_path / "train-1.tar", ["c"])
    reader = open_source(given.format(tmp_path))
    assert isinstance(reader, TarShards)
    assert len(reader) == 3
    assert fields_of(reader) == {"image", "label"}


def test_a_single_tar_file(tmp_path: Path) -> None:
    assert isinstance(open_source(tar_in(tmp_path / "some.tar", ["a"])), TarShards)


def test_voc_with_a_list_of_its_training_images_and_without(tmp_path: Path) -> None:
    folder = voc_in(tmp_path, ["1", "2", "3"])
    whole = open_source(folder)
    assert isinstance(whole, Voc)
    assert len(whole) == 3
    (folder / "ImageSets/Main").mkdir(parents=True)
    (folder / "ImageSets/Main/train.txt").write_text("1\n3\n")
    assert len(open_source(folder)) == 2


@pytest.mark.parametrize("images", ["val2017", "images/val2017", "images", "annotations/val2017", "annotations"])
def test_images_of_coco_are_looked_for_beside_their_annotations(tmp_path: Path, images: str) -> None:
    reader = open_source(coco_in(tmp_path / "annotations/instances_val2017.json", tmp_path / images))
    assert isinstance(reader, Coco)
    assert torch.equal(reader.read_batch(np.array([0]))["labels"][0], torch.tensor([1]))


def test_images_beside_the_annotations_come_before_those_beside_their_folder(tmp_path: Path) -> None:
    image_in(tmp_path / "images" / "other.png")
    reader = open_source(coco_in(tmp_path / "train/_annotations.coco.json", tmp_path / "train"))
    assert reader.read_batch(np.array([0]))["image"][0].source == f"{tmp_path}/train/1.png"


@pytest.mark.parametrize("number", [1, 2], ids=["all", "some"])
def test_everything_of_coco_is_read_that_all_objects_have(tmp_path: Path, number: int) -> None:
    path = coco_in(tmp_path / "instances.json", tmp_path)
    found = json.loads(path.read_text())
    more = {"segmentation": [[0, 0, 2, 0, 2, 2]], "keypoints": [1, 1, 2]}
    others = [{**found["annotations"][0], "id": 2}] * (number - 1)
    found["annotations"] = [{**found["annotations"][0], **more}, *others]
    path.write_text(json.dumps(found))
    fields = {"masks", "keypoints"} if number == 1 else {"keypoints"}
    for given in (path, f"{path}:{tmp_path}"):
        assert fields_of(open_source(given, everything=True)) & {"masks", "keypoints"} == fields
        assert not fields_of(open_source(given)) & {"masks", "keypoints"}


def test_of_coco_without_masks_boxes_are_everything(tmp_path: Path) -> None:
    assert "boxes" in fields_of(open_source(coco_in(tmp_path / "instances.json", tmp_path), everything=True))


@pytest.mark.parametrize("mask", [image_bytes, None], ids=["png", "numbers"])
def test_everything_of_records_is_read(tmp_path: Path, mask: Callable[[], bytes] | None) -> None:
    masks: Values = [mask()] if mask else np.ones(HEIGHT * WIDTH, np.float32)
    points = {f"image/object/keypoint/{axis}": np.array([0.1, 0.2], np.float32) for axis in "yx"}
    channels: dict[str, Values] = {"image/additional_channels/encoded": [image_bytes()] * 3}
    ends = {f"image/object/bbox/{edge}": np.array([1], np.float32) for edge in ("ymax", "xmax")}
    path = records_in(
        tmp_path / "a.tfrecord", {**with_objects(), **ends, "image/object/mask": masks, **points, **channels}
    )
    batch = open_source(path, everything=True).read_batch(np.array([0]))
    assert batch["masks"][0].decode().shape == (1, HEIGHT, WIDTH)
    assert batch["keypoints"][0].shape == (1, 2, 2)
    assert len(batch["additional_channels"][0]) == 3
    assert not fields_of(open_source(path)) & {"masks", "keypoints", "additional_channels"}


def test_everything_of_images_with_a_class_is_read(tmp_path: Path) -> None:
    path = records_in(tmp_path / "a.tfrecord", {**with_objects(), **classified(), "image/class/text": [b"cat"]})
    assert fields_of(open_source(path, everything=True)) == {"image", "label", "boxes", "text"}


def test_images_of_coco_can_be_named(tmp_path: Path) -> None:
    annotations = coco_in(tmp_path / "a/instances.json", tmp_path / "far/away")
    assert isinstance(open_source(f"{annotations}:{tmp_path / 'far/away'}"), Coco)


def test_of_cocos_folder_a_file_has_to_be_named(tmp_path: Path) -> None:
    for name in ("captions_train2017", "instances_train2017"):
        annotations = coco_in(tmp_path / f"annotations/{name}.json", tmp_path / "train2017")
    assert isinstance(open_source(tmp_path), Coco)
    coco_in(tmp_path / "annotations/instances_val2017.json", tmp_path / "val2017")
    with pytest.raises(DataError, match=r"given: +annotations, train2017, val2017") as caught:
        open_source(tmp_path)
    assert caught.value.hint == f"name one of its files of annotations: {annotations}"


def nothing_there(folder: Path) -> Path:
    return folder / "gone"


def empty_folder(folder: Path) -> Path:
    return folder


def folder_of_texts(folder: Path) -> Path:
    for number in range(7):
        (folder / f"{number}.txt").write_text("words")
    return folder


def text(folder: Path) -> Path:
    (folder / "words.txt").write_text("words and more of them")
    return folder / "words.txt"


def foreign_records(folder: Path) -> Path:
    return records_in(folder / "data.tfrecord", {"audio": [b"la"]})


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (nothing_there, r"no file .*gone"),
        (empty_folder, "an empty folder"),
        (folder_of_texts, r"0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more"),
        (text, r".*words.txt, which is no file of records"),
        (foreign_records, "records with the features audio"),
    ],
)
def test_what_is_none_of_these_is_refused(tmp_path: Path, make: Callable[[Path], Path], given: str) -> None:
    path = make(tmp_path)
    with pytest.raises(
        DataError, match=f"given: +{given}\n.*expected: a folder with .* TFRecord .* VOC.* COCO"
    ) as caught:
        open_source(path)
    assert caught.value.what == f"{path} is no data that is known."


def test_records_without_a_record_are_refused(tmp_path: Path) -> None:
    path = records_in(tmp_path / "data.tfrecord", classified(), count=0)
    with pytest.raises(DataError, match=r"There are no records in .*data.tfrecord.\n.*1 file without a record"):
        open_source(path)


def test_a_damaged_file_of_records_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = records_in(tmp_path / "data.tfrecord", classified())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="cut short"):
        open_source(path)


def test_what_no_store_has_is_refused() -> None:
    with pytest.raises(DataError, match="hdfs://bucket/train is in no store that is known"):
        open_source("hdfs://bucket/train")


# Whether it is there --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        "photos",
        "photos/cat/1.png",
        "shards/train-*",
        "shards/train-{{00000..00001}}-of-00002",
        "shards",
        "instances.json",
        "instances.json:somewhere",
        "a[1]",
    ],
)
def test_what_is_there_is_not_looked_into(tmp_path: Path, given: str) -> None:
    image_in(tmp_path / "photos/cat/1.png")
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        (tmp_path / f"shards/train-{shard:05d}-of-00002").write_bytes(b"no records")
    (tmp_path / "instances.json").touch()
    (tmp_path / "a[1]").mkdir()
    check_there(f"{tmp_path}/{given.format()}")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("phtos", "There is no data at {0}/phtos."),
        ("shards/test-*", "No file is named like {0}/shards/test-*"),
        ("shards/train-{{00001..00002}}-of-00003", "There is no data at {0}/shards/train-"),
        ("instances.json:somewhere", "There is no data at {0}/instances.json:somewhere."),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, given: str, what: str) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/train-00001-of-00003").touch()
    with pytest.raises(DataError) as caught:
        check_there(f"{tmp_path}/{given.format()}")
    assert caught.value.what.startswith(what.format(tmp_path))
    assert "check the p" in caught.value.hint or "did you mean" in caught.value.hint


# Events by which Python tells of a change to a file system, and of an "open" that is for more than reading.
CHANGES = {
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "os.utime",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

changed: list[str] = []


def note_change(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook, which cannot be removed again: note the paths that something changes, or tries to."""
    if event in CHANGES or (event == "open" and arguments[2] & WRITING):
        changed.extend(os.fsdecode(path) for path in arguments if isinstance(path, str | bytes | os.PathLike))


sys.addaudithook(note_change)


def mnist_in(folder: Path) -> Path:
    folder.mkdir()
    for file in FILES[2:]:
        (folder / file.name).symlink_to(MNIST / file.name)
    return folder


@pytest.mark.parametrize(
    ("make", "opened"),
    [
        (lambda folder: image_in(folder / "cat/1.png").parents[1], open_source),
        (lambda folder: records_in(folder / "train-00000-of-00001", classified()), open_source),
        (lambda folder: records_in(folder / "test.tfrecords", raw_digit()), open_source),
        (lambda folder: tar_in(folder / "train-000.tar", ["a", "b"]), open_source),
        (lambda folder: voc_in(folder, ["1"]), open_source),
        (lambda folder: coco_in(folder / "instances.json", folder / "images"), open_source),
        (mnist_in, lambda folder, cache: mnist_reader("test", folder, cache)),
    ],
    ids=["folders", "image_records", "records", "tar", "voc", "coco", "mnist"],
)
def test_nothing_is_written_beside_the_data(
    tmp_path: Path,
    make: Callable[[Path], Path],
    opened: Callable[..., Reader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (record_index, tar_members):
        monkeypatch.setattr(module, "_WORTH_KEEPING_BYTES", 1)
    data, cache = tmp_path / "data", tmp_path / "cache"
    path = make(data)
    there = {file: file.lstat().st_mtime_ns for file in data.rglob("*")}
    changed.clear()
    for _ in range(2):
        reader = opened(path, cache=cache)
        fingerprint_of(reader)
        images = reader.read_batch(np.array([0]))["image"]
        if not isinstance(images, torch.Tensor):
            images[0].decode()
    assert [name for name in changed if Path(name).is_relative_to(data)] == []
    assert {file: file.lstat().st_mtime_ns for file in data.rglob("*")} == there
    kept = [file.parent.name for file in cache.rglob("*") if file.is_file()]
    assert kept == ["record-index"] * isinstance(reader, Records | ImageRecords | TarShards)
