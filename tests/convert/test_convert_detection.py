from __future__ import annotations

import hashlib
import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from lockstep.cli.main import main
from lockstep.convert import detection
from lockstep.convert.detection import convert_coco, convert_voc, detection_example
from lockstep.convert.sharding import Settings
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.ragged import Ragged
from lockstep.readers.coco import Coco
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.label_map import Label, LabelMap, read_label_map
from lockstep.readers.reader import Reader
from lockstep.readers.schemas import DetectionSchema
from lockstep.readers.voc import Voc
from lockstep.records.example import Values, parse_example
from lockstep.records.record_files import RecordFiles
from lockstep.storage.remote_path import RemotePath

ALONE = Settings(num_processes=1)
OBJECT = """<object><name>{name}</name><pose>Left</pose><truncated>1</truncated><difficult>{difficult}</difficult>
<bndbox><xmin>2</xmin><ymin>1</ymin><xmax>8</xmax><ymax>4</ymax></bndbox></object>"""
WIDTH, HEIGHT = 16, 8


def write_image(path: Path, brightness: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (WIDTH, HEIGHT), (brightness, 0, 0)).save(path)


def write_voc(folder: Path, images: dict[str, list[tuple[str, int]]]) -> None:
    """A data set of these images, each with objects of these names, difficult or not; all are in the split "train"."""
    for number, (name, objects) in enumerate(images.items()):
        write_image(folder / "JPEGImages" / f"{name}.jpg", number)
        listed = "".join(OBJECT.format(name=of, difficult=difficult) for of, difficult in objects)
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        path = folder / "Annotations" / f"{name}.xml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<annotation><filename>{name}.jpg</filename>{size}{listed}</annotation>")
    path = folder / "ImageSets" / "Main" / "train.txt"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(images))


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """The years 2007 and 2012, whose classes differ."""
    write_voc(tmp_path / "devkit" / "VOC2007", {"a": [("dog", 0), ("cat", 1)], "b": [], "c": [("dog", 0)]})
    write_voc(tmp_path / "devkit" / "VOC2012", {"d": [("bird", 0)]})
    return tmp_path / "devkit"


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """A file of annotations, beside a folder of images."""
    segmentation = [[2, 1, 8, 1, 8, 5, 2, 5]]
    one = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [2, 1, 6, 4], "area": 20.5, "iscrowd": 0}
    points = {"keypoints": [4, 2, 2, 0, 0, 0], "num_keypoints": 1, "segmentation": segmentation}
    content = {
        "images": [{"id": number, "file_name": f"{number}.png", "height": HEIGHT, "width": WIDTH} for number in (7, 3)],
        "categories": [
            {"id": 18, "name": "dog", "keypoints": ["nose", "tail"], "skeleton": []},
            {"id": 17, "name": "cat", "keypoints": ["nose", "tail"], "skeleton": []},
        ],
        "annotations": [{**one, **points}],
    }
    path = tmp_path / "coco" / "val.json"
    for number in (7, 3):
        write_image(path.parent / "images" / f"{number}.png", number)
    path.write_text(json.dumps(content))
    return path


def converted(folder: Path, pattern: str = "*-of-*") -> list[dict[str, Values]]:
    records = RecordFiles(folder / pattern)
    return [parse_example(records.read(index)) for index in range(len(records))]


def plain(values: Any) -> Any:
    """A field as lists; of images and masks what they decode to."""
    if isinstance(values, list | Ragged):
        return [plain(value) for value in values]
    decoded = values.decode() if hasattr(values, "decode") else values
    return np.nan_to_num(decoded.numpy(), nan=-1).tolist() if isinstance(decoded, torch.Tensor) else decoded


def assert_same_examples(reader: Reader, records: Reader, *besides: str) -> None:
    """All fields that both have are the same; the first alone may have these."""
    batch, found = (each.read_batch(np.arange(len(reader))) for each in (reader, records))
    assert {*batch} - {*found} == {*besides}
    for name in {*batch} & {*found}:
        assert plain(found[name]) == plain(batch[name]), name


