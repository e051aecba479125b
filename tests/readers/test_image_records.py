from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
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
from lockstep.readers.combine import one_of
from lockstep.readers.image_records import ImageRecords, ParsedExample, boxes_of
from lockstep.readers.schemas import ImageNetSchema
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import frame, write_records

CIFAR = Path(__file__).parent.parent / "fixtures" / "schemas" / "cifar10_test-first-3.tfrecord"
BOXES = "image/object/bbox/"


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def png(shade: int) -> bytes:
    file = BytesIO()
    Image.new("L", (4, 3), shade).save(file, "PNG")
    return file.getvalue()


def payload(shade: int, **features: Any) -> bytes:
    return serialize_example({"image/encoded": [png(shade)], "image/class/label": np.array([shade]), **features})


def parsed(**features: Any) -> ParsedExample:
    return ParsedExample(features, "Record 3 of x, at byte 5,", Decoding(), lambda: serialize_example(features))


@dataclass(frozen=True)
class Shades:
    """Decodes, and asks for what is there in some records only."""

    @property
    def features(self) -> frozenset[str]:
        return frozenset({"image/encoded", "extra"})

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        shades = [int(example.image("image/encoded").decode()[0, 0, 0]) for example in examples]
        return {"shade": torch.tensor(shades), "extra": [example.text("extra") for example in examples]}


def test_records_of_several_files_follow_one_another(tmp_path: Path) -> None:
    for shard in range(2):
        write_records(tmp_path / f"train-{shard}-of-2", [payload(10 * shard + number) for number in range(3)])
    reader = ImageRecords(tmp_path / "train-*", ImageNetSchema())
    assert (len(reader), reader.cost) == (6, "decode")
    assert [reader.example_id(index) for index in (0, 5)] == ["train-0-of-2:0", "train-1-of-2:2"]
    batch = reader.read_batch(np.array([4, 0, 4]))
    assert batch["label"].tolist() == [11, 0, 11]
    assert [int(image.decode()[0, 0, 0]) for image in batch["image"]] == [11, 0, 11]


def test_images_are_named_and_decoded_as_the_reader_says(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [payload(1), payload(2)])
    decoding = Decoding("pillow", max_pixels=100)
    (image,) = ImageRecords(tmp_path / "a", ImageNetSchema(), decoding=decoding).read_batch(np.array([1]))["image"]
    start = len(frame(payload(1)))
    assert image == EncodedImage(png(2), f"Record 1 of {tmp_path}/a, at byte {start},", decoding)


def test_the_first_of_every_n_records_may_be_taken(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [payload(number) for number in range(5)])
    reader = ImageRecords(tmp_path / "a", ImageNetSchema())
    for n, labels in ((1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])):
        some = one_of(reader, n)
        assert some.read_batch(np.arange(len(some)))["label"].tolist() == labels


def test_a_schema_may_be_anybodys(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [payload(7, extra=["é".encode()]), payload(8)])
    batch = ImageRecords(tmp_path / "a", Shades()).read_batch(np.arange(2))
    assert batch["shade"].tolist() == [7, 8]
    assert batch["extra"] == ["é", ""]


@pytest.mark.process
def test_loader_processes_read_them(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [payload(number) for number in range(4)])
    loader = Loader(ImageRecords(tmp_path / "a", Shades()), batch_size=4, num_processes=1)
    with closing(loader.batches(range(1), 1)) as batches:
        assert sorted(next(batches)["shade"].tolist()) == [0, 1, 2, 3]


def test_no_files_are_no_examples() -> None:
    assert len(ImageRecords([], ImageNetSchema())) == 0


@pytest.mark.parametrize("name", ["a.gz", "a"])
def test_a_reader_may_be_pickled(tmp_path: Path, name: str) -> None:
    write_records(tmp_path / name, [payload(5)], "gzip" if name.endswith("gz") else None)
    reader = pickle.loads(pickle.dumps(ImageRecords(tmp_path / name, ImageNetSchema())))
    assert reader.read_batch(np.array([0]))["label"].tolist() == [5]


