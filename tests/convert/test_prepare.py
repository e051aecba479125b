from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, JpegImagePlugin
from torch.nn.functional import interpolate

from lockstep.convert.prepare import Preparation, prepare, prepared_record
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.records.example import Values, parse_example, serialize_example
from lockstep.records.record_files import RecordFiles
from lockstep.records.tfrecord import Compression, write_records

PHOTO = (Path(__file__).parent.parent / "fixtures" / "images" / "hopper.jpg").read_bytes()
RECORDS = [serialize_example({"image/encoded": [PHOTO], "image/class/text": [b"%d" % i]}) for i in range(5)]
TINY = Preparation(16)
ALONE = Settings(num_processes=1)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A pattern of two shards, of three records and of two."""
    write_records(tmp_path / "in" / "train-00000-of-00002", RECORDS[:3])
    write_records(tmp_path / "in" / "train-00001-of-00002", RECORDS[3:])
    return tmp_path / "in" / "train-*"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_there_are_as_many_shards_with_all_records_in_their_order(shards: Path, tmp_path: Path) -> None:
    done = prepare(shards, tmp_path / "out", TINY, settings=ALONE)
    files = contents(tmp_path / "out")
    assert sorted(files) == ["train-00000-of-00002", "train-00001-of-00002"]
    found = RecordFiles(tmp_path / "out" / "train-*")
    assert [found.read(i) for i in range(len(found))] == [prepared_record(record, TINY) for record in RECORDS]
    assert (done.summary.num_records, done.summary.num_bytes) == (5, sum(map(len, files.values())))
    assert done.num_bytes_before == sum(map(len, contents(shards.parent).values()))


@pytest.mark.process
def test_processes_write_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    prepare(shards, tmp_path / "one", TINY, settings=ALONE)
    prepare(shards, tmp_path / "two", TINY, settings=Settings(num_processes=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "compression", "base", "written"),
    [
        ("pets.record", None, None, "pets-00000-of-00001"),
        ("data-00000-of-00001.gz", "gzip", None, "data-00000-of-00001"),
        ("pets.record", None, "val", "val-00000-of-00001"),
    ],
    ids=["no shard", "compressed", "named"],
)
def test_shards_keep_their_name(
    name: str, compression: Compression | None, base: str | None, written: str, tmp_path: Path
) -> None:
    write_records(tmp_path / "in" / name, RECORDS[:1], compression)
    prepare(tmp_path / "in" / name, tmp_path / "out", TINY, base=base, settings=ALONE)
    assert contents(tmp_path / "out").keys() == {written}


def test_shards_of_two_names_need_one(tmp_path: Path) -> None:
    paths = [tmp_path / "in" / "a.record", tmp_path / "in" / "b.record"]
    for path in paths:
        write_records(path, RECORDS[:1])
    with pytest.raises(InputError) as caught:
        prepare(paths, tmp_path / "out", TINY, settings=ALONE)
    assert caught.value.what == "The shards have no name in common."
    assert caught.value.given == "a, b"
    assert prepare(paths, tmp_path / "out", TINY, base="both", settings=ALONE).summary.num_shards == 2


def test_the_folder_of_the_shards_is_refused(shards: Path, tmp_path: Path) -> None:
    before = contents(shards.parent)
    link = tmp_path / "link"
    link.symlink_to(shards.parent)
    for output in (shards.parent, link):
        with pytest.raises(InputError) as caught:
            prepare(shards, output, TINY, settings=ALONE)
        assert caught.value.what == "Prepared shards cannot be written among those that they are made of."
        assert caught.value.given == f"the folder {output}, which holds train-00000-of-00002"
    assert contents(shards.parent) == before


def test_another_preparation_and_other_shards_are_another_conversion(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    prepare(shards, output, TINY, settings=ALONE)
    assert prepare(shards, output, TINY, settings=ALONE).summary.num_kept == 2
    with pytest.raises(DataError, match="There are shards in"):
        prepare(shards, output, Preparation(32), settings=ALONE)
    shutil.copytree(shards.parent, tmp_path / "copy")
    write_records(tmp_path / "copy" / "train-00001-of-00002", RECORDS[:2])
    with pytest.raises(DataError, match="There are shards in"):
        prepare(tmp_path / "copy" / "train-*", output, TINY, settings=ALONE)


def test_a_record_that_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.record"
    write_records(path, [RECORDS[0], serialize_example({"label": [b"no image"]})])
    with pytest.raises(DataError) as caught:
        prepare(path, tmp_path / "out", TINY, settings=ALONE)
    assert caught.value.what.startswith(f"Record 1 of {path}")
    assert contents(tmp_path / "out") == {}


FIXTURES = Path(__file__).parent.parent / "fixtures" / "images"
TURNED = FIXTURES / "padlock-406986_640_rotate_90.jpg"
PHOTO_64_BY_128 = EncodedImage(PHOTO, "hopper.jpg").decode()[:, :, ::2]
SMALL = Preparation(32)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of(mask: Any) -> bytes:
    return file_of(Image.fromarray(np.asarray(mask)), "PNG")


TALL = file_of(Image.fromarray(PHOTO_64_BY_128.permute(1, 2, 0).numpy()), "PNG")


def record(data: bytes = PHOTO, **others: Values) -> bytes:
    return serialize_example({"image/encoded": [data], **{f"image/{name}": value for name, value in others.items()}})


def prepared(given_record: bytes, preparation: Preparation = SMALL) -> dict[str, Values]:
    return parse_example(prepared_record(given_record, preparation))


def image_of(features: dict[str, Values]) -> EncodedImage:
    (data,) = features["image/encoded"]
    assert isinstance(data, bytes)
    return EncodedImage(data, "prepared")


def refusal(given_record: bytes) -> DataError:
    with pytest.raises(DataError) as caught:
        prepared_record(given_record, SMALL, "Record 3 of a.tfrecord")
    assert caught.value.what == "Record 3 of a.tfrecord cannot be prepared."
    return caught.value


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((500, 375), (427, 320)),
        ((375, 500), (320, 427)),
        ((320, 9000), (320, 9000)),
        ((319, 20), (319, 20)),
        ((321, 321), (320, 320)),
        ((641, 642), (320, 320)),
        ((1, 1), (1, 1)),
    ],
)
def test_the_short_side_becomes_that_long_at_most(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert Preparation().size(before) == after


@settings(max_examples=50)
@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 2_000))
def test_no_image_grows_and_none_changes_its_aspect(width: int, height: int, short_side: int) -> None:
    to = Preparation(short_side).size((width, height))
    short, long = min(width, height), max(width, height)
    assert min(to) == min(short, short_side)
    assert abs(max(to) - long * min(to) / short) <= 0.5
    assert (to[0] <= to[1]) if width <= height else (to[0] >= to[1])


def test_a_preparation_is_named_by_what_it_does() -> None:
    assert str(Preparation()) == "short_side=320 quality=90 420"
    assert str(Preparation(256, 85, "444")) == "short_side=256 quality=85 444"


@pytest.mark.parametrize(
    ("given_values", "what"),
    [
        ((0,), "short_side is out of range."),
        ((320.5,), "short_side is of the wrong type."),
        ((320, 0), "quality is out of range."),
        ((320, 101), "quality is out of range."),
        ((320, 90, "411"), "subsampling cannot be '411'."),
    ],
)
def test_what_no_preparation_can_be_is_refused(given_values: tuple[Any, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        Preparation(*given_values)
    assert caught.value.what == what


def test_an_image_is_shrunk_with_antialiasing_and_encoded_again() -> None:
    image = image_of(prepared(record(TALL), Preparation(16, 100, "444"))).decode()
    expected = interpolate(PHOTO_64_BY_128[None], (32, 16), mode="bilinear", antialias=True)[0]
    assert image.shape == expected.shape
    assert (image.int() - expected.int()).abs().max() <= 8, "what a JPEG of quality 100 may lose"


def test_an_image_that_is_small_enough_is_only_encoded_again() -> None:
    before, after = EncodedImage(PHOTO, "").decode(), image_of(prepared(record(), Preparation(128))).decode()
    assert after.shape == before.shape
    assert 0 < (after.float() - before.float()).abs().mean() < 4


@pytest.mark.parametrize(("subsampling", "number"), [("444", 0), ("422", 1), ("420", 2)])
def test_colours_are_subsampled_as_asked_for(subsampling: str, number: int) -> None:
    data = image_of(prepared(record(), Preparation(32, 90, subsampling))).data
    with Image.open(BytesIO(data)) as image:
        assert JpegImagePlugin.get_sampling(image) == number


def test_a_lower_quality_takes_fewer_bytes() -> None:
    sizes = [len(image_of(prepared(record(), Preparation(64, quality))).data) for quality in (30, 60, 90)]
    assert sizes == sorted({*sizes})


def test_other_features_stay_and_the_preparation_is_named() -> None:
    others: dict[str, Values] = {
        "class/label": np.array([7]),
        "colorspace": [b"RGB"],
        "format": [b"JPEG"],
        "key/sha256": [b"of the original"],
        "object/bbox/xmin": np.array([0.25], dtype=np.float32),
    }
    size: dict[str, Values] = {"height": np.array([128]), "width": np.array([64])}
    features = prepared(record(TALL, **others, **size))
    assert image_of(features).size == (32, 64)
    assert (features.pop("image/height"), features.pop("image/width")) == (64, 32)
    assert features.pop("image/prepared") == [b"short_side=32 quality=90 420"]
    del features["image/encoded"]
    assert features == {f"image/{name}": values for name, values in others.items()}


def test_what_a_record_does_not_tell_is_not_added() -> None:
    assert prepared(record()).keys() == {"image/encoded", "image/prepared"}


@pytest.mark.parametrize(
    ("before", "after"), [(b"png", b"jpeg"), (b"PNG", b"jpeg"), (b"JPEG", b"JPEG"), (b"jpg", b"jpg")]
)
def test_the_format_is_told_right(before: bytes, after: bytes) -> None:
    assert prepared(record(TALL, format=[before]))["image/format"] == [after]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_orientation_stays_with_the_image(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(FIXTURES / "hopper.png") as photo:
        data = file_of(photo.convert("RGB").crop((0, 0, 128, 64)), kind, exif=exif)
    image = image_of(prepared(record(data)))
    assert image.size == (64, 32)
    assert Decoding(exif=True).size(image.data, "turned") == (32, 64)


def test_an_image_that_a_camera_held_upright_gets_no_exif() -> None:
    assert b"Exif" not in image_of(prepared(record())).data


def test_areas_shrink_in_the_ratio_of_the_image() -> None:
    areas = np.array([8192, 100], dtype=np.float32)
    shrunk = prepared(record(TALL, **{"object/area": areas}))["image/object/area"]
    np.testing.assert_array_equal(shrunk, areas / 4)


def test_masks_shrink_with_their_image() -> None:
    mask = np.zeros((128, 64), dtype=bool)
    mask[30:90, 10:40] = True
    files = prepared(record(TALL, **{"object/mask": [png_of(mask), png_of(mask.astype(np.uint8))]}))
    numbers = prepared(record(TALL, **{"object/mask": np.stack([mask, ~mask]).astype(np.float32).ravel()}))
    expected = mask[1::2, 1::2]
    shrunk = [np.asarray(Image.open(BytesIO(file))) for file in files["image/object/mask"]]
    assert [one.dtype for one in shrunk] == [bool, np.uint8]
    for one in shrunk:
        np.testing.assert_array_equal(one, expected)
    values = numbers["image/object/mask"]
    assert isinstance(values, np.ndarray)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.reshape(2, 64, 32), np.stack([expected, ~expected]))


@pytest.mark.parametrize("masks", [[], np.zeros(0, dtype=np.float32)], ids=["png", "numbers"])
def test_no_masks_stay_none(masks: Values) -> None:
    assert len(prepared(record(**{"object/mask": masks}))["image/object/mask"]) == 0


def test_masks_and_areas_of_an_image_that_is_small_enough_are_not_touched() -> None:
    others: dict[str, Values] = {"object/area": np.array([5], dtype=np.float32), "object/mask": [b"of any format"]}
    features = prepared(record(**others), Preparation(128))
    assert {name: features[f"image/{name}"] for name in others} == others


@pytest.mark.parametrize(
    ("masks", "given_text", "expected"),
    [
        ([png_of(np.zeros((4, 5), np.uint8))], "a mask of 5 x 4 pixels", "64 x 128, as its image"),
        ([b"\x89PNG\r\n\x1a\n..."], "SyntaxError: ", "a whole PNG in image/object/mask"),
        ([b"mask"], "ValueError: the first bytes 6d 61 73 6b", "a whole PNG in image/object/mask"),
        (np.zeros(5, np.float32), "5 pixels of masks", "a multiple of 64 x 128, as its image"),
        (np.zeros(64 * 128, np.int64), "image/object/mask of another kind", "floats"),
    ],
    ids=["size", "damaged", "foreign", "number", "kind"],
)
def test_masks_that_do_not_fit_are_refused(masks: Values, given_text: str, expected: str) -> None:
    error = refusal(record(TALL, **{"object/mask": masks}))
    assert str(error.given).startswith(given_text)
    assert error.expected == expected


def test_areas_that_are_no_floats_are_refused() -> None:
    error = refusal(record(**{"object/area": [b"5"]}))
    assert (error.given, error.expected) == ("image/object/area of another kind", "floats")


def test_a_record_is_prepared_once() -> None:
    error = refusal(prepared_record(record(), SMALL))
    assert error.given == "image/prepared: [b'short_side=32 quality=90 420']"
    assert error.hint == "prepare the originals"


def test_a_record_with_a_second_image_is_refused_and_an_empty_one_is_none() -> None:
    error = refusal(record(**{"segmentation/class/encoded": [b"png"]}))
    assert error.given == "a second image, image/segmentation/class/encoded"
    assert "image/additional_channels/encoded" in prepared(record(**{"additional_channels/encoded": []}))


@pytest.mark.parametrize(
    ("features", "given_text"),
    [
        ({"image_raw": [b"..."], "label": np.array([1])}, "the features image_raw, label"),
        ({"image/encoded": np.array([1])}, "the features image/encoded"),
        ({"image/encoded": [b"", b""]}, "the features image/encoded"),
        ({}, "the features (none)"),
    ],
    ids=["other", "number", "two", "empty"],
)
def test_a_record_without_an_image_is_refused(features: dict[str, Values], given_text: str) -> None:
    assert refusal(serialize_example(features)).given == given_text


def test_an_image_that_cannot_be_decoded_is_refused_by_its_record() -> None:
    with pytest.raises(DataError, match=r"^Record 3 cannot be decoded\."):
        prepared_record(record((FIXTURES / "truncated_jpeg.jpg").read_bytes()), SMALL, "Record 3")


def test_the_same_record_is_prepared_to_the_same_bytes() -> None:
    assert prepared_record(record(), SMALL) == prepared_record(record(), SMALL)
    assert torch.equal(image_of(prepared(record())).decode(), image_of(prepared(record())).decode())