def test_voc_comes_back_from_its_records(devkit: Path, tmp_path: Path) -> None:
    root = devkit / "VOC2007"
    summary = convert_voc(root, tmp_path / "out", num_shards=2, settings=ALONE)
    assert (summary.num_shards, summary.num_records) == (2, 3)
    assert {path.name for path in (tmp_path / "out").glob("train-*")} == {
        "train-00000-of-00002",
        "train-00001-of-00002",
    }
    labels = read_label_map(tmp_path / "out" / "label_map.pbtxt")
    assert labels.names == {1: "cat", 2: "dog"}
    records = ImageRecords(tmp_path / "out" / "train-*", DetectionSchema(labels))
    assert_same_examples(Voc(root), records, "truncated", "view")


@pytest.mark.process
def test_data_in_an_object_store_becomes_the_same_shards(
    devkit: Path, coco: Path, tmp_path: Path, bucket: RemotePath
) -> None:
    convert_coco(coco, coco.parent / "images", tmp_path / "shards", settings=ALONE)
    for path in (*devkit.rglob("*.*"), *coco.parent.rglob("*.*"), *(tmp_path / "shards").glob("val-*")):
        (bucket / path.relative_to(tmp_path).as_posix()).write_bytes(path.read_bytes())
    made = []
    for root in (str(bucket), str(tmp_path)):
        to = tmp_path / f"to-{len(made)}"
        for words in (
            ["voc", "--data-dir", f"{root}/devkit", "--year", "merged"],
            ["coco", "--annotations", f"{root}/coco/val.json", "--images", f"{root}/coco/images"],
            ["prepare", f"{root}/shards/val-*", "--short-side", "4"],
        ):
            assert main(["convert", *words, "--to", f"{to}/{words[0]}", "--processes", "2"]) == 0
        made.append({path.relative_to(to).as_posix(): path.read_bytes() for path in to.rglob("*-of-*")})
    assert made[0] == made[1]
    assert len(made[0]) == 3
    assert main(["convert", "coco", "--annotations", str(coco), "--images", f"{bucket}/coco", "--to", "s3://b/a"]) == 2


def test_a_record_of_voc_says_all_that_its_annotation_says(devkit: Path, tmp_path: Path) -> None:
    convert_voc(devkit, tmp_path / "out", year="VOC2007", settings=ALONE)
    first = converted(tmp_path / "out")[0]
    assert first["image/filename"] == first["image/source_id"] == [b"a.jpg"]
    assert first["image/encoded"] == [(devkit / "VOC2007" / "JPEGImages" / "a.jpg").read_bytes()]
    edges = {edge: list(first[f"image/object/bbox/{edge}"]) for edge in ("xmin", "ymin", "xmax", "ymax")}
    assert edges == {"xmin": [2 / 16] * 2, "ymin": [1 / 8] * 2, "xmax": [8 / 16] * 2, "ymax": [4 / 8] * 2}
    found = {name: list(first[f"image/object/{name}"]) for name in ("class/text", "difficult", "truncated", "view")}
    assert found == {
        "class/text": [b"dog", b"cat"],
        "difficult": [0, 1],
        "truncated": [1, 1],
        "view": [b"Left", b"Left"],
    }


def test_difficult_objects_are_left_out_when_asked(devkit: Path, tmp_path: Path) -> None:
    convert_voc(devkit / "VOC2007", tmp_path / "out", ignore_difficult=True, settings=ALONE)
    texts = [example["image/object/class/text"] for example in converted(tmp_path / "out")]
    assert texts == [[b"dog"], [], [b"dog"]]


def test_years_are_merged_under_one_numbering(devkit: Path, tmp_path: Path) -> None:
    convert_voc(devkit, tmp_path / "out", year="merged", settings=ALONE)
    assert read_label_map(tmp_path / "out" / "label_map.pbtxt").names == {1: "bird", 2: "cat", 3: "dog"}
    examples = converted(tmp_path / "out")
    assert [example["image/filename"] for example in examples] == [[b"a.jpg"], [b"b.jpg"], [b"c.jpg"], [b"d.jpg"]]
    labels = [example["image/object/class/label"] for example in examples]
    assert [list(values) for values in labels] == [[3, 2], [], [3], [1]]


def test_a_label_map_that_is_given_numbers_the_classes_and_is_not_written(devkit: Path, tmp_path: Path) -> None:
    label_map = LabelMap((Label(12, "dog"), Label(8, "cat")))
    convert_voc(devkit / "VOC2007", tmp_path / "out", label_map=label_map, settings=ALONE)
    assert list(converted(tmp_path / "out")[0]["image/object/class/label"]) == [12, 8]
    assert not (tmp_path / "out" / "label_map.pbtxt").exists()


