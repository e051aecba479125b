"""Files of torch.save, in today's format (a zip archive) and the one before torch 1.6. Nothing in them is run.

Torch's own unpickler for weights reads them; it knows tensors and plain values, and calls nothing else.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.errors import CheckpointError
from lockstep.listing import shorten
from lockstep.weights.name_maps import AVERAGE, AVERAGED_PARTS
from lockstep.weights.names import find_prefixes, swap_prefix
from lockstep.weights.source import (
    ZIP_FAULTS,
    ZIP_MAGIC,
    TensorInfo,
    damaged_file,
    damaged_tensor,
    entry_of,
    not_numbers,
    readable,
)

if TYPE_CHECKING:
    from torch import Tensor

_PROTOCOL = b"\x80\x02"
_RAW = ("state_dict", "model_state_dict", "model")
_MOST_ENTRIES, _MOST_DEPTH = 1_000_000, 32
_NAMES_IN_PICKLE = 8
_BLAMED = re.compile(r"GLOBAL (\S+)|WeightsUnpickler error:\s*([^\n]+)")


class TorchFile:
    """The tensors of a state dict, or of all dicts and lists in a file, by their keys joined with dots.

    Where the file has a "state_dict", "model_state_dict" or "model", only its tensors are listed, without this name.
    Averages beside them (AVERAGED_PARTS) get the ending of averages in TensorFlow's checkpoints. Other names stay as
    they are, with the "module." of a parallel module.

    Today's format is mapped into memory, and its checksums are verified when the first tensor is read; the older
    format is read at once, and has none.

    Raises:
        CheckpointError: it cannot be read, is damaged, holds more than tensors and plain values, or no tensors.
    """

    kind = "torch file"

    def __init__(self, path: Path) -> None:
        self.path = path
        with readable(path), path.open("rb") as file:
            head = file.read(len(ZIP_MAGIC))
            self._num_bytes = path.stat().st_size
        is_archive = head == ZIP_MAGIC
        if is_archive:
            _check_records(path, with_values=False)
        elif not head.startswith(_PROTOCOL):
            raise _foreign_pickle(path, head)
        self._is_verified = not is_archive
        content = _loaded(path, mapped=is_archive)
        try:
            self._tensors = _tensors(content)
        except ValueError as error:
            raise damaged_file(
                path, "cannot be used", given=str(error), expected="tensors in dicts and lists"
            ) from None
        if not self._tensors:
            raise _without_tensors(path, content)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo.of(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()
        }
        items = content.items() if isinstance(content, Mapping) else ()
        self.values: Mapping[str, int | float | str] = {
            str(key): value for key, value in items if isinstance(value, int | float | str)
        }
        """The numbers and texts beside the weights: the epoch, the best accuracy."""

    def read(self, name: str) -> Tensor:
        """Read a tensor, whole and contiguous, and verify its checksum."""
        tensor = entry_of(name, self._tensors, self.path).detach()
        if not self._is_verified:
            _check_records(self.path, with_values=True)
            self._is_verified = True
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise not_numbers(name, self.path, f"{tensor.dtype}, {tensor.layout}, on {tensor.device}")
        if tensor.nbytes > self._num_bytes:  # one value may stand for many
            raise damaged_tensor(
                name, self.path, given=f"{tensor.nbytes} bytes", expected=f"at most the {self._num_bytes} of the file"
            )
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _loaded(path: Path, *, mapped: bool) -> object:
    try:
        # Torch takes a path with this ending for a file of safetensors, whatever is in it.
        if mapped and not path.name.endswith(".safetensors"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        found = _BLAMED.search(str(error))
        raise _refused(path, (found[1] or found[2]).strip() if found else str(error).splitlines()[0]) from error
    except Exception as error:  # torch has no one kind of error for what is damaged
        raise damaged_file(
            path,
            "is no file of torch.save, or is damaged or cut short",
            given=f"{type(error).__name__}: {error}".splitlines()[0],
            expected="what torch.save has written",
        ) from error


def _tensors(content: object) -> dict[str, Tensor]:
    raw, averaged = _first(content, _RAW), _first(content, AVERAGED_PARTS)
    if averaged and not raw and isinstance(content, Mapping):
        raw = _weights_beside(averaged, content)
    if raw and averaged:
        return raw | {name + AVERAGE: tensor for name, tensor in averaged.items()}
    return raw or averaged or _flat(content)


def _weights_beside(averaged: Mapping[str, Tensor], content: Mapping[object, object]) -> dict[str, Tensor]:
    """The tensors beside the averages, if they have the names of at least half of these; else none."""
    rest = _flat({key: value for key, value in content.items() if key not in AVERAGED_PARTS})
    strip, add = find_prefixes(averaged, rest)
    num_averaged = len({swap_prefix(name, strip, add) for name in averaged}.intersection(rest))
    return rest if 2 * num_averaged >= len(averaged) else {}


def _first(content: object, keys: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of the first dict under one of the keys that has any."""
    found = [content[key] for key in keys if key in content] if isinstance(content, Mapping) else []
    flat = (_flat(each) for each in found if isinstance(each, Mapping))
    return next((tensors for tensors in flat if tensors), {})


