from __future__ import annotations

import os
from contextlib import closing
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.images.jpeg import turbojpeg
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.reader import Reader


def image_bytes(shade: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (4, 3), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


def folder_of(tmp_path: Path, *names: str) -> Path:
    """A folder with an image of each name, of the shades 0, 1, ..."""
    for shade, name in enumerate(names):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(shade))
    return tmp_path / "images"


def file_with(tmp_path: Path, text: str) -> Path:
    (tmp_path / "labels.txt").write_text(text)
    return tmp_path / "labels.txt"


def ids_of(reader: Reader) -> list[str]:
    return [reader.example_id(index) for index in range(len(reader))]


def test_each_folder_is_a_class(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "tulips/b.JPG", "daisy/2.png", "daisy/10.jpeg", "roses/a.webp")
    reader = ImageFolder(folder)
    assert (len(reader), reader.cost) == (4, "decode")
    assert reader.classes == ("daisy", "roses", "tulips")
    assert ids_of(reader) == ["daisy/10.jpeg", "daisy/2.png", "roses/a.webp", "tulips/b.JPG"]


def test_a_batch_holds_encoded_images_and_labels(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a/0.png", "a/1.png", "b/2.png")
    decoding = Decoding("pillow", max_pixels=100)
    batch = ImageFolder(folder, decoding=decoding).read_batch(np.array([2, 0, 2]))
    assert batch["label"].dtype == torch.int64
    assert batch["label"].tolist() == [1, 0, 1]
    path = f"{folder}/b/2.png"
    assert batch["image"][0] == EncodedImage(image_bytes(2), path, decoding)
    assert [int(image.decode()[0, 0, 0]) for image in batch["image"]] == [2, 0, 2]


def test_the_folder_may_be_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_of(tmp_path, "a/b/0.png"))
    reader = ImageFolder(Path())
    assert ids_of(reader) == ["a/b/0.png"]
    assert len(reader.read_batch(np.array([0]))["image"]) == 1


def test_a_file_of_labels_gives_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, "a/0.png", "b/1.png", "b/2.png", "c/3.png")
    reader = ImageFolder(folder, file_with(tmp_path, "c\nb\n"))
    assert reader.classes == ("c", "b")
    assert ids_of(reader) == ["c/3.png", "b/1.png", "b/2.png"]
    assert reader.read_batch(np.arange(3))["label"].tolist() == [0, 1, 1]
    assert caplog.messages == [f"Not read in {folder}: a"]


def test_a_part_of_the_data_may_lack_classes_that_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, "c/3.png", "b/x.txt")
    reader = ImageFolder(folder, ("a", "b", "../images", "c"))
    assert reader.counts == {"a": 0, "b": 0, "../images": 0, "c": 1}
    assert ids_of(reader) == ["c/3.png"]
    assert reader.read_batch(np.arange(1))["label"].tolist() == [3]
    assert caplog.messages[0] == f"There are no images of a, b, ../images in {folder}"