@pytest.mark.parametrize(
    ("arguments", "written"),
    [({"split": None}, "all-00000-of-00001"), ({"base": "pascal"}, "pascal-00000-of-00001")],
    ids=["all annotations", "named"],
)
def test_shards_are_named_by_the_split_or_as_asked(
    arguments: dict[str, Any], written: str, devkit: Path, tmp_path: Path
) -> None:
    convert_voc(devkit / "VOC2007", tmp_path / "out", **arguments, settings=ALONE)
    assert (tmp_path / "out" / written).exists()


def test_a_year_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        convert_voc(tmp_path, tmp_path / "out", year="2012")
    assert caught.value.what == "year cannot be '2012'."
    assert caught.value.expected == "'VOC2007' or 'VOC2012' or 'merged'"


@pytest.mark.parametrize(
    ("year", "told"), [(None, "There are no annotations in s3://"), ("VOC2012", "no folder s3://")]
)
@pytest.mark.usefixtures("object_store")
def test_data_in_no_bucket_is_refused(year: str | None, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        convert_voc("s3://none/VOCdevkit", tmp_path / "out", year=year)


def test_annotations_that_have_changed_are_another_conversion(devkit: Path, tmp_path: Path) -> None:
    root, output = devkit / "VOC2007", tmp_path / "out"
    convert_voc(root, output, settings=ALONE)
    assert convert_voc(root, output, settings=ALONE).num_kept == 1
    path = root / "Annotations" / "c.xml"
    path.write_text(path.read_text().replace("<xmax>8", "<xmax>9"))
    with pytest.raises(DataError, match="There are shards in"):
        convert_voc(root, output, settings=ALONE)


def test_a_label_map_of_other_classes_is_not_replaced(devkit: Path, tmp_path: Path) -> None:
    convert_voc(devkit / "VOC2007", tmp_path / "out", settings=ALONE)
    with pytest.raises(DataError) as caught:
        convert_voc(devkit / "VOC2012", tmp_path / "out", base="more", settings=ALONE)
    assert caught.value.what == f"{tmp_path / 'out' / 'label_map.pbtxt'} is the label map of other classes."
    assert str(caught.value.given).startswith("2 classes there, 1 here")
    assert not [*(tmp_path / "out").glob("more-*")]
    convert_voc(devkit / "VOC2012", tmp_path / "out", base="more", settings=Settings(1, overwrite=True))
    assert read_label_map(tmp_path / "out" / "label_map.pbtxt").names == {1: "bird"}


def test_coco_comes_back_from_its_records(coco: Path, tmp_path: Path) -> None:
    images = coco.parent / "images"
    convert_coco(coco, images, tmp_path / "out", masks=True, keypoints=True, settings=ALONE)
    assert {path.name for path in (tmp_path / "out").glob("*-of-*")} == {"val-00000-of-00001"}
    assert read_label_map(tmp_path / "out" / "label_map.pbtxt").names == {17: "cat", 18: "dog"}
    schema = DetectionSchema(masks="png", num_keypoints=2)
    records = ImageRecords(tmp_path / "out" / "val-*", schema)
    assert_same_examples(Coco(coco, images, masks=True, keypoints=True), records)


def test_masks_and_keypoints_are_written_when_asked(coco: Path, tmp_path: Path) -> None:
    convert_coco(coco, coco.parent / "images", tmp_path / "out", settings=ALONE)
    first = converted(tmp_path / "out")[0]
    assert not [name for name in first if "mask" in name or "keypoint" in name]
    assert (first["image/source_id"], first["image/filename"]) == ([b"7"], [b"7.png"])
    assert (list(first["image/object/area"]), list(first["image/object/is_crowd"])) == ([20.5], [0])


def test_a_label_map_renumbers_coco(coco: Path, tmp_path: Path) -> None:
    label_map = LabelMap((Label(1, "cat"), Label(2, "dog")))
    convert_coco(coco, coco.parent / "images", tmp_path / "out", label_map=label_map, base="mine", settings=ALONE)
    assert list(converted(tmp_path / "out", "mine-*")[0]["image/object/class/label"]) == [2]
    assert not (tmp_path / "out" / "label_map.pbtxt").exists()


def test_examples_fill_shards_of_one_size(devkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_EXAMPLES_PER_SHARD", 2)
    assert convert_voc(devkit, tmp_path / "out", year="VOC2007", settings=ALONE).num_shards == 2


def test_an_image_that_does_not_fit_its_annotation_is_skipped_by_name(devkit: Path, tmp_path: Path) -> None:
    path = devkit / "VOC2007" / "JPEGImages" / "b.jpg"
    Image.new("RGB", (WIDTH, HEIGHT + 1)).save(path)
    summary = convert_voc(devkit, tmp_path / "out", year="VOC2007", settings=ALONE)
    assert [example["image/filename"] for example in converted(tmp_path / "out")] == [[b"a.jpg"], [b"c.jpg"]]
    (skipped,) = summary.skipped
    assert skipped.name == "VOC2007:b.jpg"
    assert skipped.reason == f"{path} is not of the size that its annotation is for. 16 x 9 pixels"


@pytest.mark.process
def test_processes_write_the_same_bytes(devkit: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        settings = Settings(num_processes=processes)
        convert_voc(devkit, tmp_path / str(processes), year="merged", num_shards=3, settings=settings)
    one, two = (sorted((tmp_path / name).glob("*-of-*")) for name in ("1", "2"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


class Masks:
    """What readers give: masks that are decoded on demand."""

    def __init__(self, masks: Tensor) -> None:
        self._masks = masks

    def __len__(self) -> int:
        return len(self._masks)

    def decode(self) -> Tensor:
        return self._masks


def file_of(kind: str, width: int = 6, height: int = 4, mode: str = "RGB") -> bytes:
    pixels = np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3) * 3
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def fields(objects: int = 0, data: bytes | None = None, **others: Any) -> dict[str, Any]:
    image = EncodedImage(file_of("JPEG") if data is None else data, "/data/images/cat.jpg")
    return {"image": image, "boxes": torch.rand(objects, 4), **others}


def features_of(**given: Any) -> dict[str, Values]:
    return parse_example(detection_example(fields(**given)))


def plain_fields(features: dict[str, Values], start: str) -> dict[str, list[Any]]:
    """The features below a name, as lists."""
    return {name.removeprefix(start): list(values) for name, values in features.items() if name.startswith(start)}


def test_an_image_is_told_by_the_names_of_the_object_detection_api() -> None:
    data = file_of("JPEG")
    assert plain_fields(features_of(data=data, source_id="7"), "image/") == {
        "encoded": [data],
        "format": [b"jpeg"],
        "filename": [b"cat.jpg"],
        "key/sha256": [hashlib.sha256(data).hexdigest().encode()],
        "source_id": [b"7"],
        "height": [4],
        "width": [6],
        **{f"object/bbox/{edge}": [] for edge in ("ymin", "xmin", "ymax", "xmax")},
    }


def test_height_and_width_are_those_of_the_raster_as_it_is_stored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.new("RGB", (6, 4)).save(file, "JPEG", exif=exif)
    turned = EncodedImage(file.getvalue(), "turned.jpg", Decoding(exif=True))
    assert turned.size == (4, 6)
    features = parse_example(detection_example({**fields(), "image": turned}))
    assert (features["image/width"], features["image/height"]) == (6, 4)


def test_without_a_source_id_the_file_gives_its_name() -> None:
    assert features_of()["image/source_id"] == [b"cat.jpg"]


def test_every_field_of_objects_has_its_feature() -> None:
    features = features_of(
        objects=2,
        labels=torch.tensor([3, -1]),
        class_text=["cat", "süß"],
        area=torch.tensor([12.5, 3.0]),
        is_crowd=torch.tensor([True, False]),
        difficult=torch.tensor([False, True]),
        truncated=torch.tensor([True, True]),
        group_of=torch.tensor([False, False]),
        view=["Frontal", ""],
        weights=torch.tensor([1.0, 0.5]),
        keypoints=torch.tensor([[[0.5, 0.25], [0.0, 1.0]], [[0.75, 0.125], [0.0, 0.5]]]),
        keypoint_visibility=torch.tensor([[2, 1], [2, 0]]),
        keypoint_names=["left", "right"],
    )
    boxes = [name for name in features if name.startswith("image/object/bbox/")]
    assert plain_fields({name: features[name] for name in features if name not in boxes}, "image/object/") == {
        "class/label": [3, -1],
        "class/text": [b"cat", "süß".encode()],
        "area": [12.5, 3.0],
        "is_crowd": [1, 0],
        "difficult": [0, 1],
        "truncated": [1, 1],
        "group_of": [0, 0],
        "view": [b"Frontal", b""],
        "weight": [1.0, 0.5],
        "keypoint/y": [0.5, 0.0, 0.75, 0.0],
        "keypoint/x": [0.25, 1.0, 0.125, 0.5],
        "keypoint/visibility": [2, 1, 2, 0],
    }


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(0, 1, width=32)] * 4, st.floats(width=32) | st.just(math.nan), st.integers(-1, 2**62)),
        max_size=20,
    )
)
def test_numbers_come_back_to_the_bit(objects: list[tuple[float, ...]]) -> None:
    columns = [[row[column] for row in objects] for column in range(6)]
    boxes = torch.tensor(columns[:4]).T.reshape(-1, 4)
    points = torch.tensor(columns[4]).reshape(-1, 1, 1).repeat(1, 1, 2)
    labels = torch.tensor([int(label) for label in columns[5]], dtype=torch.int64)
    given_fields = {**fields(), "boxes": boxes, "keypoints": points, "labels": labels}
    found = parse_example(detection_example(given_fields))
    edges = [found[f"image/object/bbox/{edge}"] for edge in ("ymin", "xmin", "ymax", "xmax")]
    np.testing.assert_array_equal(np.stack(edges, axis=1), boxes)
    np.testing.assert_array_equal(found["image/object/keypoint/y"], points[:, 0, 0])
    assert list(found["image/object/class/label"]) == labels.tolist()


