"""The weights in a file, whatever wrote it: found out by looking into it."""

from __future__ import annotations

import os
import re
import zipfile
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PureWindowsPath
from typing import NamedTuple, TypeVar, cast

from lockstep.errors import CheckpointError, NotFoundError
from lockstep.listing import hint_for_path, shorten, what_is_there
from lockstep.records.index_cache import local_copies, local_copy
from lockstep.records.shards import data_path
from lockstep.records.tfrecord import HEAD_BYTES, is_head
from lockstep.storage.remote_path import AnyPath, RemotePath
from lockstep.weights.keras_h5 import KerasH5
from lockstep.weights.numpy_files import ENDING, NumpyArchive, NumpyFile
from lockstep.weights.safetensors_file import SafetensorsFile
from lockstep.weights.source import (
    EMPTY_ZIP,
    ZIP_FAULTS,
    ZIP_MAGIC,
    WeightSource,
    check_present,
    damaged_file,
    readable,
)
from lockstep.weights.tf_table import INDEX, TABLE_MAGIC
from lockstep.weights.torch_file import TorchFile, holds_torch

KNOWN = (
    "safetensors, a file of torch.save, NumPy's .npz and .npy, Keras weights in HDF5, "
    "a TensorFlow checkpoint (its folder, prefix or one of its files), or a run of Lockstep or a checkpoint of it"
)
"""The known formats, in words; `lockstep.training.run_weights` opens runs, this module the rest."""

_NUMPY, _HDF5, _PICKLE = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n", b"\x80"
# A file of safetensors begins with the length of its header, which has a limit.
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000
_MOST_NAME_CHARACTERS = 1000

SomePath = TypeVar("SomePath", bound=AnyPath)


class _Look(NamedTuple):
    """The first and last bytes of a file, and its size."""

    head: bytes
    tail: bytes
    num_bytes: int


def open_weights_file(path: str | AnyPath) -> WeightSource:
    """Open the weights of another system, which is found by the content of the file; name and ending mean nothing.

    The folder of a TensorFlow checkpoint, its prefix and any of its files stand for the checkpoint. What is in an
    object store is copied into the user's cache, once.

    Raises:
        CheckpointError: there are no such weights, or they are damaged, or a tensor has a name that no trainer gives.
    """
    whole = data_path(path)
    source = _open_path(weights_in_store(whole) if isinstance(whole, RemotePath) else whole)
    # Renames, patterns and prefixes are tried at every place of a name, which takes the square of its length.
    if too_long := next((name for name in source.tensors if len(name) > _MOST_NAME_CHARACTERS), None):
        raise CheckpointError(
            f"A tensor of {source.path} has a name that is too long.",
            given=f"{len(too_long):,} characters, which begin with {too_long[:40]!r}",
            expected=f"at most {_MOST_NAME_CHARACTERS:,} characters",
            hint="save the weights under the names of their parameters",
        )
    return source


def weights_in_store(path: RemotePath) -> Path:
    """Copy weights into the user's cache, all files of a TensorFlow checkpoint, and return their path there."""
    if path.is_dir():
        if not (path / STATE).is_file():
            raise unknown(path, f"a folder with {shorten([each.name for each in path.iterdir()])}")
        path = path / PureWindowsPath(latest_checkpoint(path).name).name
    named = _ENDING.fullmatch(path.name) or _SHARD.fullmatch(path.name)
    if not named and path.is_file():
        return local_copy(path)
    stem = named[1] if named else path.name
    try:
        found = [
            each for each in path.parent.iterdir() if each.is_file() and each.name.startswith((f"{stem}.", f"{stem}-"))
        ]
    except FileNotFoundError:
        found = []
    if not found:
        raise _no_weights(path)
    return local_copies(found)[0].with_name(path.name)


def _open_path(path: Path) -> WeightSource:
    if path.is_dir():
        if (path / STATE).is_file():
            return open_tensorflow(path)
        raise unknown(path, what_is_there(path))
    if path.is_file():
        return _open(path, _looked_at(path))
    if _is_prefix(path):
        return open_tensorflow(path)
    raise _no_weights(path)