def test_with_a_background_labels_begin_at_1(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a/0.png", "b/1.png")
    for labels in (None, file_with(tmp_path, "a\nb\n")):
        reader = ImageFolder(folder, labels, background=True)
        assert reader.classes == ("background", "a", "b")
        assert reader.read_batch(np.arange(2))["label"].tolist() == [1, 2]


def test_images_below_a_folder_are_of_its_class(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a/z.png", "a/x/1.png", "a/x/y/0.png", "b/0.png")
    reader = ImageFolder(folder)
    assert reader.classes == ("a", "b")
    assert ids_of(reader) == ["a/x/1.png", "a/x/y/0.png", "a/z.png", "b/0.png"]


def test_what_is_not_read_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("notes.txt", ".git/0.png", "a/.0.png", "a/b.csv", "a/.thumbs/1.png", "a/c/.hidden", "a/c/d.jpg.bak")
    folder = folder_of(tmp_path, "a/0.png", *names)
    (folder / "a" / "again").symlink_to(folder / "a")
    assert ids_of(ImageFolder(folder)) == ["a/0.png"]
    first = ".git, a/.0.png, a/.thumbs, a/again, a/b.csv"
    assert caplog.messages == [f"Not read in {folder}: {first} and 3 more"]


def test_linked_classes_and_images_are_read(tmp_path: Path) -> None:
    elsewhere = folder_of(tmp_path, "a/0.png")
    linked = tmp_path / "linked"
    (linked / "b").mkdir(parents=True)
    (linked / "a").symlink_to(elsewhere / "a")
    (linked / "b" / "1.png").symlink_to(elsewhere / "a" / "0.png")
    assert ids_of(ImageFolder(linked)) == ["a/0.png", "b/1.png"]


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.png")
    reader = ImageFolder(folder_of(tmp_path, f"\N{SNOWMAN}/{name}"))
    assert ids_of(reader) == [f"\N{SNOWMAN}/{name}"]
    assert int(reader.read_batch(np.array([0]))["image"][0].decode().sum()) == 0


@pytest.mark.parametrize(
    ("names", "labels", "given_", "expected"),
    [
        ((), None, "[Errno 2] No such file or directory", "a folder of folders that may be read"),
        (("0.png", "1.png"), None, "only 0.png, 1.png", "a folder for each class"),
        (("a/0.png", "b/x.txt", "c/y.txt"), None, "no images in b, c", "one .jpg, .jpeg, .jpe, .png, .webp"),
        (("a/0.png",), "b\n../images\n", "no folder b, ../images", "a folder for each label"),
    ],
)
def test_a_folder_without_classes_is_refused(
    tmp_path: Path, names: tuple[str, ...], labels: str | None, given_: str, expected: str
) -> None:
    folder_of(tmp_path, *names)
    with pytest.raises(DataError) as caught:
        ImageFolder(tmp_path / "images", file_with(tmp_path, labels) if labels else None)
    error = caught.value
    assert error.what == f"{tmp_path / 'images'} is no folder of images with a folder for each class."
    assert str(error.given).startswith(given_)
    assert str(error.expected).startswith(expected)
    assert error.hint == "name the folder above those of the classes; put the images of each class into one folder"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="an empty folder"):
        ImageFolder(tmp_path)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "a/b/0.png")
    listed = os.scandir

    def scandir(path: str) -> object:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"\[Errno 13\] Permission denied: .*a/b"):
        ImageFolder(folder)


def test_an_image_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a/0.png", "a/1.png")
    reader = ImageFolder(folder)
    (folder / "a/1.png").unlink()
    with pytest.raises(DataError) as caught:
        reader.read_batch(np.arange(2))
    assert caught.value.what == f"{folder}/a/1.png cannot be read."
    assert "No such file" in str(caught.value.given)
    assert caught.value.expected == "the image that was there when the folder was listed"
    assert caught.value.hint == "put it back, or begin again with the folder as it is now"


def test_the_decoder_is_loaded_before_loader_processes_are_forked(tmp_path: Path) -> None:
    turbojpeg.cache_clear()
    reader = ImageFolder(folder_of(tmp_path, "a/0.png"))
    assert turbojpeg.cache_info().currsize == 1
    assert reader.decoder == Decoding().chosen


@pytest.mark.process
@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_loader_reads_it(tmp_path: Path, num_processes: int) -> None:
    folder = folder_of(tmp_path, *(f"{'ab'[shade % 2]}/{shade}.png" for shade in range(6)))
    loader = Loader(ImageFolder(folder), batch_size=4, seed=3, num_processes=num_processes)
    with closing(loader.batches(range(2), 2)) as batches:
        shades = [int(image.decode()[0, 0, 0]) for _ in range(3) for image in next(batches)["image"]]
    assert sorted(shades[:6]) == sorted(shades[6:]) == list(range(6))
    assert [name.split("/")[1] for name in loader.example_ids(0, 12)] == [f"{shade}.png" for shade in shades]
