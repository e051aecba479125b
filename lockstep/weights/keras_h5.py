"""Weights of Keras 1 and 2 in HDF5: a group for each layer, which holds its weights by name. Needs h5py.

As in Keras' `saving/hdf5_format.py`. A layer's group is known by its attribute "weight_names". What that says is not
read: it lies in a heap, in which the library of HDF5 can be lost for ever where a file is damaged; and the weights are
called the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.weights.numpy_files import tensor_of, torch_name
from lockstep.weights.source import TensorInfo, damaged_file, damaged_tensor, no_tensor, not_numbers, unreadable_file

if TYPE_CHECKING:
    import h5py

_MODEL = "model_weights/"
# A list that is too long for one attribute is in parts, which are numbered.
_OF_LAYERS = ("weight_names", "weight_names0")
_OUTPUT = ":0"  # what TensorFlow adds to a variable's name
# Deflate makes at most 1032 bytes of one (zlib's technical details).
_MOST_EXPANSION = 1032


class KerasH5:
    """Weights by "layer/weight", sorted; of another file of HDF5 all data sets by their paths.

    A weight has the name that Keras gave it, without the ":0" of TensorFlow's, and with the layer's in front where it
    does not begin with it. Layouts are Keras' (height, width, in, out). Weights of an optimizer are left out. What a
    file says to be in other files is not read. There are no checksums, but where the writer asked for them.

    Args:
        path: of the file.
    """

    kind = "HDF5"

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            contents = _Contents()
            file.visititems(contents.add)
            if contents.layers:
                self.kind = "Keras weights (HDF5)"
            self._places = contents.places()
            self.tensors: Mapping[str, TensorInfo] = {
                name: _info(contents.data_sets[place]) for name, place in self._places.items()
            }

    def read(self, name: str) -> Tensor:
        """A tensor, whole and contiguous, in Keras' layout."""
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
                raise unreadable_file(self.path, error) from error
            raise self._damaged(error) from error
        except Exception as error:  # the library has no one kind of error for what is damaged
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> CheckpointError:
        return damaged_file(
            self.path, "is no file of HDF5, or is damaged or cut short", given=str(error), expected="a whole file"
        )


class _Contents:
    """The layers and data sets of a file by their paths. Links to other files are not followed."""

    def __init__(self) -> None:
        self.layers: set[str] = set()
        self.data_sets: dict[str, Any] = {}

    def add(self, path: str, found: Any) -> None:
        """One of them."""
        if hasattr(found, "dtype"):
            self.data_sets[path] = found
        elif any(attribute in found.attrs for attribute in _OF_LAYERS):
            self.layers.add(path)

    def places(self) -> dict[str, str]:
        """The path of each tensor by its name."""
        if not self.layers:
            return {path: path for path in self.data_sets}
        places: dict[str, str] = {}
        for path in self.data_sets:
            if layer := self._layer(path):
                name = _name(layer.removeprefix(_MODEL), path[len(layer) + 1 :])
                if places.setdefault(name, path) != path:
                    raise ValueError(f"there are two weights {name}")
        return places

    def _layer(self, path: str) -> str | None:
        """The layer that a data set belongs to, the outermost where a model is a layer of another."""
        parts = path.split("/")
        groups = ("/".join(parts[:end]) for end in range(1, len(parts)))
        return next((group for group in groups if group in self.layers), None)


def _name(layer: str, weight: str) -> str:
    weight = weight.removesuffix(_OUTPUT)
    return weight if weight.startswith(f"{layer}/") else f"{layer}/{weight}"


def _info(data_set: h5py.Dataset) -> TensorInfo:
    num_bytes = 0 if data_set.shape is None else data_set.nbytes
    return TensorInfo(tuple(data_set.shape or ()), torch_name(data_set.dtype) or str(data_set.dtype), num_bytes)


def _no_h5py(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a file of HDF5, which is read with h5py.",
        given="no package h5py",
        expected="h5py, which Lockstep needs for nothing else",
        hint="pip install 'lockstep-train[h5]'",
    )