def _no_weights(path: AnyPath) -> NotFoundError:
    return NotFoundError(
        f"There are no weights called {path}.",
        given="no such file or folder",
        expected="a file or folder of weights, or a run of Lockstep or a checkpoint of it",
        hint=hint_for_path(path),
    )


def _open(path: Path, look: _Look) -> WeightSource:
    if look.head.startswith(_HDF5):
        return KerasH5(path)
    if look.head.startswith((ZIP_MAGIC, EMPTY_ZIP)):
        return _open_archive(path)
    if look.head.startswith(_NUMPY):
        return NumpyFile(path)
    if look.tail == TABLE_MAGIC or _is_part_of_checkpoint(path):
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
    except (OSError, *ZIP_FAULTS) as error:
        raise damaged_file(
            path, "is a damaged zip archive", given=str(error), expected="an archive that is whole"
        ) from error
    if holds_torch(names):
        return TorchFile(path)
    if all(name.endswith(ENDING) for name in names):
        return NumpyArchive(path)
    raise unknown(path, f"a zip archive with {shorten(names)}")


def _is_prefix(path: Path) -> bool:
    """Whether the names of some files begin with this name, or match it as a pattern."""
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    return any(name.startswith(path.name) or fnmatchcase(name, path.name) for name in names)


def _is_part_of_checkpoint(path: Path) -> bool:
    """Whether this is the index, the values or the graph of a TensorFlow checkpoint whose index is there."""
    stem, _, ending = path.name.rpartition(".")
    is_named = ending in ("index", "meta") or ending.startswith("data-")
    return bool(stem) and is_named and path.with_name(f"{stem}.index").is_file()


def _is_safetensors(look: _Look) -> bool:
    """Whether a file begins with a length and a JSON object."""
    length = int.from_bytes(look.head[:_LENGTH_BYTES], "little")
    return look.head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and length <= _MOST_HEADER_BYTES


def unknown(path: AnyPath, found: str) -> NotFoundError:
    """The error for a path without weights in a known format."""
    return NotFoundError(
        f"{path} holds no weights that are known.",
        given=found,
        expected=KNOWN,
        hint="check the path; or save the weights as safetensors, which every system can",
    )


def _looked_at(path: Path) -> _Look:
    with readable(path), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - len(TABLE_MAGIC)))
        return _Look(head, file.read(), num_bytes)


def _in_words(look: _Look) -> str:
    if not look.num_bytes:
        return "an empty file"
    if is_head(look.head):
        return "a file of records (TFRecord)"
    return f"a file of {look.num_bytes} bytes that begins with {look.head.hex(' ')}"


STATE = "checkpoint"

_STATE_MOST_BYTES = 1 << 20
# Not the parser of the format: the list of all checkpoints, which follows, may be cut off, and no path need be UTF-8.
_LATEST = re.compile(r"""^[ \t]*model_checkpoint_path[ \t]*:[ \t]*(["'])((?:[^\\\n]|\\.)+?)\1""", re.MULTILINE)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
# What TensorFlow adds to a prefix, for the files of version 2 and for the graph.
_ENDING = re.compile(r"(.+)(?:\.index|\.meta|\.data-\d{5}-of-\d{5})", re.DOTALL)
# Files of version 1, named one by one or all together.
_SHARD = re.compile(r"(.+)-(?:\d{5}|\?{5})-of-(\d{5})", re.DOTALL)


def open_tensorflow(path: Path) -> WeightSource:
    """Open a TensorFlow checkpoint of version 2 or 1, without TensorFlow.

    Args:
        path: a folder, for the latest checkpoint by its file `checkpoint` (if the folder comes from another machine,
            only the last part of the path in it counts); a prefix such as "model.ckpt-5000"; or one of the prefix's
            files (.index, .data-00000-of-00001, .meta). Of version 1, the file; of several files their prefix, one of
            them, or their pattern "model.ckpt-?????-of-00004".
    """
    prefix = latest_checkpoint(path) if path.is_dir() else path
    with readable(path):
        found = _opened_latest(path, prefix) if path.is_dir() else _opened(prefix)
    if found:
        return found
    raise _absent(path, prefix)


