"""Fingerprints of data: a resumed run compares them, and so notices that its data has changed.

A fingerprint is a dict from the name of each part of a source (a shard, a class, some images) to a text with its
counts, sizes and checksums, or to the fingerprint of a source within the source. It does not depend on where the data
is, or when it was written: a copy on another machine has the same one. Checkpoints keep these texts, so changing their
wording makes all data seem changed. The options of a reader stand beside them, for the same files give other labels
with another offset: `tells_options` has each reader of Lockstep tell the arguments that it was made with.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lockstep.description import bytes_of_tensor, changes, described
from lockstep.errors import InputError, LockstepError

Fingerprint = dict[str, Any]

MOST_PARTS = 1024
"""Parts that are named one by one; of more, neighbours are put together."""

_T = TypeVar("_T")
_OPTIONS = "options of "
_TOLD_ALREADY = ("path", "paths", "root", "folder", "annotations", "images", "labels", "reader", "sources", "indices")
_NOT_TOLD = frozenset((*_TOLD_ALREADY, "cache", "verify", "bad_objects", "truth", "label_map_path", "zero_based"))
"""Arguments of readers that change nothing that is trained on, or nothing that the fingerprint does not say itself."""
_OF_DECODING = frozenset(("decoder", "max_pixels"))
"""Fields of a `Decoding` that do not change a pixel."""

_MOST_CHARACTERS = 1 << 20
_MOST_CHECKED_BYTES = 1 << 30
_MOST_CHANGES = 10


def fingerprint_of(source: object, num_examples: int | None = None) -> Fingerprint:
    """Identify the examples of a reader or dataset: by its `fingerprint()`, or without one by its class and length.

    One of more than a million characters is kept as its checksum. A method that needs arguments does not count.
    """
    own = _own_of(source)
    if own is None:
        size = "" if num_examples is None else f" of {num_examples} examples"
        return {"source": type(source).__name__ + size}
    try:
        text = json.dumps(own(), allow_nan=False)
    except LockstepError:
        raise
    except Exception as error:
        if type(source).__module__.startswith("lockstep."):
            raise
        raise InputError(
            f"fingerprint() of {type(source).__name__} does not return JSON.",
            given=f"{type(error).__name__}: {error}",
            expected="a text, a number, or a dict of them by the names of the parts",
            hint="return such as {'images.bin': '1000 images, crc32c 89abcdef'}",
        ) from error
    told = json.loads(text)
    found: Fingerprint = told if isinstance(told, dict) else {"source": told}
    if len(text) > _MOST_CHARACTERS:
        found = _shortened(found, text)
    options = getattr(source, "_options", None)
    return found | {f"{_OPTIONS}{type(source).__name__}": options} if options else found


def tells_options(reader: type[_T]) -> type[_T]:
    """Decorate a reader's class: its fingerprint tells the arguments that a reader is made with, but for `_NOT_TOLD`.

    An argument that only one of two versions of the class has is not compared.
    """
    make: Callable[..., None] = reader.__init__
    signature = inspect.signature(make)

    @wraps(make)
    def make_and_tell(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        given = signature.bind(self, *arguments, **named)
        given.apply_defaults()
        told = {n: described(value) for n, value in [*given.arguments.items()][1:] if n not in _NOT_TOLD}
        if isinstance(decoding := told.get("decoding"), dict):
            told["decoding"] = {name: value for name, value in decoding.items() if name not in _OF_DECODING}
        self._options = {"class": type(self).__name__, **told} if told else {}

    reader.__init__ = make_and_tell  # type: ignore[method-assign]
    return reader


def _shortened(fingerprint: Fingerprint, text: str) -> Fingerprint:
    """Keep the checksum of a long fingerprint, beside the options in it."""
    options = {name: value for name, value in _flat(fingerprint) if _is_options(name)}
    if options:
        text = json.dumps(_without_options(fingerprint))
    if len(text) <= _MOST_CHARACTERS:
        return fingerprint
    return {"source": f"{len(text)} characters, {checksum(text.encode())}"} | options


def _is_options(name: str) -> bool:
    return name.rpartition(": ")[2].startswith(_OPTIONS)


def _without_options(fingerprint: Fingerprint) -> Fingerprint:
    return {
        name: _without_options(value) if isinstance(value, dict) else value
        for name, value in fingerprint.items()
        if not _is_options(name)
    }


def fingerprint_of_dataset(dataset: Any) -> Fingerprint:
    """Identify the examples of a map-style dataset: by its own fingerprint, or by the content of torch's classes."""
    if _own_of(dataset) is None:
        if isinstance(dataset, TensorDataset):
            return fingerprint_of_tensors({str(number): values for number, values in enumerate(dataset.tensors)})
        if isinstance(dataset, Subset):
            return fingerprint_of_some(fingerprint_of_dataset(dataset.dataset), [*map(int, dataset.indices)])
        if isinstance(dataset, ConcatDataset):
            return {str(number): fingerprint_of_dataset(each) for number, each in enumerate(dataset.datasets)}
    return fingerprint_of(dataset, len(dataset) if hasattr(dataset, "__len__") else None)


