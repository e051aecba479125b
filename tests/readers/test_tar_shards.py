from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.readers.reader import Reader
from lockstep.readers.tar_shards import TarShards


def image_bytes(shade: int, image_format: str = "PNG") -> bytes:
    file = BytesIO()
    Image.new("L", (3, 2), shade).save(file, image_format)
    return file.getvalue()


def shard_of(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    return path


def sample(key: str, shade: int) -> dict[str, bytes]:
    return {
        f"{key}.png": image_bytes(shade),
        f"{key}.cls": str(shade).encode(),
        f"{key}.json": json.dumps({"shade": [shade]}).encode(),
        f"{key}.txt": f"grün {shade}\n".encode(),
        f"{key}.npy": bytes([shade]),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return shard_of(tmp_path / "a.tar", {**sample("0001", 1), **sample("0002", 2), **sample("x/0001", 3)})


def read(reader: TarShards, *indices: int) -> dict[str, Any]:
    return reader.read_batch(np.array(indices, dtype=np.int64))


def test_endings_say_what_members_hold(path: Path) -> None:
    decoding = Decoding("pillow")
    reader = TarShards(path, decoding=decoding)
    protocol: Reader = reader
    batch = read(reader, 2, 0, 2)
    assert (len(protocol), protocol.cost) == (3, "decode")
    assert [*batch] == ["image", "label", "json", "txt", "npy"]
    assert batch["image"][0] == EncodedImage(image_bytes(3), f"{path}: x/0001.png", decoding)
    assert [int(image.decode()[0, 0, 0]) for image in batch["image"]] == [3, 1, 3]
    assert batch["label"].dtype == torch.int64
    assert batch["label"].tolist() == [3, 1, 3]
    assert batch["json"] == [{"shade": [3]}, {"shade": [1]}, {"shade": [3]}]
    assert batch["txt"] == ["grün 3\n", "grün 1\n", "grün 3\n"]
    assert batch["npy"] == [b"\x03", b"\x01", b"\x03"]


def test_examples_are_named_by_shard_and_key(path: Path) -> None:
    reader = TarShards([path, shard_of(path.with_name("b.tar"), {"7.cls": b"7", "7.a.b.jpg": b""})], {"label": "cls"})
    assert [reader.example_id(index) for index in range(4)] == [
        "a.tar: 0001",
        "a.tar: 0002",
        "a.tar: x/0001",
        "b.tar: 7",
    ]
    assert read(reader, 3, 1)["label"].tolist() == [7, 2]


def test_fields_are_chosen_and_named_by_endings(tmp_path: Path) -> None:
    files = {"1.JPG": b"one", "1.seg.png": b"mask", "1.cls": b" 5\n", "2.png": b"two", "2.seg.png": b"", "2.cls": b"-1"}
    reader = TarShards(
        shard_of(tmp_path / "a.tar", files), {"pixels": "jpeg;jpg;PNG", "mask": "seg.png", "target": "cls"}
    )
    batch = read(reader, 0, 1)
    assert [*batch] == ["pixels", "mask", "target"]
    assert [image.data for image in batch["pixels"]] == [b"one", b"two"]
    assert [image.source for image in batch["mask"]] == [f"{tmp_path}/a.tar: 1.seg.png", f"{tmp_path}/a.tar: 2.seg.png"]
    assert batch["target"].tolist() == [5, -1]


def test_by_default_an_image_may_have_any_format(tmp_path: Path) -> None:
    path = shard_of(tmp_path / "a.tar", {"1.jpg": b"one", "2.webp": b"two", "2.txt": b"", "3.PNG": b"three"})
    assert [image.data for image in read(TarShards(path), 0, 1, 2)["image"]] == [b"one", b"two", b"three"]


def test_ranges_and_patterns_name_the_shards(tmp_path: Path) -> None:
    for number in range(12):
        shard_of(tmp_path / f"train-{number:06}.tar", {"0.cls": str(number).encode()})
    ranged = TarShards(f"{tmp_path}/train-{{000008..000011}}.tar")
    assert read(ranged, *range(len(ranged)))["label"].tolist() == [8, 9, 10, 11]
    mixed = TarShards([f"{tmp_path}/train-00000[01].tar", tmp_path / "train-{000003..000004}.tar"])
    assert read(mixed, *range(len(mixed)))["label"].tolist() == [0, 1, 3, 4]
    with pytest.raises(DataError, match=r"train-000012\.tar cannot be opened"):
        TarShards(f"{tmp_path}/train-{{000010..000012}}.tar")


def test_a_sample_without_a_field_is_named(path: Path) -> None:
    more = shard_of(path.with_name("b.tar"), {"x/1.jpg": b"", "x/1.txt": b"", "1.cls": b"1"})
    reader = TarShards([path, more], {"label": "cls", "image": "png;jpg"})
    with pytest.raises(DataError) as caught:
        read(reader, 0, 3)
    assert caught.value.what == f"The sample 'x/1' of {more} has no 'label'."
    assert caught.value.given == "members that end in jpg, txt"
    assert caught.value.expected == "one that ends in cls"
    assert "tar --sort=name" in caught.value.hint
    with pytest.raises(DataError, match=r"expected: one that ends in png or jpg"):
        read(reader, 4)


def test_two_members_of_the_first_sample_for_one_field_are_refused(tmp_path: Path) -> None:
    path = shard_of(tmp_path / "a.tar", {"1.jpg": b"", "1.png": b""})
    with pytest.raises(DataError) as caught:
        TarShards(path)
    assert caught.value.what == f"Two members of the sample '1' of {path} would be the field 'image'."
    assert caught.value.given == "the endings jpg and png"
    assert caught.value.hint == 'choose the fields: fields={"image": "jpg", ...}'
    assert len(TarShards(path, {"image": "jpg", "mask": "png"})) == 1


@pytest.mark.parametrize("fields", [{}, {"image": ""}, {"image": "jpg;;png"}, {"image": 3}], ids=str)
def test_fields_without_endings_are_refused(path: Path, fields: Any) -> None:
    with pytest.raises(InputError) as caught:
        TarShards(path, fields)
    assert caught.value.what == "The fields of a sample are chosen by the endings of its members."
    assert caught.value.given == f"fields={fields}"
    assert caught.value.hint == 'write {"image": "jpg;png", "label": "cls"}'


def test_fields_that_are_no_mapping_are_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"fields is of the wrong type[\s\S]*the endings of each field, by its name"):
        TarShards(path, ["jpg"])  # type: ignore[arg-type]


def test_endings_of_one_field_hold_one_kind_of_thing(path: Path) -> None:
    with pytest.raises(InputError) as caught:
        TarShards(path, {"x": "png;cls"})
    assert caught.value.what == "The endings of the field 'x' hold different things."
    assert caught.value.given == "png;cls: image, label"
    assert caught.value.expected == "endings of one kind, such as jpg;png"
    assert caught.value.hint == "make a field of each"


@pytest.mark.parametrize(
    ("name", "content", "given_", "expected"),
    [
        ("1.cls", b"cat", "invalid literal for int() with base 10: 'cat'", "a whole number"),
        ("1.cls", b"1_000", "the label '1_000'", "a whole number"),
        ("1.cls", b"9223372036854775808", "9223372036854775808 does not fit into 64 bits", "a whole number"),
        ("1.txt", b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte", "text in UTF-8"),
        ("1.json", b"{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", "JSON"),
        ("1.json", b"[" * 100_000, None, "JSON"),
    ],
    ids=["word", "thousand", "large", "binary", "half", "deep"],
)
def test_a_member_that_does_not_hold_what_its_ending_says_is_named(
    tmp_path: Path, name: str, content: bytes, given_: str | None, expected: str
) -> None:
    path = shard_of(tmp_path / "a.tar", {name: content})
    with pytest.raises(DataError) as caught:
        read(TarShards(path), 0)
    assert caught.value.what == f"{path}: {name} cannot be used."
    assert given_ is None or caught.value.given == given_
    assert caught.value.expected == expected
    assert caught.value.hint == "repair it, or choose other fields"


def test_text_of_more_than_16_mb_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.readers.tar_shards._LARGEST_TEXT_BYTES", 3)
    path = shard_of(tmp_path / "a.tar", {"1.json": b"1234", "1.txt": b"123", "1.bin": b"12345"})
    assert read(TarShards(path, {"text": "txt", "data": "bin"}), 0) == {"text": ["123"], "data": [b"12345"]}
    with pytest.raises(DataError, match=r"1\.json cannot be used\.\n +given: +4 bytes\n +expected: at most 3 bytes"):
        read(TarShards(path, {"json": "json"}), 0)


def test_shards_without_samples_hold_no_examples(tmp_path: Path) -> None:
    reader = TarShards(shard_of(tmp_path / "a.tar", {}))
    assert len(reader) == 0
    with pytest.raises(DataError, match="The reader holds no examples"):
        Loader(reader, batch_size=1)


def test_a_shard_that_has_changed_is_refused(path: Path) -> None:
    reader = TarShards(path)
    shard_of(path, sample("0001", 9))
    with pytest.raises(DataError, match=f"{path} has changed since"):
        read(reader, 0)


def test_a_shard_that_is_cut_short_while_it_is_open_is_refused(tmp_path: Path) -> None:
    path = shard_of(tmp_path / "a.tar", {f"{number}.bin": bytes(3000) for number in range(6)})
    reader = TarShards(path)
    assert [len(data) for data in read(reader, 0, 5)["bin"]] == [3000, 3000]
    os.truncate(path, 8000)
    with pytest.raises(DataError, match=rf"{path} has changed since[\s\S]*given: +8000 bytes"):
        read(reader, 5)


def test_a_shard_replaced_by_one_of_its_size_and_time_is_refused(tmp_path: Path) -> None:
    names = [f"{number}.bin" for number in range(4)]
    path = shard_of(tmp_path / "a.tar", {name: name.encode() for name in names})
    os.utime(path, (10**9, 10**9))
    reader = TarShards(path)
    middle = [names[number] for number in (0, 2, 1, 3)]
    os.utime(shard_of(path, {name: name.encode() for name in middle}), (10**9, 10**9))
    assert read(reader, 0, 3)["bin"] == [b"0.bin", b"3.bin"]
    with pytest.raises(DataError) as caught:
        read(reader, 1)
    assert caught.value.what == f"{path} is another archive than the one that its index was made of."
    assert caught.value.given == "another header before the content of '1.bin', at byte 1536"
    assert caught.value.expected == "the archive that was there, or another time of change"
    assert caught.value.hint.endswith("if it was replaced before, touch it and start again")


def test_a_kept_index_of_another_shard_of_its_size_and_time_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.records.tar_members._WORTH_KEEPING_BYTES", 1)
    path = tmp_path / "a.tar"
    for digits in ("0123", "3210"):
        os.utime(shard_of(path, {f"{digit}.cls": digit.encode() for digit in digits}), (10**9, 10**9))
        reader = TarShards(path)
        assert [reader.example_id(index) for index in range(4)] == [f"a.tar: {digit}" for digit in digits]
        assert read(reader, 0, 1, 2, 3)["label"].tolist() == [int(digit) for digit in digits]


def test_of_no_samples_labels_are_whole_numbers(path: Path) -> None:
    batch = read(TarShards(path))
    assert (batch["label"].dtype, batch["label"].shape, batch["image"]) == (torch.int64, (0,), [])


def test_an_index_that_was_kept_is_used(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.records.tar_members._WORTH_KEEPING_BYTES", 1)
    first = read(TarShards(path, cache=tmp_path / "mine"), 0, 1, 2)
    assert len(list((tmp_path / "mine" / "record-index").iterdir())) == 1
    monkeypatch.setattr("lockstep.records.tar_members.build_tar_index", None)
    again = read(TarShards(path, cache=tmp_path / "mine"), 0, 1, 2)
    assert again["image"] == first["image"]


@pytest.mark.process
def test_shards_may_be_forked_and_pickled(path: Path) -> None:
    reader = TarShards(path, {"label": "cls"})
    assert read(reader, 0)["label"].tolist() == [1]
    assert read(pickle.loads(pickle.dumps(reader)), 1)["label"].tolist() == [2]

    def read_there() -> None:
        assert read(reader, 2, 0)["label"].tolist() == [3, 1]

    process = multiprocessing.get_context("fork").Process(target=read_there)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_the_decoder_is_that_of_the_images(path: Path) -> None:
    assert TarShards(path, {"label": "cls"}).decoder == "none"
    assert TarShards(path, decoding=Decoding("pillow")).decoder == Decoding("pillow").chosen


def test_a_loader_reads_every_sample_once_an_epoch(tmp_path: Path) -> None:
    for number in range(3):
        shard_of(tmp_path / f"{number}.tar", {f"{i}.cls": str(10 * number + i).encode() for i in range(number, 4)})
    loader = Loader(TarShards(f"{tmp_path}/{{0..2}}.tar"), batch_size=3, num_processes=0)
    batches = loader.batches(range(1), 1)
    stream = [label for _ in range(3) for label in next(batches)["label"].tolist()]
    assert loader.epoch_size == 9
    assert sorted(stream) == [0, 1, 2, 3, 11, 12, 13, 22, 23]
