"""NumPy's files as a source of weights."""

from __future__ import annotations

import contextlib
import io
import itertools
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged_files import TENSORS, contents, count_refused, truncated, with_a_flipped_bit

from lockstep.errors import CheckpointError
from lockstep.weights.numpy_files import NumpyArchive, NumpyFile
from lockstep.weights.source import TensorInfo

ARRAYS = {name: tensor.numpy() for name, tensor in TENSORS.items()}
SAVERS = pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["plain", "compressed"])


def archive_of(folder: Path, save: Any = np.savez, **arrays: Any) -> Path:
    with (folder / "weights").open("wb") as file:
        save(file, **arrays)
    return folder / "weights"


@SAVERS
def test_arrays_come_as_they_were_saved(tmp_path: Path, save: Any) -> None:
    source = NumpyArchive(archive_of(tmp_path, save, **ARRAYS))
    assert list(source.tensors) == list(TENSORS)
    assert source.tensors["conv.weight"] == TensorInfo((2, 3, 2, 2), "float32", 96)
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name), tensor)
        assert source.read(name).dtype == tensor.dtype


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">i8", "|u1", "<u2", "|b1", "<c8", ">c16"])
def test_kinds_and_byte_orders(tmp_path: Path, dtype: str) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    source = NumpyArchive(archive_of(tmp_path, c=array, f=np.asfortranarray(array)))
    for name in ("c", "f"):
        found = source.read(name)
        assert found.is_contiguous()
        assert source.tensors[name].dtype == str(found.dtype).removeprefix("torch.")
        assert np.array_equal(found.numpy(), array)


def test_one_array(tmp_path: Path) -> None:
    path = tmp_path / "kernel.npy"
    np.save(path, ARRAYS["conv.weight"])
    source = NumpyFile(path)
    assert source.tensors == {"kernel": TensorInfo((2, 3, 2, 2), "float32", 96)}
    assert torch.equal(source.read("kernel"), TENSORS["conv.weight"])
    with pytest.raises(CheckpointError, match=r"kernel.npy has no tensor 'weight'"):
        source.read("weight")


def test_python_objects_are_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path, a=np.array([{"a": 1}], dtype=object))
    with pytest.raises(CheckpointError, match=r"'a' of .*weights holds Python objects, which may run code"):
        NumpyArchive(path)
    np.save(tmp_path / "dict.npy", np.array({"a": 1}, dtype=object))
    with pytest.raises(CheckpointError, match=r"'dict' of .*dict.npy holds Python objects") as error:
        NumpyFile(tmp_path / "dict.npy")
    assert "np.savez" in error.value.hint


def test_what_is_no_number_is_listed_and_not_read(tmp_path: Path) -> None:
    source = NumpyArchive(archive_of(tmp_path, words=np.array(["a", "bc"]), a=np.ones(2)))
    assert source.tensors["words"] == TensorInfo((2,), "NumPy's <U2", 16)
    with pytest.raises(CheckpointError, match=r"'words' of .*weights holds what torch has no kind for"):
        source.read("words")
    assert torch.equal(source.read("a"), torch.ones(2, dtype=torch.float64))


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights has no tensor 'b'"):
        NumpyArchive(archive_of(tmp_path, a=np.ones(2))).read("b")
    with pytest.raises(CheckpointError, match=r"none cannot be read"):
        NumpyArchive(tmp_path / "none")


def test_a_shape_that_lies_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "lies.npy"
    np.save(path, np.ones(2))
    path.write_bytes(path.read_bytes().replace(b"(2,), }" + b" " * 12, b"(1000000000000,), }"))
    with pytest.raises(CheckpointError, match=r"'lies' of .*lies.npy is damaged") as error:
        NumpyFile(path)
    assert error.value.given == "16 bytes after the header"
    assert error.value.expected == "8000000000000 for float64 of the shape (1000000000000,)"


def test_a_size_that_expands_beyond_belief_is_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path, np.savez_compressed, a=np.ones(2))
    with zipfile.ZipFile(path) as archive:
        (entry,) = archive.infolist()
    whole = path.read_bytes()
    sizes = struct.pack("<II", entry.compress_size, entry.file_size)
    assert sizes in whole
    path.write_bytes(whole.replace(sizes, struct.pack("<II", entry.compress_size, 1 << 31)))
    with pytest.raises(CheckpointError, match=r"'a' of .*weights is damaged") as error:
        NumpyArchive(path)
    assert f"{1 << 31} bytes in {entry.compress_size}" in error.value.given


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.ones(2))
    with zipfile.ZipFile(tmp_path / "weights", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", content.getvalue())
    with pytest.raises(CheckpointError, match=r"'a' of .*weights is damaged") as error:
        NumpyArchive(tmp_path / "weights")
    assert error.value.given == "compression 12"


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.npy"
    np.save(path, np.ones(2))
    path.write_bytes(path.read_bytes().replace(b"NUMPY\x01", b"NUMPY\x07"))
    with pytest.raises(CheckpointError, match=r"'new' of .*new.npy is damaged") as error:
        NumpyFile(path)
    assert error.value.given == "version (7, 0) of the format"


@SAVERS
def test_truncated_archives_are_refused(tmp_path: Path, save: Any) -> None:
    path = archive_of(tmp_path, save, **ARRAYS)
    assert count_refused(path, 60, truncated, has_checksums=True) == 60


@SAVERS
@pytest.mark.parametrize("num_bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_the_listing_hides_an_array(tmp_path: Path, save: Any, num_bits: int) -> None:
    """One bit of each byte, of every byte another one than of the byte before; or all of them."""
    path = archive_of(tmp_path, save, **ARRAYS)
    whole, exact = path.read_bytes(), contents(NumpyArchive(path))
    listing = whole.index(b"PK\x01\x02")
    for place, number in itertools.product(range(listing, len(whole)), range(num_bits)):
        flipped = whole[place] ^ 1 << (place + number) % 8
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with contextlib.suppress(CheckpointError):
            assert contents(NumpyArchive(path)) == exact


def test_an_array_that_is_not_listed_is_told(tmp_path: Path) -> None:
    path = archive_of(tmp_path, a=np.ones(2), b=np.zeros(2))
    whole = path.read_bytes()
    first = whole.index(b"PK\x01\x02")
    length_of_comment = first + 32
    second_entry = struct.pack("<H", 46 + len("b.npy"))
    path.write_bytes(whole[:length_of_comment] + second_entry + whole[length_of_comment + 2 :])
    with pytest.raises(CheckpointError, match=r"weights is no file of NumPy's, or is damaged or cut short") as error:
        NumpyArchive(path)
    assert error.value.given == "its end says that it has 2 files, and 1 are found"


@SAVERS
def test_flipped_bits_give_the_same_tensors_or_an_error(tmp_path: Path, save: Any) -> None:
    path = archive_of(tmp_path, save, **ARRAYS)
    assert count_refused(path, 200, with_a_flipped_bit, has_checksums=True)


@pytest.mark.parametrize("damage", [truncated, with_a_flipped_bit])
def test_a_damaged_array_does_no_harm(tmp_path: Path, damage: Any) -> None:
    np.save(tmp_path / "a.npy", ARRAYS["conv.weight"])
    assert count_refused(tmp_path / "a.npy", 60, damage, has_checksums=False)
