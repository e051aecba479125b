"""Images of tables by their rows: columns found and named, labels, objects, and what cannot be used."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.mask_runs import runs_text
from lockstep.readers import image_tables
from lockstep.readers.classification import ClassificationReader
from lockstep.readers.detection import DetectionReader
from lockstep.readers.fingerprint import fingerprint_of
from lockstep.readers.image_tables import DetectionTable, ImageTable
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.open import open_detection, open_source
from lockstep.readers.reader import Reader
from lockstep.recipes.data import DetectionData, ImageData
from lockstep.runs.inputs import check_same_classes

WIDTH, HEIGHT = 10, 8
BOXES = [[[1.0, 2.0, 4.0, 3.0]], [], [[0.0, 0.0, 10.0, 8.0], [2.5, 1.0, 3.0, 5.0]]]


def image_bytes(shade: int) -> bytes:
    file = BytesIO()
    Image.new("L", (WIDTH, HEIGHT), shade).save(file, "PNG")
    return file.getvalue()


def images(count: int) -> list[bytes]:
    return [image_bytes(number) for number in range(count)]


def written(path: Path, columns: Mapping[str, Any], names: Mapping[str, Sequence[str]] | None = None) -> Path:
    """Write a table; `names` are those of the columns that are ClassLabels."""
    table = pa.table(columns)
    if names is not None:
        features = {name: {"names": list(of_column), "_type": "ClassLabel"} for name, of_column in names.items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        feather.write_feather(table, path, chunksize=2)
    return path


def read(reader: Any, *indices: int) -> dict[str, Any]:
    fields: dict[str, Any] = reader.read_batch(np.array(indices, np.int64))
    return fields


def shades(fields: Mapping[str, Any]) -> list[int]:
    return [int(image.decode()[0, 0, 0]) for image in fields["image"]]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_rows_are_examples(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, {"image": images(5), "label": [3, 1, None, 0, 2]})
    reader = open_source(path, decoding=Decoding("pillow"))
    assert isinstance(reader, ImageTable)
    protocol: Reader = reader
    assert (len(protocol), protocol.cost, reader.example_id(4)) == (5, "decode", f"{name}:4")
    batch = read(reader, 4, 0, 2, 0)
    assert batch["image"][1] == EncodedImage(image_bytes(0), f"Row 0 of {path}", Decoding("pillow"))
    assert shades(batch) == [4, 0, 2, 0]
    assert (batch["label"].tolist(), batch["label"].dtype) == ([2, 3, -1, 3], torch.int64)
    assert read(pickle.loads(pickle.dumps(reader)), 1)["label"].tolist() == [1]


def test_files_follow_one_another_and_names_of_classes_are_numbered_by_all_of_them(tmp_path: Path) -> None:
    written(tmp_path / "train-0.parquet", {"img": images(2), "label": ["cat", "ant"]})
    written(tmp_path / "train-1.parquet", {"img": images(3), "label": ["bee", None, "cat"]})
    for path in (tmp_path, tmp_path / "train-*.parquet", tmp_path / "train-{0..1}.parquet"):
        reader: Any = open_source(path)
        assert reader.classes == ("ant", "bee", "cat")
        assert read(reader, 0, 1, 2, 3, 4)["label"].tolist() == [2, 0, 1, -1, 2]
        assert [reader.example_id(index) for index in (1, 2)] == ["train-0.parquet:1", "train-1.parquet:0"]
    assert ClassificationReader(reader, 3).classes == ("ant", "bee", "cat")


def test_the_names_of_a_class_label_are_the_classes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": images(2), "y": [1, 0]}, {"y": ["zebra", "ape"]})
    reader = ImageTable(path)
    assert (reader.classes, read(reader, 0)["label"].tolist()) == (("zebra", "ape"), [1])


@pytest.mark.parametrize(
    ("columns", "image", "label"),
    [
        ({"image": images(2), "mask": images(2), "label": [0, 1], "coarse": [0, 0]}, "image", "label"),
        ({"picture": [{"bytes": b, "path": None} for b in images(2)], "cls": [0, 1]}, "picture", "cls"),
        ({"data": images(2), "fine_label": [0, 1]}, "data", "fine_label"),
        ({"jpg": images(2), "caption": ["a", "b"]}, "jpg", None),
        ({"image": pa.array(images(2), pa.large_binary()), "label": [True, False]}, "image", "label"),
        ({"image": images(2), "label": pa.array(["b", "a"]).dictionary_encode()}, "image", "label"),
        ({"image": images(2), "label": pa.array([1.5, 2.0])}, "image", None),
    ],
)
def test_columns_are_found_by_types_and_names(
    tmp_path: Path, columns: dict[str, Any], image: str, label: str | None
) -> None:
    reader = ImageTable(written(tmp_path / "a.parquet", columns))
    named = ImageTable(tmp_path / "a.parquet", image=image, label=label)
    assert shades(read(reader, 0, 1)) == shades(read(named, 0, 1)) == [0, 1]
    assert ("label" in read(reader, 0)) == (label is not None)


@pytest.mark.parametrize(
    ("columns", "arguments", "told"),
    [
        ({"left": images(1), "right": images(1)}, {}, r"the image cannot be found out(.|\n)*left, right(.|\n)*image="),
        ({"a": [1]}, {}, r"the image cannot be found out(.|\n)*the columns a \(int64\)"),
        ({"image": [[b"a"]]}, {}, r"(.|\n)*columns of lists within lists are not read"),
        ({"image": [[b"a"]]}, {"image": "image"}, r"The column 'image' of .* cannot be used(.|\n)*list<"),
        ({"image": images(1), "cls": [1], "target": [2]}, {}, r"the label cannot be found(.|\n)*data\.label_column"),
        ({"image": images(1), "label": [[1, 2]]}, {"label": "label"}, r"the type list<(.|\n)*whole numbers"),
        ({"image": images(1), "label": [1]}, {"label": "labels"}, r"no column 'labels'(.|\n)*did you mean \"label\""),
    ],
)
def test_columns_that_cannot_be_meant_are_told(
    tmp_path: Path, columns: dict[str, Any], arguments: dict[str, str], told: str
) -> None:
    path = written(tmp_path / "a.parquet", columns)
    with pytest.raises((DataError, InputError), match=told):
        ImageTable(path, **arguments)


def test_paths_lead_to_files_beside_the_table(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for number, name in enumerate(("a.png", "sub/b.png")):
        (tmp_path / name).write_bytes(image_bytes(number))
    path = written(tmp_path / "a.parquet", {"file_name": ["sub/b.png", "a.png"], "label": [1, 0]})
    batch = read(open_source(path), 0, 1)
    assert (shades(batch), batch["image"][0].source) == ([1, 0], f"{tmp_path}/sub/b.png")
    for names, told in (
        (["a.png", "gone.png"], r"Images are missing in .*(.|\n)*no gone\.png"),
        (["a.png", "../b.png"], r"files that are not in"),
        (["a.png", "/b.png"], r"files that are not in"),
        (["a.png", None], r"Row 1 of .* has no image"),
    ):
        with pytest.raises(DataError, match=told):
            open_source(written(tmp_path / "a.parquet", {"file_name": names, "label": [1, 0]}))


def test_a_row_without_an_image_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    rows = [image_bytes(0), None, b"no image", image_bytes(3)]
    path = written(tmp_path / "a.parquet", {"image": rows, "label": [0, 1, 2, 3]})
    reader = open_source(path)
    with pytest.raises(DataError, match=rf"Row 1 of {path} has no image"):
        read(reader, 1)
    with pytest.raises(DataError, match=rf"Row 2 of {path} cannot be decoded"):
        read(reader, 2)["image"][0].decode()
    loader = Loader(reader, batch_size=2, num_processes=0, bad_examples="skip", order="sequential")
    batch = next(iter(loader.batches(range(1), 1)))
    assert (batch["label"].tolist(), [bad.example_id for bad in batch.bad]) == ([0, 2], ["a.parquet:1"])


def test_files_of_two_tables_are_refused(tmp_path: Path) -> None:
    first = written(tmp_path / "a.parquet", {"image": images(1), "label": [1]})
    for columns, told in (
        ({"image": images(1), "label": ["x"]}, r"'label' of string(.|\n)*'label' of int64"),
        ({"label": [1]}, r"no column 'image'"),
    ):
        second = written(tmp_path / "b.parquet", columns)
        with pytest.raises(DataError, match=told):
            ImageTable([first, second])


def test_fingerprints_know_labels_and_rows(tmp_path: Path) -> None:
    found = {}
    for name, labels in {"one": [0, 1, 2], "other": [0, 2, 1], "again": [0, 1, 2]}.items():
        (tmp_path / name).mkdir()
        path = written(tmp_path / name / "a.parquet", {"image": images(3), "label": labels})
        found[name] = fingerprint_of(open_source(path))
    assert found["one"] == found["again"] != found["other"]
    assert found["one"]["a.parquet"].startswith("3 rows, ")


def test_one_huge_group_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(image_tables, "_BIG_READ_BYTES", 1000)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": images(20), "label": range(20)}), path, compression="lz4")
    assert shades(read(open_source(path), 17)) == [17]
    assert "is read slowly in a random order" in caplog.text
    assert "row_group_size=100" in caplog.text


@pytest.mark.parametrize(
    ("names", "label", "told"),
    [
        (None, 1, "b.parquet are not those of the other files(.|\n)*the label 1, and no names"),
        (["cat", "dog"], 2, "b.parquet are not (.|\n)*the label 2, of 2 names"),
        (["cat", "dog"], -2, "b.parquet are not (.|\n)*the label -2, of 2 names"),
    ],
)
def test_files_with_other_names_of_labels_are_refused(
    tmp_path: Path, names: Sequence[str] | None, label: int, told: str
) -> None:
    written(tmp_path / "a.parquet", {"image": images(1), "label": [0]}, {"label": ["dog"]})
    path = written(tmp_path / "b.parquet", {"image": images(1), "label": [label]}, names and {"label": names})
    with pytest.raises(DataError, match=told):
        ImageTable([tmp_path / "a.parquet", path])
    written(path, {"image": images(1), "label": pa.array([None], "int64")})
    assert read(ImageTable([tmp_path / "a.parquet", path]), 0, 1)["label"].tolist() == [0, -1]


def test_names_without_a_class_of_the_training_split_are_refused_or_numbered_by_a_file(tmp_path: Path) -> None:
    all_names, some = ["blue", "green", "red"], ["red", None]
    train = written(tmp_path / "train.parquet", {"image": images(3), "label": all_names})
    held_out = written(tmp_path / "val.parquet", {"image": images(2), "label": some})
    trained, scored = (dict(enumerate(ImageTable(path).classes)) for path in (train, held_out))
    with pytest.raises(DataError, match=r"have other labels(.|\n)*set data\.labels to the names"):
        check_same_classes("validation", scored, trained)
    (tmp_path / "labels.txt").write_text("red\nblue\ngreen\n")
    data = ImageData(train=str(train), validation="val.parquet", labels="labels.txt").found_from(tmp_path)
    data.check_complete()
    for split, labels in {"train": [1, 2, 0], "validation": [0]}.items():
        reader: Any = data.reader(split, 3)
        assert reader.classes == ("red", "blue", "green")
        assert read(reader, *range(len(labels)))["label"].tolist() == labels
    assert read(ImageTable(held_out, labels=tmp_path / "labels.txt"), 1)["label"].tolist() == [-1]
    with pytest.raises(DataError, match="no data at gone"):
        ImageData(train=str(train), labels="gone.txt").check_complete()


@pytest.mark.parametrize(
    ("columns", "names", "expected"),
    [
        ({"label": [1, 0]}, None, [1, 0]),
        ({"label": [1, 0]}, ["c", "b", "a"], [1, 2]),
        ({"label": ["c", "d"]}, None, r"lacks classes of .*(.|\n)*no d(.|\n)*3 are named there"),
        ({"label": [1, 3]}, None, "the label 3, of 3 classes"),
        ({"label": [1, 0]}, ["c"], "the label 1, of 1 classes"),
        ({"label": [1, -2]}, None, "the label -2, of 3 classes"),
        ({"caption": [1.0, 2.0]}, None, r"has no labels(.|\n)*data\.label_column"),
    ],
)
def test_a_file_of_labels_numbers_the_classes(
    tmp_path: Path, columns: dict[str, Any], names: Sequence[str] | None, expected: Any
) -> None:
    path = written(tmp_path / "a.parquet", {"image": images(2), **columns}, names and {"label": names})
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    if isinstance(expected, list):
        reader: Any = open_source(path, labels=tmp_path / "labels.txt")
        assert (reader.classes, read(reader, 0, 1)["label"].tolist()) == (("a", "b", "c"), expected)
        return
    with pytest.raises(DataError, match=expected):
        open_source(path, labels=tmp_path / "labels.txt")


def test_a_file_of_labels_is_for_names_alone(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.png").write_bytes(image_bytes(1))
    (tmp_path / "labels.txt").write_text("bee\nant\n")
    data = ImageData(train=str(folder), labels=str(tmp_path / "labels.txt"))
    assert read(data.reader("train", 2), 0)["label"].tolist() == [0]
    assert data.reader("train", 2).example_id(0) == "bee/a.png"
    golden = Path(__file__).parents[1] / "golden" / "tables" / "tfds" / "shapes" / "1.2.0" / "train"
    with pytest.raises(InputError, match=r"not numbered by a file of labels(.|\n)*TfdsRecords"):
        open_source(golden, labels=tmp_path / "labels.txt")


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"image": images(1), "label": pa.array([2**63], "uint64")})
    with pytest.raises(DataError, match=r"The column 'label' of .* cannot be used(.|\n)*uint64(.|\n)*int64"):
        ImageTable(path)
    for field in ({"iscrowd": ["so"]}, {"area": ["big"]}, {"bbox": [["1", "2", "3", "x"]]}):
        rows = [{"bbox": [[1.0, 2.0, 3.0, 1.0]], "category": [1], **field}]
        path = written(tmp_path / "b.parquet", {"image": images(1), "objects": rows})
        with pytest.raises(DataError, match=r"The column 'objects' of .* cannot be used"):
            DetectionTable(path)


def test_columns_of_lists_are_objects_where_classes_are_among_them(tmp_path: Path) -> None:
    names = [["dog"], [], ["cat", "dog"]]
    assert open_source(objects(tmp_path / "a.parquet", listed=None, categories=names)).classes == {1: "cat", 2: "dog"}  # type: ignore[attr-defined]
    path = written(tmp_path / "b.parquet", {"image": images(3), "bbox": BOXES})
    assert isinstance(open_source(path), ImageTable)
    numbers = objects(tmp_path / "c.parquet", listed=None)
    feature = {"feature": {"names": ["x", "cat", "dog"], "_type": "ClassLabel"}, "_type": "Sequence"}
    told = json.dumps({"info": {"features": {"category": feature}}})
    pq.write_table(pq.read_table(numbers).replace_schema_metadata({"huggingface": told}), numbers)
    assert read(open_source(numbers), 0)["class_text"] == [["dog"]]
    assert isinstance(DetectionData(str(numbers), objects_column="bbox").reader("train", 3), DetectionReader)
    uneven = objects(tmp_path / "d.parquet", listed=None, categories=[[1], [], [1]])
    with pytest.raises(DataError, match=r"Row 2 of .*\n.*1 classes"):
        open_source(uneven)


def objects(
    path: Path, *, listed: bool | None = False, categories: Sequence[Any] = ([2], [], [1, 2]), **more: Any
) -> Path:
    """Objects in lists of structs, in structs of lists, or for None in columns of lists."""
    if listed is None:
        return written(path, {"image": images(3), "bbox": BOXES, "category": categories, **more})
    if listed:
        of_rows: Any = [
            [{"bbox": box, "category": category} for box, category in zip(*each, strict=True)]
            for each in zip(BOXES, categories, strict=True)
        ]
    else:
        of_rows = [{"bbox": b, "category": c} for b, c in zip(BOXES, categories, strict=True)]
    return written(path, {"image": images(3), "objects": of_rows, **more})


@pytest.mark.parametrize("listed", [False, True, None], ids=["struct of lists", "list of structs", "columns of lists"])
def test_objects_are_shares_of_their_image(tmp_path: Path, listed: bool | None) -> None:
    reader: Any = open_source(objects(tmp_path / "a.parquet", listed=listed), truth=True)
    assert isinstance(reader, DetectionTable)
    batch = read(reader, 2, 1, 0)
    assert batch["boxes"].lengths.tolist() == [2, 0, 1]
    expected = [[0, 0, 1, 1], [1 / 8, 0.25, 6 / 8, 0.55], [2 / 8, 0.1, 5 / 8, 0.5]]
    assert torch.allclose(batch["boxes"].values, torch.tensor(expected))
    assert batch["labels"].values.tolist() == [1, 2, 2]
    assert batch["area"].values.tolist() == [80, 15, 12]
    assert batch["truth_boxes"].values.tolist() == [[0, 0, 10, 8], [2.5, 1, 3, 5], [1, 2, 4, 3]]
    assert batch["truth_labels"].values.tolist() == [1, 2, 2]
    assert batch["source_id"] == ["a.parquet:2", "a.parquet:1", "a.parquet:0"]
    detector = DetectionReader(open_detection(tmp_path / "a.parquet", split="train"), 2)
    assert torch.allclose(read(detector, 2)["boxes"].values, torch.tensor(expected[:2]))


def test_names_of_classes_are_those_of_objects_beside_a_column_of_the_image(tmp_path: Path) -> None:
    columns = {
        "image": images(3),
        "bbox": BOXES,
        "labels": [[1], [], [0, 1]],
        "category": [0, 1, 0],
        "feature": [0] * 3,
    }
    names = {"category": ["indoors", "outdoors"], "labels": ["cat", "dog"], "feature": ["x"]}
    path = written(tmp_path / "a.parquet", columns, names)
    assert DetectionTable(path).classes == {1: "cat", 2: "dog"}


def test_classes_of_objects_begin_at_one(tmp_path: Path) -> None:
    def labels(reader: Any) -> list[int]:
        found: list[int] = read(reader, 0, 1, 2)["labels"].values.tolist()
        return found

    path = tmp_path / "a.parquet"
    named = DetectionTable(objects(path, categories=(["dog"], [], ["ant", "dog"])))
    assert (labels(named), named.classes) == ([2, 1, 2], {1: "ant", 2: "dog"})
    assert read(named, 2)["class_text"] == [["ant", "dog"]]
    mapped = DetectionTable(path, label_map=LabelMap((Label(7, "dog"), Label(3, "ant"))))
    assert (labels(mapped), mapped.classes[7]) == ([7, 3, 7], "dog")
    with pytest.raises(DataError, match="not in the label map"):
        DetectionTable(path, label_map=LabelMap((Label(7, "dog"),)))
    objects(path, categories=([1], [], [0, 1]))
    with pytest.raises(DataError, match=r"cannot be labels(.|\n)*zero_based, or data\.labels_offset=-1"):
        DetectionTable(path)
    assert labels(DetectionTable(path, zero_based=True)) == [2, 1, 2]
    data = DetectionData(train=str(path), labels_offset=-1)
    assert labels(data.reader("train", 2)) == [2, 1, 2]


def test_objects_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for boxes, categories, told in (
        ([[1.0, 2.0, 3.0]], [1], r"Row 1 of .* has no usable 'objects'(.|\n)*a box of 3 numbers"),
        ([[1.0, 2.0, 3.0, None]], [1], r"Row 1 of (.|\n)*the box 1, 2, 3, nan"),
        ([[1.0, 2.0, -3.0, 1.0]], [1], r"Row 1 of (.|\n)*the box 1, 2, -3, 1"),
        ([[1.0, 2.0, 3.0, 1.0]], [1, 2], r"Row 1 of (.|\n)*2 classes(.|\n)*1, one for each box"),
        ([[1.0, 2.0, 3.0, 1.0]], [None], r"An object of .* has no class"),
    ):
        of_rows = [{"bbox": [[0.0, 0.0, 1.0, 1.0]], "category": [1]}, {"bbox": boxes, "category": categories}]
        written(path, {"image": images(2), "objects": of_rows})
        with pytest.raises(DataError, match=told):
            DetectionTable(path)
    of_rows = [{"bbox": [[2.0, 1.0, 30.0, 3.0]], "category": [1]}, None]
    reader = DetectionTable(written(path, {"image": images(2), "objects": of_rows}))
    assert read(reader, 1)["boxes"].lengths.tolist() == [0]
    with pytest.raises(DataError, match=r"Row 0 of .* has a box that is not on its image(.|\n)*2, 1, 30, 3"):
        read(reader, 0)
    with pytest.raises(DataError, match="has no objects on its images"):
        open_detection(written(path, {"image": images(1), "label": [1]}), split="train")


POLYGONS = [[[[1.0, 1.0, 6.0, 1.5, 4.0, 7.0]]], [], [[[0.0, 0.0, 9.5, 0, 9.5, 8.0], [0, 5, 3, 5, 3, 8, 0, 8]], []]]
RUNS = [
    [{"size": [8, 10], "counts": [3, 7, 70]}],
    [],
    [{"size": [8, 10], "counts": counts} for counts in ([80], [0, 80])],
]
POINTS = [[[1.0, 2.0, 2, 3.5, 1.0, 1]], [], [[], [0, 0, 0, 2, 7, 2]]]


def coco_file(folder: Path, outlines: Sequence[Any]) -> Path:
    annotations = [
        {"id": 10 * row + place + 1, "image_id": row, "category_id": 1, "bbox": box, "area": 7.5}
        | {"segmentation": outlines[row][place], "keypoints": POINTS[row][place]}
        for row, boxes in enumerate(BOXES)
        for place, box in enumerate(boxes)
    ]
    listed = [{"id": row, "height": HEIGHT, "width": WIDTH, "file_name": f"{row}.png"} for row in range(3)]
    for row, image in enumerate(images(3)):
        (folder / f"{row}.png").write_bytes(image)
    document = {"images": listed, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    (folder / "a.json").write_text(json.dumps(document))
    return folder / "a.json"


def as_bytes(runs: Mapping[str, Any]) -> dict[str, Any]:
    """As pycocotools makes them."""
    return {**runs, "counts": runs_text(np.cumsum(runs["counts"])[:-1], 80).encode()}


@pytest.mark.parametrize(
    ("listed", "outlines", "stored", "points"),
    [
        (False, POLYGONS, lambda outline: outline, lambda points: points),
        (True, RUNS, lambda outline: outline, lambda points: [points[:3], points[3:]] if points else None),
        (False, [*POLYGONS[:2], [RUNS[2][1], POLYGONS[2][0]]], json.dumps, lambda points: points),
        (True, RUNS, as_bytes, lambda points: points),
        (None, POLYGONS, lambda outline: outline, lambda points: points),
    ],
    ids=["polygons", "runs", "JSON of both", "runs as bytes", "columns of lists"],
)
def test_masks_and_keypoints_are_those_of_annotations(
    tmp_path: Path, listed: bool | None, outlines: Any, stored: Any, points: Any
) -> None:
    columns = {
        "bbox": BOXES,
        "category": [[1] * len(row) for row in BOXES],
        "area": [[7.5] * len(row) for row in BOXES],
        "segmentation": [[*map(stored, row)] for row in outlines],
        "keypoints": [[*map(points, row)] for row in POINTS],
    }
    rows: Any = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if listed:
        rows = [[dict(zip(row, each, strict=True)) for each in zip(*row.values(), strict=True)] for row in rows]
    of_objects: Mapping[str, Any] = columns if listed is None else {"objects": rows}
    path = written(tmp_path / "a.parquet", {"image": images(3), **of_objects})
    expected = read(open_source(coco_file(tmp_path, outlines), everything=True, truth=True), 2, 0, 1)
    reader = open_source(path, everything=True, truth=True)
    found = read(reader, 2, 0, 1)
    for name in sorted({*expected} - {"image", "source_id", "class_text", "is_crowd", "truth_ids"}):
        if isinstance(expected[name], list):
            for mine, theirs in zip(found[name], expected[name], strict=True):
                assert torch.equal(mine.decode(), theirs.decode()), name
        else:
            assert found[name].lengths.tolist() == [2, 1, 0], name
            assert torch.equal(found[name].values.nan_to_num(-1), expected[name].values.nan_to_num(-1)), name
    assert any(masks.decode().any() for masks in found["masks"])
    data = DetectionData(train=str(path), masks=True, num_keypoints=2)
    assert {"masks", "keypoints"} < {*read(data.reader("train", 1, to_train=True), 0)}
    assert fingerprint_of(reader) != fingerprint_of(open_source(path, truth=True))


def test_masks_and_keypoints_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for more, told in (
        (
            {"segmentation": [[[1.0, 2.0, 3.0]]]},
            r"Row 1 of (.|\n)*a polygon of 3 numbers(.|\n)*as segmentation, a list",
        ),
        ({"segmentation": ["{"]}, r"Row 1 of (.|\n)*a text that is no JSON"),
        ({"segmentation": [{"size": [8, 10], "counts": [3]}]}, r"Row 1 of (.|\n)*runs of 3 pixels for 8 rows"),
        ({"segmentation": [None, None]}, r"Row 1 of (.|\n)*2 segmentations(.|\n)*1, one for each box"),
        ({"keypoints": [[1.0, 2.0, 3.0]]}, r"Row 1 of (.|\n)*a visibility other than 0, 1 or 2"),
        ({"keypoints": [[[1.0, 2.0]]]}, r"Row 1 of (.|\n)*lists of other than three numbers"),
        ({"keypoints": [None]}, r"no keypoints that can be used(.|\n)*no object with keypoints"),
        ({"more": [1]}, r"cannot be used(.|\n)*the fields bbox, category, more(.|\n)*(segmentations|keypoints): "),
    ):
        kind = next(iter(more))
        rows = [{"bbox": [], "category": [], kind: []}, {"bbox": [[1.0, 2.0, 3.0, 1.0]], "category": [1]} | more]
        written(path, {"image": images(2), "objects": rows})
        with pytest.raises(DataError, match=told):
            DetectionTable(path, masks=kind != "keypoints", keypoints=kind == "keypoints")
    of_rows = [{"bbox": [[1.0, 2.0, 3.0, 1.0]] * 2, "category": [1] * 2, "keypoints": [[1, 2, 2], [1, 2, 2] * 2]}]
    with pytest.raises(DataError, match=r"a\.parquet:0 has another number of keypoints than a\.parquet:0"):
        DetectionTable(written(path, {"image": images(1), "objects": of_rows}), keypoints=True)


def test_recipes_name_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"left": images(2), "right": images(2)[::-1], "a": [0, 1], "b": [1, 0]})
    data = ImageData(train=str(path), image_column="right", label_column="b")
    batch = read(data.reader("train", 2), 0)
    assert (shades(batch), batch["label"].tolist()) == ([1], [1])
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    (tmp_path / "folder" / "cat" / "a.png").write_bytes(image_bytes(1))
    with pytest.raises(InputError, match="has no columns to choose from"):
        ImageData(train=str(tmp_path / "folder"), image_column="right").reader("train", 2)
    with pytest.raises(InputError, match=r"not read for all that is asked of its objects(.|\n)*use_multiclass_scores"):
        DetectionData(train=str(objects(path)), use_multiclass_scores=True).reader("train", 2, to_train=True)