def _opened(prefix: Path) -> WeightSource | None:
    """Open the checkpoint of a prefix or file; None if there is none."""
    # Their tables of dtypes are torch's.
    from lockstep.weights.tf_checkpoints import TensorBundle, TensorTables

    if ending := _ENDING.fullmatch(prefix.name):
        prefix = prefix.with_name(ending[1])
    if prefix.name and prefix.with_name(prefix.name + INDEX).exists():
        return TensorBundle(prefix)
    shard = _SHARD.fullmatch(prefix.name)
    if not shard and prefix.is_file():
        return TensorTables(prefix, [prefix])
    if shard := shard or _first_shard(prefix):
        return TensorTables(*_shards(prefix.with_name(shard[1]), int(shard[2])))
    return None


def _opened_latest(folder: Path, named: Path) -> WeightSource | None:
    """Open the latest checkpoint of a folder; where its path leads nowhere, the one of that name in the folder.

    The folder may have been copied from another machine, whose paths it holds.
    """
    try:
        found = _opened(named)
    except PermissionError:  # the path may lead through a folder that is closed on this machine
        found = None
    name = PureWindowsPath(named.name).name
    return found or (_opened(folder / name) if name else None)


def latest_checkpoint(folder: SomePath) -> SomePath:
    """The prefix of a folder's latest checkpoint, from its file `checkpoint`: absolute, or within the folder."""
    state = folder / STATE
    with readable(state):
        try:
            with state.open("rb") as file:
                text = file.read(_STATE_MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            raise NotFoundError(
                f"{folder} does not say which checkpoint is its latest.",
                given=f"a folder without a file {STATE!r}, with {_checkpoints_in(folder)}",
                expected=f"a file {STATE!r}, as TensorFlow writes it",
                hint="name the checkpoint itself",
            ) from None
    if latest := _LATEST.search(text):
        return cast("SomePath", folder / _unescaped(latest[2]))
    raise CheckpointError(
        f"{state} names no checkpoint.",
        given=f"{text[:100]!r}",
        expected='a line such as model_checkpoint_path: "model.ckpt-5000"',
        hint="name the checkpoint itself",
    )


def _unescaped(text: str) -> str:
    """A string of protocol buffers' text format."""

    def plain(escape: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = escape.groups()
        if letter:
            return _ESCAPED.get(letter, letter)
        return bytes((int(octal or hexadecimal, 8 if octal else 16) & 255,))

    return _ESCAPE.sub(plain, text.encode()).decode(errors="surrogateescape")


def _first_shard(prefix: Path) -> re.Match[str] | None:
    """Match the first file of version 1 with this prefix, if there is just one set of files."""
    names = [path.name for path in prefix.parent.glob(f"{escape(prefix.name)}-00000-of-*")]
    return _SHARD.fullmatch(names[0]) if len(names) == 1 else None


def _shards(prefix: Path, count: int) -> tuple[Path, list[Path]]:
    """The pattern of a set of files, and the files."""
    pattern = prefix.with_name(f"{prefix.name}-?????-of-{count:05}")
    files = [prefix.with_name(f"{prefix.name}-{number:05}-of-{count:05}") for number in range(count)]
    check_present(pattern, files, count)
    return pattern, files


def _absent(path: Path, prefix: Path) -> NotFoundError:
    named = f"{prefix}, which {path / STATE} names" if path.is_dir() else str(path)
    return NotFoundError(
        f"There is no TensorFlow checkpoint {named}.",
        given=f"a folder {prefix.parent} with {_checkpoints_in(prefix.parent)}",
        expected=f"{prefix.name}{INDEX} (version 2), or the file {prefix.name} (version 1)",
        hint="name a checkpoint that is there",
    )


def _checkpoints_in(folder: AnyPath) -> str:
    try:
        names = sorted(path.name.removesuffix(INDEX) for path in folder.iterdir() if path.name.endswith(INDEX))
    except OSError as error:
        return f"nothing to be read ({error.strerror})"
    return f"the checkpoints {shorten(names)}" if names else "no checkpoint of version 2"