def _own_of(source: object) -> Callable[[], Any] | None:
    """Return the source's method `fingerprint`, if it can be called without arguments."""
    own: Callable[[], Any] | None = getattr(source, "fingerprint", None)
    if not callable(own):
        return None
    try:
        inspect.signature(own).bind()
    except TypeError:
        return None
    except ValueError:  # a function written in C does not tell
        pass
    return own


def fingerprint_of_tensors(fields: Mapping[str, Tensor]) -> Fingerprint:
    """Describe each field by dtype, shape and checksum; above 1 GiB the checksum is of evenly spaced rows."""
    return {name: _described(values.detach()) for name, values in fields.items()}


def fingerprint_of_some(whole: Fingerprint, indices: Sequence[int] | npt.NDArray[np.int64]) -> Fingerprint:
    """Identify some examples of a source, by their indices and the fingerprint of the whole."""
    numbers = np.asarray(indices, dtype="<i8")
    return {"indices": f"{len(numbers)}, {checksum(numbers)}", "source": whole}


def named_parts(parts: Iterable[tuple[str, str]], most: int = MOST_PARTS) -> Fingerprint:
    """Collect the parts of a source by name; if there are more than `most`, put neighbours together."""
    parts = list(parts)
    size = max(1, -(-len(parts) // most))
    found: Fingerprint = {}
    for start in range(0, len(parts), size):
        group = parts[start : start + size]
        (first, text), (last, _) = group[0], group[-1]
        if len(group) > 1:
            first, text = f"{first} to {last}", f"{len(group)} of them, {checksum(json.dumps(group).encode())}"
        name, number = first, 1
        while name in found:  # files of one name in two folders
            number += 1
            name = f"{first} ({number})"
        found[name] = text
    return found


def checksum(*blocks: bytes | npt.NDArray[Any]) -> str:
    """Compute the CRC-32C of blocks of bytes, or of arrays, one after the other."""
    crc = 0
    for block in blocks:
        data = block if isinstance(block, bytes) else np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        crc = google_crc32c.extend(crc, data)
    return f"crc32c {crc:08x}"


def lines_of(fingerprint: Fingerprint) -> list[str]:
    """Return a line for each part, with its name and text."""
    return [f"{name}: {value}" for name, value in _flat(fingerprint)]


def fingerprint_changes(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """Return a line for each part that has changed, is gone or is new, for at most ten of them."""
    before, after = dict(_flat(saved)), dict(_flat(now))
    # A checkpoint of an earlier version tells no options.
    told = [name for name in before if _is_options(name) and name in after]
    options = [f"{name}: {change}" for name in told for change in changes("", before[name], after[name])]
    before, after = ({n: v for n, v in parts.items() if not _is_options(n)} for parts in (before, after))
    lines = options + [
        f"{name} was {before.get(name, 'not there')}, and is {after.get(name, 'gone')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    if not lines:
        moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        lines = [f"the order of the parts: {new} stands where {old} stood" for old, new in moved[:1]]
    more = len(lines) - _MOST_CHANGES
    return [*lines[:_MOST_CHANGES], f"{more} more changes"] if more > 0 else lines


def _flat(fingerprint: Fingerprint, outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each part. Names begin with those of the outer sources; options are one part."""
    for name, value in fingerprint.items():
        if isinstance(value, dict) and not _is_options(name):
            yield from _flat(value, f"{outer}{name}: ")
        else:
            yield f"{outer}{name}", value


def _described(values: Tensor) -> str:
    whole = f"{values.dtype} of shape {tuple(values.shape)}"
    if values.layout == torch.sparse_coo:
        together = values.coalesce()
        return f"{whole}, sparse, indices {_described(together.indices())}, values {_described(together.values())}"
    if values.layout != torch.strided:
        return f"{whole}, {values.layout}"
    if values.nbytes > _MOST_CHECKED_BYTES:
        count = max(1, _MOST_CHECKED_BYTES * len(values) // values.nbytes)
        rows = torch.from_numpy(np.linspace(0, len(values) - 1, count).astype(np.int64))
        checked, what = values.index_select(0, rows), f"{count} rows "
    else:
        checked, what = values, ""
    return f"{whole}, {what}{checksum(bytes_of_tensor(checked))}"
