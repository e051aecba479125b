"""Weights of Keras in HDF5 as a source of weights."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged_files import FIXTURES, SQUEEZENET, count_refused, truncated, with_a_flipped_bit

from lockstep.errors import CheckpointError
from lockstep.weights.keras_h5 import KerasH5
from lockstep.weights.safetensors_file import SafetensorsFile
from lockstep.weights.source import TensorInfo

KERNEL, BIAS = np.arange(54, dtype=np.float32).reshape(3, 3, 3, 2), np.array([1, 2], np.float32)
LAYERS = {"conv1": {"conv1/kernel:0": KERNEL, "conv1/bias:0": BIAS}, "relu": {}}


def write_layers(group: Any, layers: dict[str, Any], *, num_parts: int = 0) -> None:
    """As Keras does."""
    names = [name.encode() for name in layers]
    if num_parts:
        for number, part in enumerate(np.array_split(names, num_parts)):
            group.attrs[f"layer_names{number}"] = part
    else:
        group.attrs["layer_names"] = names
    for name, weights in layers.items():
        layer = group.create_group(name)
        layer.attrs["weight_names"] = [weight.encode() for weight in weights]
        for weight, value in weights.items():
            layer.create_dataset(weight, data=value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of weights as Keras 2 writes it."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "weights", "w") as file:
        write_layers(file, LAYERS)
    return tmp_path / "weights"


def test_weights_come_by_layer_in_keras_layout(path: Path) -> None:
    source = KerasH5(path)
    assert source.kind == "Keras weights (HDF5)"
    assert source.tensors == {
        "conv1/kernel": TensorInfo((3, 3, 3, 2), "float32", 216),
        "conv1/bias": TensorInfo((2,), "float32", 8),
    }
    assert torch.equal(source.read("conv1/kernel"), torch.from_numpy(KERNEL))
    assert torch.equal(source.read("conv1/bias"), torch.from_numpy(BIAS))


def test_a_whole_model_is_read_without_its_optimizer(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "model", "w") as file:
        write_layers(file.create_group("model_weights"), LAYERS)
        file.create_dataset("optimizer_weights/Adam/m:0", data=BIAS)
    source = KerasH5(tmp_path / "model")
    assert list(source.tensors) == ["conv1/bias", "conv1/kernel"]
    assert torch.equal(source.read("conv1/bias"), torch.from_numpy(BIAS))


def test_names_of_keras_1_and_layers_with_slashes(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "old", "w") as file:
        write_layers(file, {"conv_1": {"conv_1_W": KERNEL}, "fire2/squeeze": {"fire2/squeeze_b": BIAS}})
    assert list(KerasH5(tmp_path / "old").tensors) == ["conv_1/conv_1_W", "fire2/squeeze/fire2/squeeze_b"]


def test_a_long_list_of_layers_comes_in_parts(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    layers = {f"layer{number}": {f"layer{number}/bias:0": BIAS + number} for number in range(5)}
    with h5py.File(tmp_path / "long", "w") as file:
        write_layers(file, layers, num_parts=2)
    source = KerasH5(tmp_path / "long")
    assert list(source.tensors) == [f"layer{number}/bias" for number in range(5)]
    assert source.read("layer4/bias").tolist() == [5, 6]


def test_another_file_of_hdf5_is_listed_by_path(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other", "w") as file:
        file.create_dataset("layers/conv/vars/0", data=KERNEL.astype(">f8"))
        file.create_dataset("words", data=["a", "b"])
    source = KerasH5(tmp_path / "other")
    assert source.kind == "HDF5"
    assert source.tensors["layers/conv/vars/0"] == TensorInfo((3, 3, 3, 2), "float64", 432)
    assert torch.equal(source.read("layers/conv/vars/0"), torch.from_numpy(KERNEL).double())
    with pytest.raises(CheckpointError, match=r"'words' of .*other holds what torch has no kind for"):
        source.read("words")


def test_compressed_weights(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "packed", "w") as file:
        file.create_dataset("a", data=np.zeros(100_000, np.float32), compression="gzip", fletcher32=True)
    assert torch.equal(KerasH5(tmp_path / "packed").read("a"), torch.zeros(100_000))


def test_what_is_in_other_files_is_not_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "secret").write_bytes(bytes(16))
    with h5py.File(tmp_path / "target", "w") as file:
        file.create_dataset("a", data=BIAS)
    with h5py.File(tmp_path / "weights", "w") as file:
        file.create_dataset("outside", (2,), np.float32, external=[(str(tmp_path / "secret"), 0, 8)])
        file["link"] = h5py.ExternalLink(str(tmp_path / "target"), "a")
        layout = h5py.VirtualLayout((2,), np.float32)
        layout[:] = h5py.VirtualSource(str(tmp_path / "target"), "a", (2,))
        file.create_virtual_dataset("virtual", layout)
    source = KerasH5(tmp_path / "weights")
    assert source.tensors.keys() == {"outside", "virtual"}
    for name in source.tensors:
        with pytest.raises(CheckpointError, match=rf"'{name}' of .*weights is damaged") as error:
            source.read(name)
        assert error.value.given == "values in other files"


def test_a_size_that_lies_takes_no_memory(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "lies", "w") as file:
        file.create_dataset("a", (1 << 40,), np.float32, chunks=(1024,))
    with pytest.raises(CheckpointError, match=r"'a' of .*lies is damaged") as error:
        KerasH5(tmp_path / "lies").read("a")
    assert error.value.given == "0 bytes in the file"


def test_two_weights_of_one_name_are_refused(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "a") as file:
        file["conv1"].create_dataset("kernel:0", data=KERNEL)
    with pytest.raises(CheckpointError, match=r"is damaged or cut short") as error:
        KerasH5(path)
    assert error.value.given == "there are two weights conv1/kernel"


def test_a_model_within_a_model(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "outer", "w") as file:
        write_layers(file, {"net": {"conv/kernel:0": KERNEL, "net/fc/bias:0": BIAS}})
        file["net/conv"].attrs["weight_names"] = [b"kernel:0"]
    assert list(KerasH5(tmp_path / "outer").tensors) == ["net/conv/kernel", "net/fc/bias"]


def test_a_name_that_is_not_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights has no tensor 'conv2'"):
        KerasH5(path).read("conv2")
    with pytest.raises(CheckpointError, match=r"none cannot be read"):
        KerasH5(tmp_path / "none")


def test_without_h5py_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        if name == "h5py":
            raise ModuleNotFoundError(name=name)
        return whole(name, *others, **more)

    monkeypatch.delitem(sys.modules, "h5py", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"weights is a file of HDF5, which is read with h5py") as error:
        KerasH5(tmp_path / "weights")
    assert error.value.hint == "pip install 'lockstep-train[h5]'"


def test_truncated_files_are_refused(path: Path) -> None:
    assert count_refused(path, 40, truncated, has_checksums=True) >= 39, "but for bytes after the last that counts"


def test_flipped_bits_do_no_harm(path: Path) -> None:
    assert count_refused(path, 60, with_a_flipped_bit, has_checksums=False)


def test_a_file_that_keras_wrote() -> None:
    pytest.importorskip("h5py")
    source, converted = KerasH5(FIXTURES / "squeezenet-first-layers.h5"), SafetensorsFile(SQUEEZENET)
    expected = {
        "conv1/uniform1": "features.0.weight",
        "conv1/conv1_b": "features.0.bias",
        "fire2/squeeze1x1/uniform2": "features.3.squeeze.weight",
        "fire2/squeeze1x1/fire2/squeeze1x1_b": "features.3.squeeze.bias",
        "fire2/expand1x1/uniform3": "features.3.expand1x1.weight",
        "fire2/expand1x1/fire2/expand1x1_b": "features.3.expand1x1.bias",
        "fire2/expand3x3/uniform4": "features.3.expand3x3.weight",
        "fire2/expand3x3/fire2/expand3x3_b": "features.3.expand3x3.bias",
    }
    assert source.tensors.keys() >= expected.keys()
    assert len(source.tensors) == 14
    for name, torchs in expected.items():
        tensor = source.read(name)
        moved = tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor
        assert torch.equal(moved, converted.read(torchs))
