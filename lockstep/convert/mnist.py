"""Convert MNIST's original files to records, in the layouts of the TensorFlow reference and of slim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from lockstep.checks import check_one_of
from lockstep.errors import DataError
from lockstep.images.pillow import png_bytes
from lockstep.readers.mnist import SPLITS, Split, UInt8s, ensure_files, load_idx, mnist_folder
from lockstep.records.example import serialize_example
from lockstep.records.record_files import RecordFiles
from lockstep.records.shards import check_local
from lockstep.records.tfrecord import write_records
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath

LAYOUTS = ("raw", "png")


class Written(NamedTuple):
    """A file of records, and how many it holds."""

    path: Path
    num_records: int


def convert_mnist(output: Path, layout: str = "raw", folder: Path | None = None) -> list[Written]:
    """Write the records of MNIST to a folder, unless they are there.

    Args:
        output: the folder, made if need be.
        layout: "raw", that of the reference's distributed trainer: train (55,000), validation (5,000) and
            test.tfrecords (10,000), the pixels in image_raw. "png", that of slim: mnist_train (60,000) and
            mnist_test.tfrecord (10,000), a PNG in image/encoded.
        folder: the folder of the original files, fetched if missing; by default that of `mnist_reader`.

    Raises:
        DataError: the original files are damaged or cannot be fetched, or an existing file has other records.
    """
    check_one_of("layout", layout, LAYOUTS)
    check_local(output)
    originals = mnist_folder(folder)
    if layout == "raw":
        written = [_with_pixels(originals, split, output / f"{name}.tfrecords") for name, split in SPLITS.items()]
    else:
        train, train_labels, test, test_labels = ensure_files(originals)
        written = [
            _with_pngs(train, train_labels, output / "mnist_train.tfrecord"),
            _with_pngs(test, test_labels, output / "mnist_test.tfrecord"),
        ]
    for path, num_records in written:
        if (found := len(RecordFiles([path]))) != num_records:
            raise DataError(
                f"{path} does not hold the records of MNIST.",
                given=f"{found} records",
                expected=f"{num_records} records",
                hint="move it away, and it will be written",
            )
    return written


def _with_pixels(originals: AnyPath, split: Split, path: Path) -> Written:
    """Write the records of a split, unless they are there: image_raw, label, height, width and depth."""
    if not path.exists():
        log.info("Writing %d records of MNIST to %s", len(split.rows), path)
        images, labels = (load_idx(file)[split.rows] for file in ensure_files(originals, (split.images, split.labels)))
        write_records(path, _examples_of_pixels(images, labels))
    return Written(path, len(split.rows))


def _with_pngs(images: AnyPath, labels: AnyPath, path: Path) -> Written:
    """Write the records of two original files, images and labels, unless they are there."""
    values = load_idx(labels)
    if not path.exists():
        log.info("Writing %d records of MNIST to %s", len(values), path)
        write_records(path, _examples_of_pngs(load_idx(images), values))
    return Written(path, len(values))


def _examples_of_pixels(images: UInt8s, labels: UInt8s) -> Iterator[bytes]:
    # But for the pixels, all examples of a label are the same bytes.
    around = [_around_image(images.shape[1:], label) for label in range(10)]
    for image, label in zip(images, labels, strict=True):
        before, after = around[label]
        yield before + image.tobytes() + after


def _around_image(shape: tuple[int, ...], label: int) -> tuple[bytes, bytes]:
    """Serialize an example, and return its bytes before and after its pixels."""
    height, width = shape
    numbers = {"label": label, "height": height, "width": width, "depth": 1}
    blank = bytes(height * width)
    example = serialize_example({"image_raw": [blank], **{name: np.array([value]) for name, value in numbers.items()}})
    before, _, after = example.partition(blank)
    return before, after


def _examples_of_pngs(images: UInt8s, labels: UInt8s) -> Iterator[bytes]:
    height, width = (np.array([size], dtype=np.int64) for size in images.shape[1:])
    for image, label in zip(images, labels, strict=True):
        yield serialize_example(
            {
                "image/encoded": [png_bytes(Image.fromarray(image))],
                "image/format": [b"png"],
                "image/class/label": np.array([label], dtype=np.int64),
                "image/height": height,
                "image/width": width,
            }
        )
