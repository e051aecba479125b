"""MNIST's original files made into records, in the layouts of the TensorFlow reference and of slim."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from lockstep.checks import check_one_of
from lockstep.errors import DataError
from lockstep.readers.mnist import FILES, SPLITS, UInt8s, default_folder, ensure_files, load_idx, prepare_records
from lockstep.records.example import serialize_example
from lockstep.records.record_files import RecordFiles
from lockstep.records.shards import check_local
from lockstep.records.tfrecord import write_records

LAYOUTS = ("raw", "png")

_logger = logging.getLogger("lockstep")


class Written(NamedTuple):
    """One of the files of records, and how many it holds."""

    path: Path
    num_records: int


def convert_mnist(output: Path, layout: str = "raw", folder: Path | None = None) -> list[Written]:
    """Have the records of MNIST in a folder. A file that is there already is kept.

    Args:
        output: the folder, made if need be.
        layout: "raw" is that of the reference's distributed trainer: train (55,000), validation (5,000) and
            test.tfrecords (10,000), the pixels as they are in image_raw. "png" is slim's: mnist_train (60,000) and
            mnist_test.tfrecord (10,000), a PNG in image/encoded.
        folder: of the original files, which are fetched if they are missing; by default `default_folder()`.

    Raises:
        InputError: there is no such layout.
        DataError: the original files are damaged, or missing and cannot be fetched; a file that is there does not hold
            as many records; or the system refuses to write.
    """
    check_one_of("layout", layout, LAYOUTS)
    check_local(output)
    folder = folder or default_folder()
    if layout == "raw":
        prepare_records(folder, output)
        written = [Written(output / f"{name}.tfrecords", len(split.rows)) for name, split in SPLITS.items()]
    else:
        ensure_files(folder)
        train, train_labels, test, test_labels = (folder / file.name for file in FILES)
        written = [
            _with_pngs(train, train_labels, output / "mnist_train.tfrecord"),
            _with_pngs(test, test_labels, output / "mnist_test.tfrecord"),
        ]
    for each in written:
        _check_whole(each)
    return written


def _with_pngs(images: Path, labels: Path, path: Path) -> Written:
    """Write the records of a pair of original files, unless they are there."""
    values = load_idx(labels)
    if not path.exists():
        _logger.info("Writing %d records of MNIST to %s", len(values), path)
        write_records(path, _examples(load_idx(images), values))
    return Written(path, len(values))


def _examples(images: UInt8s, labels: UInt8s) -> Iterator[bytes]:
    height, width = (np.array([size], dtype=np.int64) for size in images.shape[1:])
    for image, label in zip(images, labels, strict=True):
        file = BytesIO()
        Image.fromarray(image).save(file, "PNG")
        yield serialize_example(
            {
                "image/encoded": [file.getvalue()],
                "image/format": [b"png"],
                "image/class/label": np.array([label], dtype=np.int64),
                "image/height": height,
                "image/width": width,
            }
        )


def _check_whole(written: Written) -> None:
    found = len(RecordFiles([written.path]))
    if found != written.num_records:
        raise DataError(
            f"{written.path} does not hold the records of MNIST.",
            given=f"{found} records",
            expected=f"{written.num_records} records",
            hint="move it away, and it will be written",
        )
