"""MNIST: its four original files, the records made of them, and their reader."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError
from lockstep.readers.reader import Reader
from lockstep.readers.records import Records
from lockstep.records.example import serialize_example
from lockstep.records.shards import check_local
from lockstep.records.template import Field, Integer, Pixels
from lockstep.records.tfrecord import write_records
from lockstep.screen import log

UInt8s = npt.NDArray[np.uint8]


class File(NamedTuple):
    """One of the original files."""

    name: str
    sha256: str
    num_bytes: int


class Split(NamedTuple):
    """Some rows of a pair of the original files."""

    images: str
    labels: str
    rows: range


FILES = (
    File("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    File("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    File("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    File("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")

_TRAIN, _TEST = (FILES[0].name, FILES[1].name), (FILES[2].name, FILES[3].name)
# The first 5,000 images validate, as in TensorFlow's `read_data_sets` and in the reference's converter.
SPLITS = {
    "train": Split(*_TRAIN, range(5_000, 60_000)),
    "validation": Split(*_TRAIN, range(5_000)),
    "test": Split(*_TEST, range(10_000)),
}

_FIELDS: dict[str, Field] = {"image": Pixels("image_raw", (1, 28, 28)), "label": Integer("label")}
_UNSIGNED_BYTE = 0x08
_MOST_EXPANSION = 1032  # of deflate: no gzip file holds more bytes than this times its own
_TIMEOUT_SECONDS = 30


def mnist_reader(split: str, folder: str | Path | None = None, records_folder: str | Path | None = None) -> Reader:
    """Open `train` (55,000 examples), `validation` (5,000) or `test` (10,000); their records are made if missing.

    Its batches are {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}.
    """
    if split not in SPLITS:
        raise InputError(
            f"MNIST has no split {split!r}.",
            given=f"split={split!r}",
            expected=" or ".join(f'"{name}"' for name in SPLITS),
            hint="name one of these",
        )
    originals, records = _folder_of(folder), _folder_of(records_folder)
    path = _records_path(split, originals, records)
    if not path.exists():
        prepare_records(originals, records)
    reader = mnist_records([path])
    if len(reader) != len(SPLITS[split].rows):
        raise DataError(
            f"{path} does not hold the {split} images of MNIST.",
            given=f"{len(reader)} records",
            expected=f"{len(SPLITS[split].rows)} records",
            hint="delete it, and it will be written again",
        )
    return reader


def mnist_records(paths: str | Path | Sequence[str | Path], *, verify: bool = True) -> Records:
    """Open records with raw pixels, 784 bytes in `image_raw`, and an integer in `label`; both are required.

    Its batches are {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}.
    """
    return Records(paths, _FIELDS, verify=verify)


def prepare_records(folder: Path | None = None, records_folder: Path | None = None) -> None:
    """Write the records of missing splits: always the same bytes, so several processes may do so at once.

    They are `tf.train.Example`s with the reference's features: image_raw, label, height, width, depth.

    Args:
        folder: of the original files; by default `default_folder()`.
        records_folder: of the records; by default `records` in that folder.
    """
    folder = folder or default_folder()
    paths = {name: _records_path(name, folder, records_folder) for name in SPLITS}
    missing = [name for name, path in paths.items() if not path.exists()]
    if not missing:
        return
    ensure_files(folder)
    load = cache(lambda name: load_idx(folder / name))
    for name in missing:
        split = SPLITS[name]
        log.info("Writing %d records of MNIST to %s", len(split.rows), paths[name])
        write_records(paths[name], _examples(load(split.images)[split.rows], load(split.labels)[split.rows]))


def default_folder() -> Path:
    """Return `data/mnist` in the current directory if it is there, else the user's cache."""
    here = Path("data/mnist")
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "mnist"
    return here if here.is_dir() else cached


def ensure_files(folder: Path, mirrors: Sequence[str] = MIRRORS) -> Path:
    """Verify the four files in the folder (another file is left as it is), fetch missing ones, return the folder."""
    for file in FILES:
        path = folder / file.name
        if not path.exists():
            data = _fetched(file, folder, mirrors)
            with atomic_write(path, parents=True, failure=DataError) as new:
                new.write(data)
        elif (given := _sha256(path.read_bytes())) != file.sha256:
            raise DataError(
                f"{path} is not MNIST's original file.",
                given=f"sha256 {given}, {path.stat().st_size} bytes",
                expected=f"sha256 {file.sha256}, {file.num_bytes} bytes",
                hint="move it away, and it will be fetched again",
            )
    return folder


def load_idx(path: Path) -> UInt8s:
    """Read the array of bytes in a gzip-compressed file of the idx format: magic number, sizes, values."""
    try:
        with gzip.open(path) as file:
            shape = _idx_shape(file.read(4), file, path)
            size = math.prod(shape)
            if size > _MOST_EXPANSION * path.stat().st_size:
                raise _no_idx(path, f"a header that announces {size} values, in {path.stat().st_size} bytes")
            values = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _no_idx(path, f"{type(error).__name__}: {error}") from error
    if len(values) != size:
        found = f"more than {size}" if len(values) > size else f"only {len(values)}"
        raise _no_idx(path, f"{found} values, announced as {size}")
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _idx_shape(magic: bytes, file: gzip.GzipFile, path: Path) -> tuple[int, ...]:
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise _no_idx(path, f"the first bytes {magic.hex(' ') or '(none)'}")
    sizes = struct.Struct(f">{magic[3]}I")
    header = file.read(sizes.size)
    if len(header) < sizes.size:
        raise _no_idx(path, f"a header of {4 + len(header)} bytes")
    return sizes.unpack(header)


def _no_idx(path: Path, given: str) -> DataError:
    return DataError(
        f"{path} is not a whole idx file of bytes.",
        given=given,
        expected="gzip; in it 00 00 08, the number of dimensions, their sizes, and as many bytes",
        hint="copy or fetch the file again",
    )


def _fetched(file: File, folder: Path, mirrors: Sequence[str]) -> bytes:
    """Fetch a file from the first mirror that has it undamaged."""
    failures = []
    for mirror in mirrors:
        log.info("Fetching %s", mirror + file.name)
        try:
            with urllib.request.urlopen(mirror + file.name, timeout=_TIMEOUT_SECONDS) as answer:
                data: bytes = answer.read(file.num_bytes + 1)
        except (OSError, HTTPException) as error:
            failures.append(f"{mirror}: {error}")
            continue
        if _sha256(data) == file.sha256:
            return data
        failures.append(f"{mirror}: another file, with sha256 {_sha256(data)}")
    raise DataError(
        f"{file.name} of MNIST is not in {folder}, and cannot be fetched.",
        given="; ".join(failures) or "no mirrors",
        expected=f"{file.num_bytes} bytes with sha256 {file.sha256}",
        hint=f"put the four files {', '.join(each.name for each in FILES)} into {folder}",
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _folder_of(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    check_local(path)
    return Path(path)


def _records_path(split: str, folder: Path | None, records_folder: Path | None) -> Path:
    return (records_folder or (folder or default_folder()) / "records") / f"{split}.tfrecords"


def _examples(images: UInt8s, labels: UInt8s) -> Iterator[bytes]:
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
