"""Have Hugging Face's datasets and TFDS write small data sets. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tables
    /tmp/tables/bin/pip install "datasets==5.2.*" "tensorflow-datasets==4.9.*" "tensorflow-cpu==2.21.*" pillow
    /tmp/tables/bin/python tests/golden/make_tables_golden.py

It writes into `tables` beside itself, each set with six images of two to three classes, or of objects:

- saved: a DatasetDict by save_to_disk; hub: the same as Parquet in a folder "data", in two shards
- objects: images with objects, as a DatasetDict by save_to_disk, with structs of lists; listed: the same in Parquet, of
  lists of structs
- tfds: two data sets of one version each, by a builder of TFDS

and `tables_golden.json`: of each image the sum of its pixels, its label or its objects.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

HERE = Path(__file__).parent / "tables"
CLASSES = ["disc", "square", "ring"]
NUM_IMAGES = 6
BOXES = [[[1.0, 2.0, 4.0, 3.0]], [], [[0.0, 0.0, 9.0, 7.0], [2.0, 1.0, 3.0, 5.0]], [[5.5, 1.25, 2.5, 4.0]], [], []]
CATEGORIES = [[2], [], [0, 1], [1], [], []]


def pixels(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 255, (8 + number, 10, 3), np.uint8)


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, "PNG")
    return file.getvalue()


def split_of(numbers: range) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    rows = {"image": [{"bytes": png(n), "path": f"{n}.png"} for n in numbers], "label": [n % 3 for n in numbers]}
    return datasets.Dataset.from_dict(rows, features=features)


def objects_of(numbers: range, *, listed: bool) -> datasets.Dataset:
    label = datasets.ClassLabel(names=CLASSES)
    box = datasets.Sequence(datasets.Value("float32"), length=4)
    if listed:
        feature: Any = [{"bbox": box, "category": label}]
        rows = [
            [{"bbox": each, "category": category} for each, category in zip(BOXES[n], CATEGORIES[n], strict=True)]
            for n in numbers
        ]
    else:
        feature = {"bbox": datasets.Sequence(box), "category": datasets.Sequence(label)}
        rows = [{"bbox": BOXES[n], "category": CATEGORIES[n]} for n in numbers]
    features = datasets.Features({"image_id": datasets.Value("int64"), "image": datasets.Image(), "objects": feature})
    images = [{"bytes": png(n), "path": None} for n in numbers]
    return datasets.Dataset.from_dict({"image_id": list(numbers), "image": images, "objects": rows}, features=features)


class Shapes(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.2.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
                    "image/filename": tfds.features.Text(),
                    "label": tfds.features.ClassLabel(names=CLASSES),
                }
            ),
        )

    def _split_generators(self, _: Any) -> Any:
        return {"train": self._generate_examples(range(4)), "test": self._generate_examples(range(4, NUM_IMAGES))}

    def _generate_examples(self, numbers: range) -> Any:
        for n in numbers:
            yield n, {"image": pixels(n), "image/filename": f"{n}.png", "label": n % 3}


class Boxed(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("2.0.1")

    def _info(self) -> Any:
        one = {
            "bbox": tfds.features.BBoxFeature(),
            "label": tfds.features.ClassLabel(names=CLASSES),
            "is_crowd": np.bool_,
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
                    "objects": tfds.features.Sequence(one),
                }
            ),
        )

    def _split_generators(self, _: Any) -> Any:
        return {"train": self._generate_examples(range(NUM_IMAGES))}

    def _generate_examples(self, numbers: range) -> Any:
        for n in numbers:
            height, width = pixels(n).shape[:2]
            objects = [
                {
                    "bbox": tfds.features.BBox(
                        min(1.0, y / height), min(1.0, x / width), min(1.0, (y + h) / height), min(1.0, (x + w) / width)
                    ),
                    "label": label,
                    "is_crowd": label == 1,
                }
                for (x, y, w, h), label in zip(BOXES[n], CATEGORIES[n], strict=True)
            ]
            yield n, {"image": pixels(n), "objects": objects}


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    train, test = split_of(range(4)), split_of(range(4, NUM_IMAGES))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(
        str(HERE / "saved"), num_shards={"train": 2, "test": 1}
    )
    (HERE / "hub" / "data").mkdir(parents=True)
    for shard in range(2):
        train.shard(2, shard, contiguous=True).to_parquet(str(HERE / f"hub/data/train-0000{shard}-of-00002.parquet"))
    test.to_parquet(str(HERE / "hub/data/test-00000-of-00001.parquet"))
    datasets.DatasetDict({"train": objects_of(range(NUM_IMAGES), listed=False)}).save_to_disk(str(HERE / "objects"))
    objects_of(range(NUM_IMAGES), listed=True).to_parquet(str(HERE / "listed.parquet"))
    for builder in (Shapes, Boxed):
        builder(data_dir=str(HERE / "tfds")).download_and_prepare(file_format="tfrecord")
    told = {
        "classes": CLASSES,
        "sums": [int(pixels(n).sum()) for n in range(NUM_IMAGES)],
        "sizes": [pixels(n).shape[:2] for n in range(NUM_IMAGES)],
        "labels": [n % 3 for n in range(NUM_IMAGES)],
        "boxes": BOXES,
        "categories": CATEGORIES,
    }
    (HERE / "tables_golden.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
