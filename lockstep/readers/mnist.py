"""MNIST: its four original files, read into memory, and records of it."""

from __future__ import annotations

import gzip
import math
import struct
import urllib.request
import zlib
from collections.abc import Sequence
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.durable import atomic_write
from lockstep.errors import DataError, InputError
from lockstep.listing import format_size
from lockstep.readers.fingerprint import Fingerprint
from lockstep.readers.reader import Arrays, Reader
from lockstep.readers.records import Records
from lockstep.records.index_cache import Cache, cache_folder
from lockstep.records.open_files import content_of
from lockstep.records.shards import Paths, data_path
from lockstep.records.template import Field, Integer, Pixels
from lockstep.screen import log
from lockstep.storage.remote_path import AnyPath, RemotePath

UInt8s = npt.NDArray[np.uint8]


class File(NamedTuple):
    """One of the original files."""

    name: str
    sha256: str
    num_bytes: int


class Split(NamedTuple):
    """Some rows of a pair of the original files."""

    images: File
    labels: File
    rows: range
    fingerprint: str
    """Fingerprint of the records that hold the same examples: a run trained on those goes on with these."""


FILES = (
    File("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    File("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    File("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    File("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")

# The first 5,000 images validate, as in TensorFlow's `read_data_sets` and in the reference's converter.
SPLITS = {
    "train": Split(*FILES[:2], range(5_000, 60_000), "55000 records, 49005000 bytes, crc32c e4f4d0d8"),
    "validation": Split(*FILES[:2], range(5_000), "5000 records, 4455000 bytes, crc32c be7377d5"),
    "test": Split(*FILES[2:], range(10_000), "10000 records, 8910000 bytes, crc32c 89658ab9"),
}

_FIELDS: dict[str, Field] = {"image": Pixels("image_raw", (1, 28, 28)), "label": Integer("label")}
_UNSIGNED_BYTE = 0x08
_MOST_EXPANSION = 1032  # of deflate: no gzip file holds more bytes than this times its own
_TIMEOUT_SECONDS = 30


def mnist_reader(split: str, folder: str | AnyPath | None = None, cache: Cache = None) -> Reader:
    """Read `train` (55,000 examples), `validation` (5,000) or `test` (10,000) into memory, from the original files.

    Its batches are {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}.

    Args:
        split: one of the three.
        folder: of the four original files, `*-ubyte.gz`; those that are missing are fetched to it. By default
            `data/mnist` in the current directory if it is there, else `mnist` in the cache.
        cache: the folder of the cache; by default the user's.

    Raises:
        InputError: there is no such split.
        DataError: a file is damaged, or is missing and cannot be fetched.
    """
    if split not in SPLITS:
        raise InputError(
            f"MNIST has no split {split!r}.",
            given=f"split={split!r}",
            expected=" or ".join(f'"{name}"' for name in SPLITS),
            hint="name one of these",
        )
    return _Mnist(split, mnist_folder(folder, cache))


class _Mnist(Arrays):
    """The examples of a split, under the names and with the fingerprint of their records."""

    def __init__(self, split: str, folder: AnyPath) -> None:
        self._split = SPLITS[split]
        self._file = f"{split}.tfrecords"
        rows = slice(self._split.rows.start, self._split.rows.stop)
        files = ensure_files(folder, (self._split.images, self._split.labels))
        images, labels = (load_idx(file, rows.stop)[rows].copy() for file in files)
        super().__init__({"image": torch.from_numpy(images[:, None]), "label": torch.from_numpy(labels).long()})

    def example_id(self, index: int) -> str:
        """Return the name of the file of records that would hold it, and its number in that file."""
        return f"{self._file}:{index}"

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the records that hold the same examples."""
        return {self._file: self._split.fingerprint}


def mnist_records(paths: Paths, *, verify: bool = True, cache: Cache = None) -> Records:
    """Open records with raw pixels, 784 bytes in `image_raw`, and an integer in `label`; both are required.

    Its batches are {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}.
    """
    return Records(paths, _FIELDS, verify=verify, cache=cache)


def mnist_folder(folder: str | AnyPath | None = None, cache: Cache = None) -> AnyPath:
    """Return the folder of the original files, as `mnist_reader` finds it."""
    here = Path("data/mnist")
    if folder is not None:
        return data_path(folder)
    kept = cache_folder(cache)
    return here if kept is None or here.is_dir() else kept / "mnist"


def to_fetch(folder: AnyPath) -> str:
    """Say which files `ensure_files` would fetch to a folder, and from where; "" if none."""
    missing = [] if isinstance(folder, RemotePath) else [file for file in FILES if not (folder / file.name).exists()]
    size = format_size(sum(file.num_bytes for file in missing))
    names = ", ".join(file.name for file in missing)
    return f"fetched to {folder} by training: {names}; {size} from {MIRRORS[0]}" if missing else ""


def ensure_files(folder: AnyPath, files: Sequence[File] = FILES, mirrors: Sequence[str] = MIRRORS) -> list[AnyPath]:
    """Verify files in the folder (another file is left as it is), fetch missing ones, and return their paths.

    Nothing is fetched into an object store.
    """
    paths = [folder / file.name for file in files]
    for file, path in zip(files, paths, strict=True):
        try:
            given = content_of(path)
        except FileNotFoundError:
            data = _fetched(file, folder, () if isinstance(path, RemotePath) else mirrors)
            with atomic_write(Path(str(path)), parents=True, failure=DataError) as new:
                new.write(data)
            continue
        except OSError as error:
            raise DataError(
                f"{path} cannot be read.",
                given=str(error),
                expected="an original file of MNIST that may be read",
                hint="check who may read it, or name another folder",
            ) from error
        if (checksum := sha256(given).hexdigest()) != file.sha256:
            raise DataError(
                f"{path} is not MNIST's original file.",
                given=f"sha256 {checksum}, {len(given)} bytes",
                expected=f"sha256 {file.sha256}, {file.num_bytes} bytes",
                hint="move it away, and it will be fetched again",
            )
    return paths


def load_idx(path: AnyPath, most_rows: int | None = None) -> UInt8s:
    """Read the array of bytes in a gzip-compressed file of the idx format: magic number, sizes, values.

    With `most_rows` no more than these first rows are read, and what follows them is not checked.
    """
    try:
        with path.open("rb") as whole, gzip.open(whole) as file:
            shape = _idx_shape(file.read(4), file, path)
            size = math.prod(shape)
            if size > _MOST_EXPANSION * path.stat().st_size:
                raise _no_idx(path, f"a header that announces {size} values, in {path.stat().st_size} bytes")
            if most_rows is not None and most_rows < shape[0]:
                shape = (most_rows, *shape[1:])
                size = math.prod(shape)
                values = file.read(size)
            else:
                values = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _no_idx(path, f"{type(error).__name__}: {error}") from error
    if len(values) != size:
        found = f"more than {size}" if len(values) > size else f"only {len(values)}"
        raise _no_idx(path, f"{found} values, announced as {size}")
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _idx_shape(magic: bytes, file: gzip.GzipFile, path: AnyPath) -> tuple[int, ...]:
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise _no_idx(path, f"the first bytes {magic.hex(' ') or '(none)'}")
    sizes = struct.Struct(f">{magic[3]}I")
    header = file.read(sizes.size)
    if len(header) < sizes.size:
        raise _no_idx(path, f"a header of {4 + len(header)} bytes")
    return sizes.unpack(header)


def _no_idx(path: AnyPath, given: str) -> DataError:
    return DataError(
        f"{path} is not a whole idx file of bytes.",
        given=given,
        expected="gzip; in it 00 00 08, the number of dimensions, their sizes, and as many bytes",
        hint="copy or fetch the file again",
    )


def _fetched(file: File, folder: AnyPath, mirrors: Sequence[str]) -> bytes:
    failures = []
    for mirror in mirrors:
        log.info("Fetching %s", mirror + file.name)
        try:
            with urllib.request.urlopen(mirror + file.name, timeout=_TIMEOUT_SECONDS) as answer:
                data: bytes = answer.read(file.num_bytes + 1)
        except (OSError, HTTPException) as error:
            failures.append(f"{mirror}: {error}")
            continue
        if (digest := sha256(data).hexdigest()) == file.sha256:
            return data
        failures.append(f"{mirror}: another file, with sha256 {digest}")
    raise DataError(
        f"{file.name} of MNIST is not in {folder}, and cannot be fetched.",
        given="; ".join(failures) or "no mirrors",
        expected=f"{file.num_bytes} bytes with sha256 {file.sha256}",
        hint=f"put the four files {', '.join(each.name for each in FILES)} into {folder}",
    )
