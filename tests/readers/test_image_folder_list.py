"""Images without labels: which files are found, and what they are called."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from tiny_images import image_folder, photo

from lockstep.errors import DataError
from lockstep.images.decode import Decoding
from lockstep.readers.image_folder import ImageList


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two photos of each of three classes; the current folder is the one above."""
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "photos")
    return tmp_path / "photos"


def names(reader: ImageList) -> list[str]:
    return [reader.example_id(index) for index in range(len(reader))]


def test_a_folder_gives_all_images_below_it_in_the_order_of_their_paths(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    (photos / "top.JPG").write_bytes(photo(0, 0))
    for ignored in ("notes.txt", ".hidden.jpg", "red/.trash/1.jpg"):
        (photos / ignored).parent.mkdir(exist_ok=True)
        (photos / ignored).write_bytes(b"")
    (photos / "link").symlink_to(photos / "red")
    reader = ImageList("photos")
    expected = ["blue/0.jpg", "blue/1.jpg", "green/0.jpg", "green/1.jpg", "red/0.jpg", "red/1.jpg", "top.JPG"]
    assert (reader.folder, names(reader)) == ("photos", expected)
    assert caplog.messages == ["Not read in photos: .hidden.jpg, link, notes.txt, red/.trash"]


def test_files_keep_the_order_in_which_they_are_given_and_come_once(photos: Path) -> None:
    reader = ImageList(["photos/red/1.jpg", photos / "blue", "photos/red", "photos/blue/0.jpg"])
    assert reader.folder == str(photos)
    assert names(reader) == ["red/1.jpg", "blue/0.jpg", "blue/1.jpg", "red/0.jpg"]


def test_a_file_may_be_called_anything_and_be_anywhere(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "red/0.jpg").rename(photos / "no ending")
    monkeypatch.chdir(photos / "blue")
    reader = ImageList(["../no ending", "0.jpg"])
    assert names(reader) == ["../no ending", "0.jpg"]
    images = reader.read_batch(np.array([0, 1]))["image"]
    assert [image.decode().shape for image in images] == [(3, 24, 32)] * 2


def test_images_are_decoded_as_is_said(photos: Path) -> None:
    (image,) = ImageList("photos/red/0.jpg", Decoding(max_pixels=10)).read_batch(np.array([0]))["image"]
    with pytest.raises(DataError, match="too large to be decoded"):
        image.decode()


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        (["photos", "phtos"], r"phtos cannot be read\.\n.*phtos: No such file(.*\n)*.*did you mean photos"),
        (["empty"], r"There are no images\.\n.*no image in empty"),
        ([], r"There are no images\.\n.*no path"),
        (["memory://photos", "photos"], "memory://photos cannot be read"),
        (["hdfs://bucket/photos"], "hdfs://bucket/photos is in no store that is known"),
    ],
    ids=["missing", "empty", "none", "no such folder of a store", "unknown store"],
)
def test_what_holds_no_images(photos: Path, paths: list[str], what: str) -> None:
    (photos.parent / "empty").mkdir()
    with pytest.raises(DataError, match=what):
        ImageList(paths)