@pytest.mark.parametrize(("kind", "name"), [("JPEG", b"jpeg"), ("PNG", b"png")])
def test_jpegs_and_pngs_go_in_as_they_are_whatever_their_name(kind: str, name: bytes) -> None:
    data = file_of(kind)
    features = features_of(data=data)
    assert (features["image/encoded"], features["image/format"]) == ([data], [name])


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_images_of_other_formats_become_pngs_of_the_same_pixels(kind: str) -> None:
    data = file_of(kind, mode="L" if kind == "GIF" else "RGB")
    features = features_of(data=data)
    assert features["image/format"] == [b"png"]
    (stored,) = features["image/encoded"]
    assert isinstance(stored, bytes)
    assert stored.startswith(b"\x89PNG")
    assert features["image/key/sha256"] == [hashlib.sha256(stored).hexdigest().encode()]
    torch.testing.assert_close(EncodedImage(stored, "").decode(), EncodedImage(data, "").decode(), rtol=0, atol=0)


def test_an_image_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(DataError, match=r"^/data/images/cat.jpg cannot be decoded\."):
        features_of(data=b"no image")


def test_a_mask_becomes_a_png_of_one_bit_a_pixel() -> None:
    masks = torch.tensor([[[0, 1, 1], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]]], dtype=torch.uint8)
    files = features_of(objects=2, masks=Masks(masks))["image/object/mask"]
    assert isinstance(files, list)
    images = [Image.open(BytesIO(file)) for file in files]
    assert [image.mode for image in images] == ["1", "1"]
    np.testing.assert_array_equal(np.stack([np.asarray(image) for image in images]), masks.bool())


def test_an_image_without_objects_has_no_masks() -> None:
    assert features_of(masks=Masks(torch.zeros(0, 4, 6, dtype=torch.uint8)))["image/object/mask"] == []


@pytest.mark.parametrize(
    ("name", "values"), [("labels", torch.tensor([1])), ("class_text", []), ("keypoints", torch.zeros(3, 1, 2))]
)
def test_a_field_that_does_not_fit_the_boxes_is_refused(name: str, values: Any) -> None:
    with pytest.raises(InputError) as caught:
        detection_example(fields(2, **{name: values}))
    assert caught.value.what == f"The field {name!r} of /data/images/cat.jpg does not fit its boxes."
    assert caught.value.given == f"{len(values)} values"
    assert caught.value.expected == "2, one for each box"
