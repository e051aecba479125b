"""Files of safetensors as a source of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from damaged_files import SQUEEZENET, TENSORS, contents, count_refused, truncated, with_a_flipped_bit
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.weights.safetensors_file import SafetensorsFile
from lockstep.weights.source import TensorInfo


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "weights", metadata={"epoch": "3"})
    return tmp_path / "weights"


def test_tensors_come_as_they_were_saved(path: Path) -> None:
    source = SafetensorsFile(path)
    assert source.path == path
    assert source.metadata == {"epoch": "3"}
    assert source.tensors["conv.weight"] == TensorInfo((2, 3, 2, 2), "float32", 96)
    assert source.tensors["steps"] == TensorInfo((), "int64", 8)
    assert source.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name), tensor)
        assert source.read(name).dtype == tensor.dtype


def test_a_file_of_another_program() -> None:
    source = SafetensorsFile(SQUEEZENET)
    expected = load_file(SQUEEZENET)
    assert len(source.tensors) == 50
    assert next(iter(source.tensors)) == "features.0.weight", "they come in the order of the file"
    assert all(torch.equal(source.read(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64], ids=str)
def test_kinds(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(4).to(dtype)
    save_file({"a": tensor}, tmp_path / "kinds")
    source = SafetensorsFile(tmp_path / "kinds")
    assert source.tensors["a"].dtype == str(dtype).removeprefix("torch.")
    assert source.read("a").dtype == dtype
    assert torch.equal(source.read("a").view(torch.uint8), tensor.view(torch.uint8))


def test_what_is_read_is_not_the_files(path: Path) -> None:
    source = SafetensorsFile(path)
    source.read("conv.bias").fill_(9)
    assert torch.equal(source.read("conv.bias"), TENSORS["conv.bias"])
    assert torch.equal(SafetensorsFile(path).read("conv.bias"), TENSORS["conv.bias"])


def test_no_such_tensor(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights has no tensor 'conv'") as error:
        SafetensorsFile(path).read("conv")
    assert error.value.expected == "the name of one of its 4 tensors"


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none cannot be read"):
        SafetensorsFile(tmp_path / "none")


def test_a_size_that_lies_takes_no_memory(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}
    text = json.dumps(header).encode()
    (tmp_path / "lies").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=r"lies is no file of safetensors, or is damaged or cut short"):
        SafetensorsFile(tmp_path / "lies")


def test_a_shape_that_lies_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[2,3,2,2]", b"[2,3,2,9]"))
    with pytest.raises(CheckpointError, match=r"is damaged or cut short"):
        SafetensorsFile(path)


def test_truncated_files_are_refused(path: Path) -> None:
    assert count_refused(path, 60, truncated, has_checksums=True) == 60


def test_flipped_bits_do_no_harm(path: Path) -> None:
    assert count_refused(path, 60, with_a_flipped_bit, has_checksums=False)
    assert contents(SafetensorsFile(path)).keys() == TENSORS.keys()