@pytest.mark.parametrize("schema", [ImageNetSchema, {"image": "image/encoded"}, None])
def test_what_is_no_schema_is_refused(tmp_path: Path, schema: Any) -> None:
    write_records(tmp_path / "a", [payload(0)])
    with pytest.raises(InputError) as caught:
        ImageRecords(tmp_path / "a", schema)
    assert caught.value.what == "schema is of the wrong type."
    assert caught.value.hint == "give one such as ImageNetSchema(boxes=True)"


def test_damage_is_found_unless_checksums_are_not_verified(tmp_path: Path) -> None:
    damaged = bytearray(frame(payload(3)))
    damaged[-1] ^= 1
    (tmp_path / "a").write_bytes(damaged)
    with pytest.raises(DataError, match=f"Record 0 of {tmp_path}/a, at byte 0, is damaged."):
        ImageRecords(tmp_path / "a", ImageNetSchema()).read_batch(np.array([0]))
    batch = ImageRecords(tmp_path / "a", ImageNetSchema(), verify=False).read_batch(np.array([0]))
    assert batch["label"].tolist() == [3]


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [b"\xff"])
    with pytest.raises(DataError, match=f"Record 0 of {tmp_path}/a, at byte 0, is not a tf.train.Example."):
        ImageRecords(tmp_path / "a", ImageNetSchema()).read_batch(np.array([0]))


def test_a_file_of_another_schema_is_told_by_its_features(tmp_path: Path) -> None:
    shutil.copy(CIFAR, tmp_path / CIFAR.name)
    with pytest.raises(DataError) as caught:
        ImageRecords(tmp_path / CIFAR.name, ImageNetSchema()).read_batch(np.array([0]))
    assert (
        caught.value.what == f"Record 0 of {tmp_path}/{CIFAR.name}, at byte 0, has no usable feature 'image/encoded'."
    )
    assert (caught.value.given, caught.value.expected) == ("the features id, image, label", "1 encoded image")
    assert caught.value.hint.startswith("name the feature that holds it, read the file by another schema")


def test_not_all_of_many_features_are_named() -> None:
    example = parsed(**{f"{number:02}": [] for number in range(25)})
    with pytest.raises(DataError, match=r"given:    the features 00, 01, .*, 18, 19 and 5 more") as caught:
        example.image("image")
    assert "20," not in caught.value.given
    with pytest.raises(DataError, match=r"given:    the features \(none\)"):
        parsed().image("image")


ONE, TWO = np.array([0.5], np.float32), np.array([0.25, 0.5], np.float32)


