from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.convert.image_folder import convert_images
from lockstep.convert.imagenet import imagenet_sets
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError
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
