"""The law of the stream for images with objects: the same pixels and targets, whoever reads them, after any resume."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_stream import (
    MakeLoader,
    assert_resumes_anywhere,
    assert_same_for_any_dealing_of_towers,
    assert_same_for_any_number_of_processes,
    rows_by_name,
    stream_of,
)

from lockstep.augmentations.colours import RandomDistortColor
from lockstep.augmentations.mixing import Mosaic
from lockstep.augmentations.random_crops import SsdRandomCrop
from lockstep.augmentations.resizers import FixedShapeResizer
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.augmentations.zoom import RandomIoUCrop, RandomZoomOut
from lockstep.data.loader import Loader
from lockstep.detection.targets import DetectionTargets
from lockstep.readers.coco import Coco
from lockstep.readers.detection import DetectionReader
from lockstep.readers.image_tables import DetectionTable
from lockstep.readers.reader import Reader
from lockstep.readers.voc import Voc

NUM_IMAGES, NUM_CLASSES = 5, 3
SIDES = [(20 + 3 * number, 34 - 2 * number) for number in range(NUM_IMAGES)]  # height and width
CLASSES = ("bird", "cat", "dog")
AUGMENT = [
    Mosaic(24, p=0.4),
    RandomZoomOut(p=0.5),
    RandomIoUCrop(),
    SsdRandomCrop(),
    HorizontalFlip(keypoint_flip_permutation=(1, 0)),
    HorizontalFlip(keypoint_flip_permutation=(1, 0)),
    FixedShapeResizer(16, 16),
    RandomDistortColor(),
    DetectionTargets(NUM_CLASSES),
]


def write_jpeg(path: Path, number: int) -> None:
    pixels = np.random.default_rng(number).integers(0, 255, (*SIDES[number], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file.getvalue())


def boxes(number: int) -> list[tuple[int, int, int, int]]:
    """The boxes on an image, x, y, width and height: as many as its number, but none where it divides by three."""
    height, width = SIDES[number]
    return [(place, 2 * place, width // 2, height // 2) for place in range(number if number % 3 else 0)]


def coco(path: Path) -> Reader:
    """With masks and keypoints, crowds, and images without objects."""
    annotations = []
    for number in range(NUM_IMAGES):
        write_jpeg(path / f"{number}.jpg", number)
        for place, (x, y, width, height) in enumerate(boxes(number)):
            corners = [x, y, x + width, y, x + width // 2, y + height]
            annotations.append({
                "id": len(annotations) + 1, "image_id": number, "category_id": place % NUM_CLASSES + 1,
                "bbox": [x, y, width, height], "iscrowd": int(place == 1), "segmentation": [corners],
                "keypoints": [x + 1, y + 1, 2, x + width - 1, y + 2, place % 3],
            })  # fmt: skip
    images = [
        {"id": number, "file_name": f"{number}.jpg", "height": height, "width": width}
        for number, (height, width) in enumerate(SIDES)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (path / "all.json").write_text(json.dumps(document))
    return Coco(path / "all.json", path, masks=True, keypoints=True)


def voc(path: Path) -> Reader:
    (path / "Annotations").mkdir()
    for number, (height, width) in enumerate(SIDES):
        write_jpeg(path / "JPEGImages" / f"{number}.jpg", number)
        objects = "".join(
            f"<object><name>{CLASSES[place % NUM_CLASSES]}</name><difficult>{place % 2}</difficult><bndbox>"
            f"<xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
            for place, (x, y, w, h) in enumerate(boxes(number))
        )
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        content = f"<annotation><filename>{number}.jpg</filename>{size}{objects}</annotation>"
        (path / "Annotations" / f"{number}.xml").write_text(content)
    return Voc(path, None)


def table(path: Path) -> Reader:
    rows: dict[str, list[Any]] = {"image": [], "objects": []}
    for number in range(NUM_IMAGES):
        write_jpeg(path / f"{number}.jpg", number)
        rows["image"].append((path / f"{number}.jpg").read_bytes())
        classes = [CLASSES[place % NUM_CLASSES] for place in range(len(boxes(number)))]
        rows["objects"].append({"bbox": [[*map(float, box)] for box in boxes(number)], "category": classes})
    pq.write_table(pa.table(rows), path / "train.parquet", row_group_size=2)
    return DetectionTable(path / "train.parquet")


@pytest.fixture(scope="module", params=[coco, voc, table])
def make_loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeLoader:
    open_reader: Callable[[Path], Reader] = request.param
    reader = DetectionReader(open_reader(tmp_path_factory.mktemp("objects")), NUM_CLASSES)
    return partial(Loader, reader, batch_size=4, seed=5, augment=AUGMENT, num_processes=0)


def test_the_chain_has_something_of_everything(make_loader: MakeLoader) -> None:
    rows = [dict(row) for row in stream_of(make_loader(), 6 * NUM_IMAGES)]
    assert len({row["image"] for row in rows}) == len(rows), "each place of the stream has draws of its own"
    assert len({row["boxes"][1] for row in rows}) > NUM_IMAGES, "other numbers of objects than the images have"
    assert {row["labels"][1][0] for row in rows} >= {0, 1, 2}
    assert {"classes", "weights", "original_size"} <= rows[0].keys()
    assert ("masks" in rows[0]) == ("keypoints" in rows[0]) == ("keypoint_weights" in rows[0])


@pytest.mark.process
def test_the_same_for_any_number_of_loader_processes(make_loader: MakeLoader) -> None:
    assert_same_for_any_number_of_processes(make_loader)


def test_the_same_for_any_number_of_workers(make_loader: MakeLoader) -> None:
    assert_same_for_any_dealing_of_towers(make_loader)


def test_resumed_at_every_step(make_loader: MakeLoader) -> None:
    assert_resumes_anywhere(make_loader)


@pytest.mark.process
def test_resumed_by_three_processes(make_loader: MakeLoader) -> None:
    whole = stream_of(make_loader(), 12)
    resumed: Any = make_loader(num_processes=3)
    resumed.load_state({**resumed.state(), "position": 4})
    assert stream_of(resumed, 8, [range(2), range(2, 4)]) == whole[4:]


def test_every_image_is_there(make_loader: MakeLoader) -> None:
    assert len(rows_by_name(make_loader(augment=None))) == NUM_IMAGES