@pytest.mark.parametrize(
    ("value", "ask", "given_", "expected"),
    [
        ([b"a", b"b"], lambda example: example.image("x"), "2 values of bytes", "1 encoded image"),
        ([b"a"], lambda example: example.images("x", 2), "1 values of bytes", "2 encoded images"),
        (ONE, lambda example: example.image("x"), "1 values of float32", "byte strings"),
        (ONE, lambda example: example.integer("x"), "1 values of float32", "values of int64"),
        ([], lambda example: example.integer("x", 3), "0 values of bytes", "values of int64"),
        (np.arange(2), lambda example: example.integer("x", 3), "2 values of int64", "one int64"),
        (np.arange(0), lambda example: example.integer("x"), "0 values of int64", "one int64"),
        (np.arange(2), lambda example: example.float32s("x"), "2 values of int64", "values of float32"),
        (TWO, lambda example: example.float32s("x", 3), "2 values of float32", "3 values of float32, or none"),
        (np.arange(3), lambda example: example.int64s("x", 0), "3 values of int64", "0 values of int64, or none"),
        ([b"a", b"b"], lambda example: example.text("x"), "2 values of bytes", "one text"),
        ([], lambda example: example.text("x"), "0 values of bytes", "one text"),
        (ONE, lambda example: example.texts("x"), "1 values of float32", "byte strings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_feature_that_is_not_as_asked_for_is_named(value: Any, ask: Any, given_: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        ask(parsed(x=value))
    assert caught.value.what == "Record 3 of x, at byte 5, has no usable feature 'x'."
    assert (caught.value.given, caught.value.expected) == (given_, expected)


def test_a_missing_feature_has_no_values() -> None:
    example = parsed(there=np.arange(1))
    assert (example.text("x"), example.texts("x"), example.byte_strings("x"), example.integer("x", 9)) == (
        "",
        [],
        [],
        9,
    )
    assert example.int64s("x", 4).dtype == np.int64
    assert example.float32s("x", 4).dtype == np.float32
    assert len(example.int64s("x", 4)) == len(example.float32s("x", 4)) == 0


def test_texts_that_are_not_utf8_are_read_all_the_same() -> None:
    assert parsed(x=[b"a\xff", "ü".encode()]).texts("x") == ["a\N{REPLACEMENT CHARACTER}", "ü"]


def boxed(*boxes: Sequence[float]) -> ParsedExample:
    """An example with boxes of top, left, bottom and right."""
    columns = np.array(boxes, np.float32).reshape(-1, 4).T
    return parsed(
        **{BOXES + edge: values for edge, values in zip(("ymin", "xmin", "ymax", "xmax"), columns, strict=True)}
    )


def test_boxes_are_top_left_bottom_and_right() -> None:
    first, second, third, fourth = boxes_of(
        [boxed((0, 0.25, 0.5, 1)), boxed(), boxed((0.5, 0.5, 0.5, 0.5), (0, 0, 1, 1)), parsed()], BOXES
    )
    assert first.tolist() == [[0, 0.25, 0.5, 1]]
    assert third.tolist() == [[0.5, 0.5, 0.5, 0.5], [0, 0, 1, 1]]
    for none in (second, fourth):
        assert none.shape == (0, 4)
        assert none.dtype == torch.float32


def test_boxes_that_end_a_little_outside_are_clipped() -> None:
    (boxes,) = boxes_of([boxed((-0.0625, 0.25, 1.0625, 1.09), (0.5, -0.01, 0.75, 0.5))], BOXES)
    assert boxes.tolist() == [[0, 0.25, 1, 1], [0.5, 0, 0.75, 0.5]]


@pytest.mark.parametrize(
    ("box", "edge"),
    [
        ((0.5, 0, 0.25, 1), "ymin"),
        ((0, 0.5, 1, 0.25), "xmin"),
        ((-0.5, 0, 1, 1), "ymin"),
        ((12, 40, 200, 300), "ymin"),
        ((0, 0, 0.5, float("nan")), "xmax"),
        ((0, float("inf"), 1, float("inf")), "xmin"),
    ],
)
def test_a_box_that_is_none_is_named(box: tuple[float, ...], edge: str) -> None:
    with pytest.raises(DataError) as caught:
        boxes_of([parsed(), boxed((0, 0, 1, 1), box)], BOXES)
    assert caught.value.what == f"Record 3 of x, at byte 5, has no usable feature '{BOXES}{edge}'."
    assert caught.value.given == "a box of top, left, bottom and right " + ", ".join(f"{share:g}" for share in box)
    assert caught.value.expected == (
        "shares of height and width from 0 to 1, the top before the bottom and the left before the right"
    )


def test_the_record_of_a_box_that_is_none_is_the_right_one() -> None:
    good = boxed((0, 0, 1, 1), (0, 0, 0.5, 0.5))
    wrong = ParsedExample(boxed((0, 0, 9, 9)).features, "Record 9 of y, at byte 1,", Decoding(), bytes)
    with pytest.raises(DataError, match="Record 9 of y, at byte 1, has no usable feature"):
        boxes_of([parsed(), good, parsed(), wrong, good], BOXES)


def test_the_edges_of_boxes_must_be_equally_many() -> None:
    example = parsed(**{BOXES + "ymin": TWO, BOXES + "ymax": TWO, BOXES + "xmin": ONE, BOXES + "xmax": TWO})
    with pytest.raises(DataError) as caught:
        boxes_of([example], BOXES)
    assert caught.value.what == f"Record 3 of x, at byte 5, has no usable feature '{BOXES}xmin'."
    assert caught.value.given == "1 values of float32"
    assert caught.value.expected == "2 values of float32, as many as of another edge"
