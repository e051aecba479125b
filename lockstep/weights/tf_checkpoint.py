"""TensorFlow checkpoints by path: a folder, a prefix, or any of the files."""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path, PureWindowsPath

from lockstep.errors import CheckpointError
from lockstep.listing import shorten
from lockstep.weights.file_errors import check_whole, unreadable
from lockstep.weights.source import WeightSource
from lockstep.weights.tf_bundle import INDEX, TensorBundle
from lockstep.weights.tf_v1 import TensorTables

STATE = "checkpoint"

_STATE_MOST_BYTES = 1 << 20
# What TensorFlow adds to a prefix, for the files of version 2 and for the graph.
_ENDING = re.compile(r"(.+)(?:\.index|\.meta|\.data-\d{5}-of-\d{5})", re.DOTALL)
# Files of version 1, named one by one or all together.
_SHARD = re.compile(r"(.+)-(?:\d{5}|\?{5})-of-(\d{5})", re.DOTALL)
_LATEST = re.compile(r"""^[ \t]*model_checkpoint_path[ \t]*:[ \t]*(["'])((?:[^\\\n]|\\.)+?)\1""", re.MULTILINE)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}


def open_tensorflow(path: Path) -> WeightSource:
    """The checkpoint at a path, of version 2 or 1, to be read without TensorFlow.

    Args:
        path: a folder, for its latest checkpoint, which its file `checkpoint` names (where the folder was copied from
            another machine, only the last part of that path counts); or a prefix such as "model.ckpt-5000"; or one of
            the files of that prefix (.index, .data-00000-of-00001, .meta), which stands for all. Of version 1, the
            file; of several their prefix, one of them, or their pattern "model.ckpt-?????-of-00004".

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    prefix = latest_checkpoint(path) if path.is_dir() else path
    try:
        found = _opened_latest(path, prefix) if path.is_dir() else _opened(prefix)
    except OSError as error:
        raise unreadable(path, error) from error
    if found:
        return found
    raise _absent(path, prefix)


def _opened(prefix: Path) -> WeightSource | None:
    """The checkpoint with this prefix, or of this file; None if there is none."""
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
    """The checkpoint that a folder names as its latest; if it is not there, its namesake in the folder.

    The folder may have been copied from another machine since, with the paths of that.
    """
    try:
        found = _opened(named)
    except PermissionError:  # such a path may lead through a folder that is closed here
        found = None
    name = PureWindowsPath(named.name).name
    return found or (_opened(folder / name) if name else None)


def latest_checkpoint(folder: Path) -> Path:
    """The prefix of a folder's latest checkpoint, as its file `checkpoint` has it: absolute, or within the folder.

    Raises:
        CheckpointError: there is no such file, or it names no checkpoint.
    """
    state = folder / STATE
    try:
        with state.open("rb") as file:
            text = file.read(_STATE_MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} does not say which checkpoint is its latest.",
            given=f"a folder without a file {STATE!r}, with {_checkpoints_in(folder)}",
            expected=f"a file {STATE!r}, as TensorFlow writes it",
            hint="name the checkpoint itself",
        ) from None
    except OSError as error:
        raise unreadable(state, error) from error
    if latest := _LATEST.search(text):
        return folder / _unescaped(latest[2])
    raise CheckpointError(
        f"{state} names no checkpoint.",
        given=f"{text[:100]!r}",
        expected='a line such as model_checkpoint_path: "model.ckpt-5000"',
        hint="name the checkpoint itself",
    )


def _first_shard(prefix: Path) -> re.Match[str] | None:
    """The name of the first file of version 1 with this prefix, if there is one set of them."""
    names = [path.name for path in prefix.parent.glob(f"{escape(prefix.name)}-00000-of-*")]
    return _SHARD.fullmatch(names[0]) if len(names) == 1 else None


def _shards(prefix: Path, count: int) -> tuple[Path, list[Path]]:
    """The pattern of all files of a set, and these."""
    pattern = prefix.with_name(f"{prefix.name}-?????-of-{count:05}")
    files = [prefix.with_name(f"{prefix.name}-{number:05}-of-{count:05}") for number in range(count)]
    check_whole(pattern, files, count)
    return pattern, files


def _absent(path: Path, prefix: Path) -> CheckpointError:
    named = f"{prefix}, which {path / STATE} names" if path.is_dir() else str(path)
    return CheckpointError(
        f"There is no TensorFlow checkpoint {named}.",
        given=f"a folder {prefix.parent} with {_checkpoints_in(prefix.parent)}",
        expected=f"{prefix.name}{INDEX} (version 2), or the file {prefix.name} (version 1)",
        hint="name a checkpoint that is there",
    )


def _checkpoints_in(folder: Path) -> str:
    try:
        names = sorted(path.name.removesuffix(INDEX) for path in folder.iterdir() if path.name.endswith(INDEX))
    except OSError as error:
        return f"nothing to be read ({error.strerror})"
    return f"the checkpoints {shorten(names)}" if names else "no checkpoint of version 2"


def _unescaped(text: str) -> str:
    """A string of protocol buffers' text format."""

    def plain(escape: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = escape.groups()
        if letter:
            return _ESCAPED.get(letter, letter)
        return bytes((int(octal or hexadecimal, 8 if octal else 16) & 255,))

    return _ESCAPE.sub(plain, text.encode()).decode(errors="surrogateescape")
