"""Describe values as small JSON, compare two descriptions, and say where they differ.

A run saves the descriptions of its parts, and a later start names what it was given differently.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_CLASS = "class"
"""The key of a value's class, beside its fields. The keys of a mapping are quoted, so none equals it."""
_MOST_ITEMS = 100
"""Longer lists are described by their length and hash."""


def described(value: Any) -> Any:
    """Describe a value as JSON: plain values as they are, dataclasses by class and fields, functions by name.

    Fields that do not count when two values of a class are compared are left out.

    Objects of Lockstep are described by all their members, others by their class alone; so are cycles.
    """
    return _described(value, ())


def _described(value: Any, outer: tuple[int, ...]) -> Any:
    """Describe a value within others, whose ids are `outer`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return str(value)
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if id(value) in outer:
        return {_CLASS: type(value).__qualname__}
    outer = (*outer, id(value))
    if isinstance(value, Mapping):
        return {_key(key, outer): _described(inner, outer) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_described(item, outer) for item in value]
        return items if len(items) <= _MOST_ITEMS else f"{len(items)} items, sha256 {_hash(json.dumps(items).encode())}"
    if hasattr(value, "__array__"):
        return _described_array(value, outer)
    return {_CLASS: type(value).__qualname__, **{n: _described(inner, outer) for n, inner in _members(value).items()}}


def _key(key: Any, outer: tuple[int, ...]) -> str:
    return repr(key) if isinstance(key, str) else str(_described(key, outer))


def _members(value: Any) -> dict[str, Any]:
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in fields(value) if field.compare}
    if type(value).__module__.startswith("lockstep."):
        computed = vars(type(value))  # cached properties
        return {name: member for name, member in vars(value).items() if name not in computed}
    return {}


def _described_array(value: Any, outer: tuple[int, ...]) -> Any:
    """The items of a small array or tensor, the hash of a large one, the shape of one that cannot be read."""
    try:
        array = _on_host(value)
        if math.prod(array.shape) <= _MOST_ITEMS or getattr(array.dtype, "hasobject", False):
            return _described(array.tolist(), outer)
        shape = dtype_and_shape(array)
        data = bytes_of_tensor(array) if isinstance(array, torch.Tensor) else np.ascontiguousarray(array)
        return f"{shape}, sha256 {_hash(data.tobytes())}"
    except Exception:  # a sparse or meta tensor, or an __array__ of the user's own
        return f"{type(value).__qualname__}, {dtype_and_shape(value)}"


def dtype_and_shape(array: Any) -> str:
    """An array or a tensor in words: `float32 of shape (3, 4)`."""
    try:
        return f"{str(array.dtype).removeprefix('torch.')} of shape {tuple(array.shape)}"
    except (AttributeError, RuntimeError):  # a nested tensor, or a parameter of a lazy module
        return "of unknown shape"


def bytes_of_tensor(values: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of all values in order, on the host; numpy has no bfloat16 to hold the values themselves."""
    data: npt.NDArray[np.uint8] = _on_host(values).contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().resolve_conj().resolve_neg()
    return np.asarray(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Change(NamedTuple):
    """A place in which two descriptions differ."""

    path: str
    saved: Any
    given: Any

    def is_allowed(self, paths: Sequence[str]) -> bool:
        """Whether one of the paths is this place, or contains it."""
        return any(self.path == path or self.path.startswith((f"{path}.", f"{path}[")) for path in paths)

    def __str__(self) -> str:
        return f"{self.path}: saved {shown_description(self.saved)}, given {shown_description(self.given)}"


def changes(path: str, saved: Any, given: Any) -> Iterator[Change]:
    """Yield the places in which two descriptions differ: `optimizer.lr`, `optimizer['^head'].lr`, `augment.0.pixels`.

    A field that only one of two values of a class has is of another version of that class, and does not count.
    """
    if saved == given:
        return
    if _class_of(saved) != _class_of(given) or type(saved) is not type(given):
        yield Change(path, saved, given)
    elif _class_of(saved):
        for name in filter(saved.keys().__contains__, given):
            yield from changes(f"{path}.{name}" if path else name, saved[name], given[name])
    elif isinstance(saved, dict) and saved.keys() == given.keys():
        for name in saved:
            yield from changes(f"{path}[{name}]", saved[name], given[name])
    elif isinstance(saved, list) and len(saved) == len(given):
        for index, (before, now) in enumerate(zip(saved, given, strict=True)):
            yield from changes(f"{path}.{index}", before, now)
    else:
        yield Change(path, saved, given)


def paths(path: str, description: Any) -> Iterator[str]:
    """Yield the paths of a description and of everything in it, as in `changes`."""
    yield path
    if isinstance(description, list):
        for index, inner in enumerate(description):
            yield from paths(f"{path}.{index}", inner)
    elif isinstance(description, dict):
        for name, inner in description.items():
            if name != _CLASS:
                yield from paths(f"{path}.{name}" if _CLASS in description else f"{path}[{name}]", inner)


def _class_of(description: Any) -> Any:
    return description.get(_CLASS) if isinstance(description, dict) else None


def shown_description(description: Any) -> str:
    """A description as Python would show the value: `SGD(lr=0.1, momentum=0.9)`."""
    if isinstance(description, list):
        return f"[{', '.join(map(shown_description, description))}]"
    if not isinstance(description, dict):
        return repr(description)
    if name_of_class := _class_of(description):
        members = [f"{name}={shown_description(inner)}" for name, inner in description.items() if name != _CLASS]
        return f"{name_of_class}({', '.join(members)})"
    return f"{{{', '.join(f'{name}: {shown_description(inner)}' for name, inner in description.items())}}}"