def _flat(content: object) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for number, (name, value) in enumerate(_entries(content, "", _MOST_DEPTH)):
        if number == _MOST_ENTRIES:
            raise ValueError(f"more than {_MOST_ENTRIES} entries")
        if isinstance(value, torch.Tensor) and tensors.setdefault(name, value) is not value:
            raise ValueError(f"two tensors {name!r}")
    return tensors


def _entries(content: object, name: str, depth: int) -> Iterator[tuple[str, object]]:
    """Yield everything in dicts and lists, each under its keys and indices joined with dots."""
    if isinstance(content, Mapping):
        inside = ((str(key), value) for key, value in content.items())
    elif isinstance(content, list | tuple):
        inside = ((str(number), value) for number, value in enumerate(content))
    else:
        yield name or "tensor", content
        return
    if not depth:
        raise ValueError(f"more than {_MOST_DEPTH} dicts or lists, one inside of another")
    for key, value in inside:
        yield from _entries(value, f"{name}.{key}" if name else key, depth - 1)


def _refused(path: Path, blamed: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds more than tensors: loading it could run code, so it was not loaded.",
        given=blamed,
        expected="tensors, numbers, text, and dicts and lists of these",
        hint="with the program that wrote it, and where you trust it, save the tensors alone: "
        "torch.save(model.state_dict(), NEW_FILE)",
    )


def _foreign_pickle(path: Path, head: bytes) -> CheckpointError:
    """The error for a file that torch.save did not write, with the names that a pickle would call."""
    names: list[str] = []
    strings: list[str] = []
    # Where the pickle breaks off, the names so far count.
    with suppress(ValueError, IndexError, OverflowError, MemoryError), path.open("rb") as file:
        for opcode, argument, _ in pickletools.genops(file):  # reads them, and follows none
            if opcode.name == "GLOBAL":
                names.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                names.append(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
            if len(names) == _NAMES_IN_PICKLE:
                break
    if names or head.startswith(b"\x80"):
        return _refused(path, f"a pickle that is none of torch.save, and names {', '.join(names) or 'nothing'}")
    return damaged_file(
        path, "is no file of torch.save", given=f"the bytes {head.hex(' ')}", expected="a zip archive, or a pickle"
    )


def _without_tensors(path: Path, content: object) -> CheckpointError:
    keys = shorten([*map(str, content)]) if isinstance(content, Mapping) else ""
    return CheckpointError(
        f"{path} holds no tensors.",
        given=f"a {type(content).__name__}" + (f" with {keys}" if keys else ""),
        expected="a state dict, or a dict with one",
        hint="save it again: torch.save(model.state_dict(), FILE)",
    )


_PICKLE, _PROGRAM, _STORAGES = "data.pkl", "constants.pkl", "/data/"


def holds_torch(names: list[str]) -> bool:
    """Whether an archive with these names comes from torch.save, or is a TorchScript program."""
    return any(name.rpartition("/")[2] == _PICKLE for name in names)


def _check_records(path: Path, *, with_values: bool) -> None:
    """Verify the records of an archive: all but the values of tensors, or these too.

    A file written without checksums (`torch.serialization.set_crc32_options(False)`) has zeros in their place; of it
    nothing is verified.
    """
    try:
        with readable(path), zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            _refuse_records(path, records)
            if any(record.CRC for record in records):
                for record in records:
                    if with_values or _STORAGES not in record.filename:
                        _check_checksum(archive, record)
    except ZIP_FAULTS as error:
        raise damaged_file(
            path, "is damaged or cut short", given=str(error), expected="what torch.save has written"
        ) from error


def _refuse_records(path: Path, records: list[zipfile.ZipInfo]) -> None:
    """Refuse a program, and sizes that cannot be."""
    if any(record.filename.rpartition("/")[2] == _PROGRAM for record in records):
        raise CheckpointError(
            f"{path} is a program of TorchScript, which has code.",
            given="a file of torch.jit.save",
            expected="tensors, as of torch.save(model.state_dict(), FILE)",
            hint="where you trust it, torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE)",
        )
    claimed, there = sum(record.file_size for record in records), path.stat().st_size
    if claimed > there:
        raise damaged_file(
            path,
            "is damaged",
            given=f"records of {claimed} bytes",
            expected=f"no more than the {there} of the file, which is not compressed",
        )


def _check_checksum(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as file:
        while file.read(1 << 20):
            pass
