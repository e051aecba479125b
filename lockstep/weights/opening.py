"""The weights in a file, whatever wrote it: found out by looking into it."""

from __future__ import annotations

import os
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import CheckpointError
from lockstep.listing import shorten
from lockstep.records.tfrecord import HEAD_BYTES, is_head
from lockstep.weights import sstable, zip_files
from lockstep.weights.file_errors import unreadable
from lockstep.weights.keras_h5 import KerasH5
from lockstep.weights.numpy_archive import ENDING, NumpyArchive, NumpyFile
from lockstep.weights.safetensors_file import SafetensorsFile
from lockstep.weights.source import WeightSource
from lockstep.weights.tf_checkpoint import STATE, open_tensorflow
from lockstep.weights.torch_file import TorchFile
from lockstep.weights.torch_records import holds_torch

KNOWN = (
    "safetensors, a file of torch.save, NumPy's .npz and .npy, Keras weights in HDF5, "
    "a TensorFlow checkpoint (its folder, prefix or one of its files), or a run of Lockstep or a checkpoint of it"
)
"""What weights are read from, in words: runs by `open_weights` of `lockstep.training.run_weights`, the rest here."""

_NUMPY, _HDF5, _PICKLE = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n", b"\x80"
# A file of safetensors begins with the length of its header, which may be so long.
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000


class _Look(NamedTuple):
    """What can be seen of a file without reading it."""

    head: bytes
    tail: bytes
    num_bytes: int


def open_file(path: str | Path) -> WeightSource:
    """The weights of another system, known by what is in the file; its name and ending mean nothing.

    The folder of a TensorFlow checkpoint, its prefix and any of its files stand for the checkpoint.

    Raises:
        CheckpointError: there is no such file, it holds no weights that are known, or they are damaged.
    """
    path = Path(path)
    if path.is_dir():
        if (path / STATE).is_file():
            return open_tensorflow(path)
        raise unknown(path, _folder_in_words(path))
    if path.is_file():
        return _open(path, _looked_at(path))
    if _is_prefix(path):
        return open_tensorflow(path)
    raise unknown(path, "nothing that is called like this")


def _open(path: Path, look: _Look) -> WeightSource:
    if look.head.startswith(_HDF5):
        return KerasH5(path)
    if look.head.startswith((zip_files.MAGIC, zip_files.EMPTY)):
        return _open_archive(path)
    if look.head.startswith(_NUMPY):
        return NumpyFile(path)
    if look.tail == sstable.MAGIC or _is_part_of_checkpoint(path):
        return open_tensorflow(path)
    if _is_safetensors(look):
        return SafetensorsFile(path)
    if look.head.startswith(_PICKLE):
        return TorchFile(path)
    raise unknown(path, _in_words(look))


def _open_archive(path: Path) -> WeightSource:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, *zip_files.FAULTS) as error:
        raise unknown(path, f"a zip archive that is damaged or cut short ({error})") from error
    if holds_torch(names):
        return TorchFile(path)
    if all(name.endswith(ENDING) for name in names):
        return NumpyArchive(path)
    raise unknown(path, f"a zip archive with {shorten(names)}")


def _is_prefix(path: Path) -> bool:
    """Whether names of files begin like this, or it is a pattern of some."""
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    return any(name.startswith(path.name) or fnmatchcase(name, path.name) for name in names)


def _is_part_of_checkpoint(path: Path) -> bool:
    """Whether it is named as a file of a TensorFlow checkpoint whose index is there: of values, too, or of a graph."""
    stem, _, ending = path.name.rpartition(".")
    is_named = ending in ("index", "meta") or ending.startswith("data-")
    return bool(stem) and is_named and path.with_name(f"{stem}.index").is_file()


def _is_safetensors(look: _Look) -> bool:
    """A length, and an object of JSON."""
    length = int.from_bytes(look.head[:_LENGTH_BYTES], "little")
    return look.head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and length <= _MOST_HEADER_BYTES


def unknown(path: Path, found: str) -> CheckpointError:
    """The error for what holds no weights that are known."""
    return CheckpointError(
        f"{path} holds no weights that are known.",
        given=found,
        expected=KNOWN,
        hint="check the path; or save the weights as safetensors, which every system can",
    )


def _looked_at(path: Path) -> _Look:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, num_bytes - len(sstable.MAGIC)))
            return _Look(head, file.read(), num_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def _in_words(look: _Look) -> str:
    if not look.num_bytes:
        return "an empty file"
    if is_head(look.head):
        return "a file of records (TFRecord)"
    return f"a file of {look.num_bytes} bytes that begins with {look.head.hex(' ')}"


def _folder_in_words(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"a folder that cannot be read ({error.strerror})"
    return f"a folder with {shorten(names)}" if names else "an empty folder"
