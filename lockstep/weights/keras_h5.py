"""Weights of Keras 1 and 2 in HDF5: a group for each layer, with its weights in order. Needs h5py.

As in Keras' `saving/hdf5_format.py`: "layer_names" of a group lists the layers, "weight_names" of a layer its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.weights.numpy_kinds import tensor_of, torch_name
from lockstep.weights.source import TensorInfo
from lockstep.weights.tf_errors import damaged, damaged_tensor, no_tensor, not_numbers, unreadable

if TYPE_CHECKING:
    import h5py

_MODEL = "model_weights"
_LAYERS, _WEIGHTS = "layer_names", "weight_names"
_OUTPUT = ":0"  # what TensorFlow adds to a variable's name
# Deflate makes at most 1032 bytes of one (zlib's technical details).
_MOST_EXPANSION = 1032


class KerasH5:
    """Weights by "layer/weight", in the order of the layers; of another file of HDF5 all data sets by their paths.

    A weight has the name that Keras gave it, without the ":0" of TensorFlow's, and with the layer's in front where it
    does not begin with it. Layouts are Keras' (height, width, in, out). Weights of an optimizer are left out. What a
    file says to be in other files is not read. There are no checksums, but where the writer asked for them.

    Args:
        path: of the file.

    Raises:
        CheckpointError: h5py is not installed; the file cannot be read, or is damaged.
    """

    kind = "HDF5"

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            data_sets = _data_sets(file)
            model = file[_MODEL] if _MODEL in data_sets.groups else file
            if has_layers := bool(_listed(model, _LAYERS)):
                self.kind = "Keras weights (HDF5)"
            self._places = _named_by_keras(model, data_sets) if has_layers else {name: name for name in data_sets.sets}
            if missing := [place for place in self._places.values() if place not in data_sets.sets]:
                raise damaged(
                    path,
                    "is damaged",
                    given=f"no weights {missing[0]}",
                    expected="all that its layers are said to have",
                )
            self.tensors: Mapping[str, TensorInfo] = {
                name: _info(data_sets.sets[place]) for name, place in self._places.items()
            }

    def read(self, name: str) -> Tensor:
        """A tensor, whole and contiguous, in Keras' layout.

        Raises:
            CheckpointError: there is no such tensor, it is damaged or not in this file, or torch has no such kind.
        """
        if name not in self._places:
            raise no_tensor(name, self.path, len(self._places))
        with self._opened() as file:
            data_set = file[self._places[name]]
            if torch_name(data_set.dtype) is None:
                raise not_numbers(name, self.path, str(data_set.dtype))
            self._check_there(name, data_set)
            return tensor_of(data_set[()])

    def _check_there(self, name: str, data_set: h5py.Dataset) -> None:
        """Refuse what is elsewhere, and sizes that lie."""
        if data_set.is_virtual or data_set.external:
            raise damaged_tensor(name, self.path, given="values in other files", expected="its values in this file")
        stored = data_set.id.get_storage_size()
        most = stored if data_set.chunks is None else stored * _MOST_EXPANSION
        if data_set.nbytes > min(most, self.path.stat().st_size * _MOST_EXPANSION):
            raise damaged_tensor(
                name,
                self.path,
                given=f"{stored} bytes in the file",
                expected=f"{data_set.nbytes} bytes for {data_set.dtype} of the shape {data_set.shape}",
            )

    @contextmanager
    def _opened(self) -> Iterator[h5py.File]:
        try:
            import h5py
        except ModuleNotFoundError as error:
            raise _no_h5py(self.path) from error
        try:
            with self.path.open("rb") as content, h5py.File(content, "r") as file:
                yield file
        except CheckpointError:
            raise
        except OSError as error:
            if error.errno:
                raise unreadable(self.path, error) from error
            raise self._damaged(error) from error
        except Exception as error:  # the library has no one kind of error for what is damaged
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> CheckpointError:
        return damaged(
            self.path, "is no file of HDF5, or is damaged or cut short", given=str(error), expected="a whole file"
        )


class _DataSets:
    """The groups and data sets of a file by their paths. Links to other files are not followed."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.sets: dict[str, Any] = {}

    def add(self, path: str, found: Any) -> None:
        """One of them."""
        if hasattr(found, "dtype"):
            self.sets[path] = found
        else:
            self.groups.add(path)


def _data_sets(file: h5py.File) -> _DataSets:
    found = _DataSets()
    file.visititems(found.add)
    return found


def _named_by_keras(model: h5py.Group, data_sets: _DataSets) -> dict[str, str]:
    """The path of each weight by its name."""
    above = model.name.strip("/")
    places: dict[str, str] = {}
    for layer in _listed(model, _LAYERS):
        group = f"{above}/{layer}".lstrip("/")
        if group not in data_sets.groups:
            raise ValueError(f"there is no group {group}")
        for weight in _listed(model[layer], _WEIGHTS):
            name = weight.removesuffix(_OUTPUT)
            whole = name if name.startswith(f"{layer}/") else f"{layer}/{name}"
            if whole in places:
                raise ValueError(f"there are two weights {whole}")
            places[whole] = f"{group}/{weight}"
    return places


def _listed(group: h5py.Group, attribute: str) -> list[str]:
    """A list of names; a long one is in parts that are numbered from 0."""
    if attribute in group.attrs:
        parts = [group.attrs[attribute]]
    else:
        parts = []
        while (part := f"{attribute}{len(parts)}") in group.attrs:
            parts.append(group.attrs[part])
    return [name.decode() if isinstance(name, bytes) else str(name) for part in parts for name in part]


def _info(data_set: h5py.Dataset) -> TensorInfo:
    num_bytes = 0 if data_set.shape is None else data_set.nbytes
    return TensorInfo(tuple(data_set.shape or ()), torch_name(data_set.dtype) or str(data_set.dtype), num_bytes)


def _no_h5py(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a file of HDF5, which is read with h5py.",
        given="no package h5py",
        expected="h5py, which Lockstep needs for nothing else",
        mend="pip install 'lockstep-train[h5]'",
    )
