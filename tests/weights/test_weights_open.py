"""Weights opened by what is in a file."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from damaged_files import FIXTURES, RESNET, SQUEEZENET, TENSORS
from safetensors.torch import save_file

from lockstep.errors import CheckpointError, NotFoundError
from lockstep.records.tfrecord import write_records
from lockstep.weights.open import KNOWN, open_weights_file

TENSORFLOW = FIXTURES.parent / "tf_ckpt"
MADE = TENSORFLOW / "made"


def write_h5(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=np.ones(2))


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.ones(2))


def write_npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(2))


def write_old_torch(path: Path) -> None:
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda path: save_file(TENSORS, path), "safetensors"),
        (lambda path: torch.save(TENSORS, path), "torch file"),
        (write_old_torch, "torch file"),
        (write_npz, "NumPy archive"),
        (write_npy, "NumPy array"),
        (write_h5, "HDF5"),
        (lambda path: shutil.copy(TENSORFLOW / "sugyan_mnist/v1/simple.ckpt", path), "TensorFlow checkpoint (V1)"),
    ],
    ids=["safetensors", "torch", "old torch", "npz", "npy", "hdf5", "tensorflow"],
)
@pytest.mark.parametrize("name", ["weights", "weights.h5", "weights.npz", "weights.safetensors", "a.data-0"])
def test_files_are_known_by_what_is_in_them(
    tmp_path: Path, write: Callable[[Path], object], kind: str, name: str
) -> None:
    write(tmp_path / name)
    source = open_weights_file(str(tmp_path / name))
    assert source.kind == kind
    assert source.path == tmp_path / name
    for tensor, info in source.tensors.items():
        assert source.read(tensor).shape == info.shape


@pytest.mark.parametrize(
    "path",
    [
        "saver",
        "saver/model.ckpt-1",
        "saver/model.ckpt-1.index",
        "saver/model.ckpt-1.data-00000-of-00001",
        "v1_shards-00000-of-00002",
        "v1_shards-?????-of-00002",
        "saver_v1.ckpt",
    ],
)
def test_tensorflow_checkpoints_by_folder_prefix_and_file(path: str) -> None:
    source = open_weights_file(MADE / path)
    assert source.kind.startswith("TensorFlow checkpoint")
    for name in source.tensors:
        source.read(name)


def test_real_files() -> None:
    assert len(open_weights_file(RESNET).tensors) == 97
    assert len(open_weights_file(SQUEEZENET).tensors) == 50


def test_an_archive_of_no_arrays(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("wb") as file:
        np.savez(file)
    assert open_weights_file(tmp_path / "empty").tensors == {}


def unknown_things(folder: Path) -> dict[str, str]:
    """Paths that hold no weights, and what is found there."""
    (folder / "empty").touch()
    (folder / "text").write_text("some text")
    write_records(folder / "records", [b"payload"])
    with zipfile.ZipFile(folder / "keras", "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, b"")
    (folder / "folder").mkdir()
    (folder / "images").mkdir()
    for number in range(7):
        (folder / "images" / f"{number}.png").touch()
    return {
        "empty": "an empty file",
        "text": "a file of 9 bytes that begins with 73 6f 6d 65 20 74 65 78 74",
        "records": "a file of records (TFRecord)",
        "keras": "a zip archive with metadata.json, config.json, model.weights.h5",
        "folder": "an empty folder",
        "images": "a folder with 0.png, 1.png, 2.png, 3.png, 4.png and 2 more",
    }


def test_what_holds_no_weights_is_described(tmp_path: Path) -> None:
    for name, found in unknown_things(tmp_path).items():
        with pytest.raises(NotFoundError) as error:
            open_weights_file(tmp_path / name)
        assert error.value.what == f"{tmp_path / name} holds no weights that are known."
        assert error.value.given == found
        assert error.value.expected == KNOWN


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    for name, hint in {
        "weights.pth": f"did you mean {tmp_path / 'weights.pt'}?",
        "no/such/place": "check the path",
    }.items():
        with pytest.raises(NotFoundError, match="There are no weights called") as error:
            open_weights_file(tmp_path / name)
        assert error.value.hint == hint


def test_a_damaged_archive_is_no_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04" + bytes(30))
    with pytest.raises(CheckpointError, match="is a damaged zip archive") as error:
        open_weights_file(tmp_path / "cut.npz")
    assert not isinstance(error.value, NotFoundError)


def test_a_prefix_that_other_files_begin_with(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-1.meta").touch()
    with pytest.raises(CheckpointError, match=r"There is no TensorFlow checkpoint .*model.ckpt-1"):
        open_weights_file(tmp_path / "model.ckpt-1")


@pytest.mark.parametrize("content", [b"\x80\x04\x95", pickle.dumps({"a": 1})], ids=["cut short", "whole"])
def test_other_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.pkl").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights.pkl holds more than tensors") as error:
        open_weights_file(tmp_path / "weights.pkl")
    assert error.value.given == "a pickle that is none of torch.save, and names nothing"


def test_a_damaged_file_is_called_damaged_by_its_kind(tmp_path: Path) -> None:
    whole = SQUEEZENET.read_bytes()
    (tmp_path / "cut").write_bytes(whole[:5000])
    with pytest.raises(CheckpointError, match=r"cut is no file of safetensors, or is damaged or cut short"):
        open_weights_file(tmp_path / "cut")
    index = (MADE / "big_endian.index").read_bytes()
    (tmp_path / "model.index").write_bytes(index[:-3])
    with pytest.raises(CheckpointError, match=r"model.index"):
        open_weights_file(tmp_path / "model.index")


def test_a_name_that_no_trainer_gives_is_refused_before_patterns_are_tried_on_it(tmp_path: Path) -> None:
    save_file({"a" * 1000: torch.zeros(1)}, tmp_path / "long")
    assert len(open_weights_file(tmp_path / "long").tensors) == 1
    save_file({"layer": torch.zeros(1), "/" * 4_000_000: torch.zeros(1)}, tmp_path / "longer")
    with pytest.raises(CheckpointError) as refusal:
        open_weights_file(tmp_path / "longer")
    assert refusal.value.what == f"A tensor of {tmp_path / 'longer'} has a name that is too long."
    assert refusal.value.given == f"4,000,000 characters, which begin with {'/' * 40!r}"
    assert refusal.value.expected == "at most 1,000 characters"
