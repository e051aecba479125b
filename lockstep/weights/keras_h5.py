"""Weights of Keras 1 and 2 in HDF5: a group for each layer, which holds its weights by name. Needs h5py.

As in Keras' `saving/hdf5_format.py`. A layer's group is known by its attribute "weight_names", whose value is not read:
the weights have the same names, and it lies in a heap, in which the HDF5 library can loop for ever in a damaged file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError
from lockstep.weights.source import (
    MOST_EXPANSION,
    TensorInfo,
    damaged_file,
    damaged_tensor,
    entry_of,
    not_numbers,
    readable,
    tensor_of,
    torch_name,
)

if TYPE_CHECKING:
    import h5py
    from torch import Tensor

_MODEL = "model_weights/"
# A list that is too long for one attribute is in numbered parts.
_OF_LAYERS = ("weight_names", "weight_names0")
_OUTPUT = ":0"  # what TensorFlow adds to a variable's name


class KerasH5:
    """Weights by "layer/weight", sorted; in another HDF5 file, all data sets by their paths.

    A weight has the name that Keras gave it, without TensorFlow's ":0" and with the layer's name in front. Layouts are
    Keras' (height, width, in, out). Weights of an optimizer are left out, and links to other files are not followed.
    There are no checksums unless the writer asked for them.
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
        """Read a tensor, whole and contiguous, in Keras' layout."""
        place = entry_of(name, self._places, self.path)
        with self._opened() as file:
            data_set = file[place]
            if torch_name(data_set.dtype) is None:
                raise not_numbers(name, self.path, str(data_set.dtype))
            self._check_there(name, data_set)
            return tensor_of(data_set[()])

    def _check_there(self, name: str, data_set: h5py.Dataset) -> None:
        """Refuse values in other files, and sizes that cannot be."""
        if data_set.is_virtual or data_set.external:
            raise damaged_tensor(name, self.path, given="values in other files", expected="its values in this file")
        stored = data_set.id.get_storage_size()
        most = stored if data_set.chunks is None else stored * MOST_EXPANSION
        if data_set.nbytes > min(most, self.path.stat().st_size * MOST_EXPANSION):
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
        except Exception as error:  # it is missing, or made for another NumPy: that fails in many ways
            raise CheckpointError(
                f"{self.path} is a file of HDF5, which is read with h5py.",
                given=f"{type(error).__name__}: {error}",
                expected="h5py, which Lockstep needs for nothing else",
                hint="pip install 'lockstep-train[h5]'",
            ) from error
        with readable(self.path):
            try:
                with self.path.open("rb") as content, h5py.File(content, "r") as file:
                    yield file
            except CheckpointError:
                raise
            except Exception as error:  # the library has no one kind of error for what is damaged
                if isinstance(error, OSError) and error.errno:
                    raise
                what = "is no file of HDF5, or is damaged or cut short"
                raise damaged_file(self.path, what, given=str(error), expected="a whole file") from error


class _Contents:
    """The layers and data sets of a file by their paths."""

    def __init__(self) -> None:
        self.layers: set[str] = set()
        self.data_sets: dict[str, Any] = {}

    def add(self, path: str, found: Any) -> None:
        """Take in a group or a data set; `visititems` calls this."""
        if hasattr(found, "dtype"):
            self.data_sets[path] = found
        elif any(attribute in found.attrs for attribute in _OF_LAYERS):
            self.layers.add(path)

    def places(self) -> dict[str, str]:
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
        """The layer of a data set; the outermost one where a model is a layer of another."""
        parts = path.split("/")
        groups = ("/".join(parts[:end]) for end in range(1, len(parts)))
        return next((group for group in groups if group in self.layers), None)


def _name(layer: str, weight: str) -> str:
    weight = weight.removesuffix(_OUTPUT)
    return weight if weight.startswith(f"{layer}/") else f"{layer}/{weight}"


def _info(data_set: h5py.Dataset) -> TensorInfo:
    num_bytes = 0 if data_set.shape is None else data_set.nbytes
    return TensorInfo(tuple(data_set.shape or ()), torch_name(data_set.dtype) or str(data_set.dtype), num_bytes)
