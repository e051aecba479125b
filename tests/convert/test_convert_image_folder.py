from __future__ import annotations

import logging
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.convert.image_folder import LabelledImage, convert_images, image_sets, split_images
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError, InputError
from lockstep.records.example import Values, parse_example
from lockstep.records.record_files import RecordFiles

ALONE = Settings(num_processes=1)


def image_bytes(shade: int, kind: str = "JPEG", size: tuple[int, int] = (4, 3)) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(file, kind)
    return file.getvalue()


def folder_of(tmp_path: Path, *names: str) -> Path:
    """A folder with an image of each name, of the shades 0, 1, ..."""
    folder = tmp_path / "photos"
    for shade, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(shade))
    return folder


def file_with(tmp_path: Path, text: str) -> Path:
    (tmp_path / "labels.txt").write_text(text)
    return tmp_path / "labels.txt"


def examples_in(pattern: Path) -> list[dict[str, Values]]:
    records = RecordFiles(pattern)
    return [parse_example(records.read(index)) for index in range(len(records))]


def plain(example: dict[str, Values]) -> dict[str, list[object]]:
    return {name: list(values) for name, values in example.items()}


def test_a_record_has_the_features_of_the_reference(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/dog/x.jpg")
    images = image_sets(folder)["train"]
    convert_images(folder, images, tmp_path / "out", "train", 1, settings=ALONE)
    assert [plain(each) for each in examples_in(tmp_path / "out" / "train-*")] == [
        {
            "image/height": [3],
            "image/width": [4],
            "image/channels": [3],
            "image/colorspace": [b"RGB"],
            "image/format": [b"JPEG"],
            "image/class/label": [1],
            "image/class/text": [b"dog"],
            "image/filename": [b"x.jpg"],
            "image/encoded": [image_bytes(0)],
        }
    ]


def test_validation_comes_first_and_folders_count_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/cat/1.jpg", "train/ant/2.jpg", "val/cat/3.jpg", "val/ant/deep/4.jpg")
    sets = image_sets(folder)
    assert [*sets] == ["validation", "train"]
    found = {image.path: (image.label, image.text) for images in sets.values() for image in images}
    assert found == {
        "train/ant/2.jpg": (1, "ant"),
        "train/cat/1.jpg": (2, "cat"),
        "val/ant/deep/4.jpg": (1, "ant"),
        "val/cat/3.jpg": (2, "cat"),
    }


def test_a_file_of_labels_gives_their_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "validation/cat/1.jpg", "validation/ant/2.jpg", "validation/bee/3.jpg")
    images = image_sets(folder, file_with(tmp_path, "cat\nant\n"))["validation"]
    assert {image.text: image.label for image in images} == {"cat": 1, "ant": 2}


def test_images_come_in_the_order_of_the_reference(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, *(f"train/a/{number}.jpg" for number in range(8)))
    paths = [image.path for image in image_sets(folder)["train"]]
    # What `random.seed(12345); random.shuffle(list(range(8)))` gives in Python 3.
    assert [int(Path(path).stem) for path in paths] == [3, 1, 7, 4, 2, 0, 5, 6]


@pytest.mark.process
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, *(f"train/a/{number}.jpg" for number in range(7)))
    (folder / "train/a/9.jpg").write_bytes(image_bytes(9, "PNG"))
    images = image_sets(folder)["train"]
    for number in (1, 2):
        convert_images(folder, images, tmp_path / str(number), "train", 3, settings=Settings(num_processes=number))
    one, two = ([path.read_bytes() for path in sorted((tmp_path / n).glob("train-*"))] for n in "12")
    assert one == two
    assert len(one) == 3


def test_other_formats_become_jpegs(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/a/1.png")
    (folder / "train/a/1.png").write_bytes(image_bytes(200, "PNG", (5, 6)))
    convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=ALONE)
    (example,) = examples_in(tmp_path / "out" / "train-*")
    image = Image.open(BytesIO(example["image/encoded"][0]))
    assert (image.format, image.size) == ("JPEG", (5, 6))
    assert np.asarray(image).tolist() == np.full((6, 5, 3), 200).tolist()
    assert plain(example)["image/filename"] == [b"1.png"]


def test_what_cannot_be_decoded_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg", "train/a/2.jpg", "train/a/3.jpg")
    (folder / "train/a/2.jpg").write_bytes(b"no image")
    (folder / "train/a/3.jpg").write_bytes(image_bytes(3)[:-40])
    with caplog.at_level(logging.WARNING, "lockstep"):
        summary = convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=ALONE)
    assert summary.num_records == 1
    assert sorted(each.name for each in summary.skipped) == ["train/a/2.jpg", "train/a/3.jpg"]
    assert "Skipped train/a/2.jpg: the first bytes 6e 6f 20 69" in caplog.text
    assert "Skipped train/a/3.jpg: Truncated File Read" in caplog.text


def test_an_image_that_is_gone_is_no_image_that_is_damaged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg", "train/a/2.jpg")
    images = image_sets(folder)["train"]
    (folder / "train/a/2.jpg").unlink()
    with pytest.raises(DataError, match=r"train/a/2\.jpg cannot be read\.\n.*No such file.*\n.*\n.*put it back"):
        convert_images(folder, images, tmp_path / "out", "train", 1, settings=ALONE)


