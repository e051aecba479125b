"""Every reader of encoded images names what decodes them, whatever it is wrapped in: it can change bits."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from tiny_images import image_folder, image_shards, photo

from lockstep.images.decode import Decoding
from lockstep.readers.classification import ClassificationReader
from lockstep.readers.combine import Concatenated, OnlyFields, Subset
from lockstep.readers.open import open_source
from lockstep.readers.reader import Reader, decoder_of

FIXTURES = Path(__file__).parent.parent / "fixtures"


def tar_shard(folder: Path) -> str:
    with tarfile.open(folder / "some.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (("a.jpg", photo(0, 0)), ("a.cls", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
    return str(folder / "some.tar")


SOURCES: dict[str, Callable[[Path], str]] = {
    "folders": lambda folder: str(image_folder(folder / "photos")),
    "records": lambda folder: image_shards(folder, "train", [1, 2]),
    "tar": tar_shard,
    "voc": lambda folder: str(FIXTURES / "voc/bccd"),
    "coco": lambda folder: f"{FIXTURES}/coco/instances.json:{FIXTURES}/coco/images",
    "coco_keypoints": lambda folder: f"{FIXTURES}/coco/person_keypoints.json:{FIXTURES}/coco/images",
}


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_images_are_decoded_as_asked(tmp_path: Path, kind: str, everything: bool) -> None:
    decoding = Decoding("pillow", max_pixels=1_000_000)
    reader = open_source(SOURCES[kind](tmp_path), everything=everything, decoding=decoding)
    assert decoder_of(reader) == decoding.chosen
    assert decoder_of(reader).startswith("pillow ")
    assert {image.decoding for image in reader.read_batch(np.array([0]))["image"]} == {decoding}


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda reader: ClassificationReader(reader, 3),
        lambda reader: Subset(reader, [0]),
        lambda reader: OnlyFields(reader, ["image"]),
        lambda reader: Concatenated([reader, reader]),
    ],
    ids=["labelled", "subset", "only_fields", "concatenated"],
)
def test_a_reader_around_it_says_the_same(tmp_path: Path, wrapped: Callable[[Reader], Reader]) -> None:
    reader = open_source(SOURCES["folders"](tmp_path), decoding=Decoding("pillow"))
    assert decoder_of(wrapped(reader)) == decoder_of(reader)