def test_an_image_that_has_changed_makes_another_conversion(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg")
    convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=ALONE)
    (folder / "train/a/1.jpg").write_bytes(image_bytes(1, "PNG"))
    with pytest.raises(DataError, match="made of something else"):
        convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=ALONE)


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (["cat/1.jpg", "dog/1.jpg"], "cat, dog"),
        (["train/a/1.jpg", "val/a/1.jpg", "validation/a/1.jpg"], "train, val, validation"),
        ([], "no folders"),
    ],
    ids=["classes", "two names", "nothing"],
)
def test_a_folder_without_sets_is_refused(tmp_path: Path, names: list[str], given: str) -> None:
    folder_of(tmp_path, *names)
    message = rf"photos does not hold sets of images\.\n  given:    {given}\n.*\n  hint:     .*--validation-share 0.2"
    with pytest.raises(DataError, match=message):
        image_sets(tmp_path / "photos")


def test_a_folder_elsewhere_is_refused() -> None:
    with pytest.raises(DataError, match="not on this machine"):
        image_sets(Path("s3:/bucket"))


def test_other_folders_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg", "test/a/1.jpg")
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert [*image_sets(folder)] == ["train"]
    assert f"Not converted in {folder}: test" in caplog.text


def test_sets_of_other_classes_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/c/1.jpg")
    with pytest.raises(DataError, match=r"have different classes\.\n  given:    in one of them alone: b, c\n"):
        image_sets(folder)


CLASSES = [f"{name}/{number}.jpg" for name, count in (("a", 10), ("b", 5)) for number in range(count)]


@pytest.mark.parametrize(
    ("how", "drawn"),
    [
        ({"per_class": 3}, {"a": 3, "b": 3}),
        ({"share": 0.2}, {"a": 2, "b": 1}),
        ({"share": 0.01}, {"a": 1, "b": 1}),
        ({"share": 0.0}, {}),
    ],
    ids=["number", "share", "small share", "none"],
)
def test_a_part_of_each_class_validates(tmp_path: Path, how: dict[str, float], drawn: dict[str, int]) -> None:
    folder = folder_of(tmp_path, *CLASSES)
    sets = split_images(folder, **how)  # type: ignore[arg-type]
    assert Counter(image.text for image in sets.get("validation", [])) == drawn
    assert sorted(image.path for images in sets.values() for image in images) == sorted(CLASSES)
    assert sets == split_images(folder, **how)  # type: ignore[arg-type]
    assert {image.text: image.label for image in sets["train"]} == {"a": 1, "b": 2}


def test_the_part_is_drawn_and_the_rest_shuffled(tmp_path: Path) -> None:
    sets = split_images(folder_of(tmp_path, *CLASSES), per_class=3)
    for images in sets.values():
        paths = [image.path for image in images]
        assert paths != sorted(paths)
    assert [image.path for image in sets["validation"] if image.text == "a"] != ["a/0.jpg", "a/1.jpg", "a/2.jpg"]


def test_a_class_keeps_an_image_for_training(tmp_path: Path) -> None:
    message = r"photos/b has too few images .*\.\n  given:    5 images, 5 of them to be drawn"
    with pytest.raises(DataError, match=message):
        split_images(folder_of(tmp_path, *CLASSES), per_class=5)


@pytest.mark.parametrize("how", [{"per_class": 0}, {"share": 1.0}, {"share": -0.1}, {}])
def test_a_part_that_is_none_is_refused(tmp_path: Path, how: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"out of range|share is NoneType"):
        split_images(tmp_path, **how)  # type: ignore[arg-type]


def test_names_that_are_no_utf_8_are_kept(tmp_path: Path) -> None:
    name = b"\xff.jpg".decode(errors="surrogateescape")
    folder = folder_of(tmp_path, f"train/a/{name}")
    images = image_sets(folder)["train"]
    assert isinstance(images[0], LabelledImage)
    convert_images(folder, images, tmp_path / "out", "train", 1, settings=ALONE)
    assert plain(examples_in(tmp_path / "out" / "train-*")[0])["image/filename"] == [b"\xff.jpg"]


def test_a_broken_link_is_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg", "train/b/1.jpg")
    (folder / "train/a/2.jpg").symlink_to("gone/2.jpg")
    summary = convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=ALONE)
    assert (summary.num_records, [each.name for each in summary.skipped]) == (2, ["train/a/2.jpg"])
    assert "Skipped train/a/2.jpg: a broken link: it points to 'gone/2.jpg'" in caplog.text
    strict = Settings(num_processes=1, max_skipped=0)
    with pytest.raises(DataError, match="broken link"):
        convert_images(folder, image_sets(folder)["train"], tmp_path / "none", "train", 1, settings=strict)


def test_a_broken_link_that_is_mended_is_converted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train/a/1.jpg", "train/b/1.jpg")
    link = folder / "train/a/2.jpg"
    link.symlink_to(tmp_path / "gone.jpg")
    convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=ALONE)
    (tmp_path / "gone.jpg").write_bytes(image_bytes(9))
    again = Settings(num_processes=1, overwrite=True)
    summary = convert_images(folder, image_sets(folder)["train"], tmp_path / "out", "train", 1, settings=again)
    assert (summary.num_records, summary.skipped) == (3, ())
