from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from tf_files import entry, write_bundle

from lockstep.errors import CheckpointError, NotFoundError
from lockstep.readers.mnist import SPLITS, load_idx
from lockstep.storage.remote_path import RemotePath
from lockstep.weights.open import latest_checkpoint, open_tensorflow, open_weights_file
from lockstep.weights.source import WeightSource

FOLDER = Path(__file__).parents[1] / "fixtures" / "tf_ckpt"
MNIST = Path(__file__).parents[2] / "data" / "mnist"
MADE = FOLDER / "made"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())


def described(source: WeightSource, name: str) -> list[object]:
    """A tensor's kind, shape, and the hash of its bytes if it can be read."""
    info = source.tensors[name]
    if info.dtype.startswith("DT_"):
        return [info.dtype, list(info.shape), None]
    tensor = source.read(name)
    assert tensor.is_contiguous()
    assert (f"torch.{info.dtype}", info.shape, info.num_bytes) == (str(tensor.dtype), tensor.shape, tensor.nbytes)
    content = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    return [info.dtype, list(info.shape), hashlib.sha256(content).hexdigest()]


@pytest.mark.parametrize("checkpoint", GOLDEN)
def test_every_tensor_is_what_tensorflow_reads(checkpoint: str) -> None:
    source = open_tensorflow(FOLDER / checkpoint)
    assert {name: described(source, name) for name in source.tensors} == GOLDEN[checkpoint]


def test_the_variables_and_the_slots_of_mtcnn_are_there() -> None:
    source = open_tensorflow(FOLDER / "mtcnn" / "PNet-18")
    slots = {name for name in source.tensors if name.endswith("/Momentum")}
    assert len(source.tensors) == 31
    assert {f"{name}/Momentum" for name in {*source.tensors} - slots} == slots | {"Variable/Momentum"}
    assert all(torch.isfinite(source.read(name)).all() for name in source.tensors)


@pytest.mark.parametrize(
    ("checkpoint", "scope", "num_right"),
    [
        ("v1/regression.ckpt", "regression/", 8978),
        ("v1/simple.ckpt", "simple/", 9091),
        ("v1/softmax-1000.ckpt", "", 9135),
        ("v2/regression.ckpt", "regression/", 9149),
    ],
)
def test_softmax_regression_is_as_right_on_mnist_as_it_was(checkpoint: str, scope: str, num_right: int) -> None:
    source = open_tensorflow(FOLDER / "sugyan_mnist" / checkpoint)
    images, labels = (load_idx(MNIST / file.name) for file in (SPLITS["test"].images, SPLITS["test"].labels))
    pixels = torch.from_numpy(images.reshape(-1, 784).astype(np.float32) / 255)
    logits = pixels @ source.read(f"{scope}W") + source.read(f"{scope}b")
    assert (logits.argmax(1) == torch.tensor(labels)).sum() == num_right


def test_the_names_of_an_object_graph_stay() -> None:
    source = open_tensorflow(MADE / "objects")
    assert [*source.tensors] == [
        "_CHECKPOINTABLE_OBJECT_GRAPH",
        "model/layers/0/kernel/.ATTRIBUTES/VARIABLE_VALUE",
        "model/layers/1/kernel/.ATTRIBUTES/VARIABLE_VALUE",
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
        "step/.ATTRIBUTES/VARIABLE_VALUE",
    ]
    assert source.read("step/.ATTRIBUTES/VARIABLE_VALUE") == 11


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("saver", "saver/model.ckpt-2"),
        ("saver/model.ckpt-1", "saver/model.ckpt-1"),
        ("saver/model.ckpt-1.index", "saver/model.ckpt-1"),
        ("saver/model.ckpt-1.meta", "saver/model.ckpt-1"),
        ("saver/model.ckpt-1.data-00000-of-00001", "saver/model.ckpt-1"),
        ("merged.data-00002-of-00004", "merged"),
        ("saver_v1.ckpt", "saver_v1.ckpt"),
        ("saver_v1.ckpt.meta", "saver_v1.ckpt"),
        ("v1_shards", "v1_shards-?????-of-00002"),
        ("v1_shards.meta", "v1_shards-?????-of-00002"),
        ("v1_shards-?????-of-00002", "v1_shards-?????-of-00002"),
        ("v1_shards-00001-of-00002", "v1_shards-?????-of-00002"),
    ],
)
def test_a_checkpoint_is_found_by_each_of_its_paths(path: str, expected: str) -> None:
    assert open_tensorflow(MADE / path).path == MADE / expected


def test_of_two_versions_with_one_name_the_second_counts(tmp_path: Path) -> None:
    for path in (MADE / "saver").glob("model.ckpt-2*"):
        shutil.copy(path, tmp_path)
    shutil.copy(MADE / "saver_v1.ckpt", tmp_path / "model.ckpt-2")
    assert open_tensorflow(tmp_path / "model.ckpt-2").kind == "TensorFlow checkpoint (V2)"


def test_of_one_file_and_several_with_one_name_the_one_counts(tmp_path: Path) -> None:
    for path in MADE.glob("v1_shards*"):
        shutil.copy(path, tmp_path)
    shutil.copy(MADE / "saver_v1.ckpt", tmp_path / "v1_shards")
    assert open_tensorflow(tmp_path / "v1_shards").path == tmp_path / "v1_shards"


def test_a_path_within_the_working_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MADE / "saver")
    assert open_tensorflow(Path("model.ckpt-1")).path == Path("model.ckpt-1")
    assert open_tensorflow(Path()).path == Path("model.ckpt-2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('model_checkpoint_path: "model.ckpt-2"\nall_model_checkpoint_paths: "model.ckpt-1"\n', "model.ckpt-2"),
        ('all_model_checkpoint_paths: "model.ckpt-1"\nmodel_checkpoint_path: "model.ckpt-2"', "model.ckpt-2"),
        ("  model_checkpoint_path : 'a/model.ckpt-2'", "a/model.ckpt-2"),
        (r'model_checkpoint_path: "\"\\\'\303\244\x41\n"', "\"\\'äA\n"),
    ],
    ids=["first", "last", "single quotes", "escapes"],
)
def test_the_latest_checkpoint_is_what_the_folder_says(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "checkpoint").write_text(text)
    assert latest_checkpoint(tmp_path) == tmp_path / expected


@pytest.mark.parametrize(
    ("more", "path"),
    [
        (b'all_model_checkpoint_paths: "mod', b"model.ckpt-2"),
        (b'all_model_checkpoint_paths: "M\\374ller"\n', b"model.ckpt-2"),
        (b"".join(b'all_model_checkpoint_paths: "%s/%d"\n' % (b"x" * 60, n) for n in range(16000)), b"model.ckpt-2"),
        (b"", rb"M\374ller/model.ckpt-2"),
    ],
    ids=["cut off", "not UTF-8 later", "over 1 MiB", "not UTF-8"],
)
def test_the_latest_checkpoint_is_named_whatever_follows(tmp_path: Path, more: bytes, path: bytes) -> None:
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "%s"\n' % path + more)
    expected = path.replace(rb"\374", b"\374").decode(errors="surrogateescape")
    assert latest_checkpoint(tmp_path) == tmp_path / expected


def test_an_absolute_path_of_the_latest_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{MADE / "merged"}"\n')
    assert open_tensorflow(tmp_path).path == MADE / "merged"


@pytest.mark.parametrize("named", ["/home/somebody/train/{}", "train/{}", r"C:\\train\\{}", "{}"])
def test_the_latest_checkpoint_of_another_machine_is_found_beside_the_file_that_names_it(
    tmp_path: Path, named: str
) -> None:
    for file in (MADE / "saver").glob("model.ckpt-1.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{named.format("model.ckpt-1")}"\n')
    assert open_tensorflow(tmp_path).path == tmp_path / "model.ckpt-1"


def test_a_path_into_a_closed_folder_does_not_hide_the_checkpoint_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (MADE / "saver").glob("model.ckpt-1.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/closed/model.ckpt-1"\n')
    exists = Path.exists

    def closed(path: Path) -> bool:  # the user of the tests may be one to whom nothing is closed
        if path.is_relative_to("/closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    assert open_tensorflow(tmp_path).path == tmp_path / "model.ckpt-1"


@pytest.mark.parametrize(
    "text", ["", 'model_checkpoint_path: ""', "model_checkpoint_path: model.ckpt-2", "\n" * 99_999]
)
def test_a_state_without_a_path_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(tmp_path)
    assert caught.value.what == f"{tmp_path / 'checkpoint'} names no checkpoint."
    assert caught.value.given == repr(text[:100])
    assert caught.value.hint == "name the checkpoint itself"


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-1.index").touch()
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(tmp_path)
    assert caught.value.what == f"{tmp_path} does not say which checkpoint is its latest."
    assert caught.value.given == "a folder without a file 'checkpoint', with the checkpoints model.ckpt-1"


def test_a_latest_checkpoint_that_is_not_there_is_named_with_those_that_are() -> None:
    folder = FOLDER / "mtcnn"
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(folder)
    named = f"{folder / 'PNet-30'}, which {folder / 'checkpoint'} names"
    assert caught.value.what == f"There is no TensorFlow checkpoint {named}."
    assert caught.value.given == f"a folder {folder} with the checkpoints PNet-18"
    assert caught.value.expected == "PNet-30.index (version 2), or the file PNet-30 (version 1)"
    assert caught.value.hint == "name a checkpoint that is there"


@pytest.mark.parametrize(
    ("state", "what", "given"),
    [
        ("/", "There is no TensorFlow checkpoint /, which {}/checkpoint names.", "a folder / with "),
        ("\\000", "There is no TensorFlow checkpoint {}/\0, which", "with no checkpoint of version 2"),
        ("none/w", "There is no TensorFlow checkpoint {}/none/w, which", "nothing to be read (No such file or"),
        ("x" * 300, "{} cannot be read.", "OSError: File name too long"),
    ],
    ids=["the root", "no name", "no folder", "too long"],
)
def test_a_state_that_names_what_cannot_be_is_refused(tmp_path: Path, state: str, what: str, given: str) -> None:
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{state}"')
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(tmp_path)
    assert what.format(tmp_path) in caught.value.what
    assert given in caught.value.given


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(tmp_path / "model.ckpt-3")
    assert caught.value.what == f"There is no TensorFlow checkpoint {tmp_path / 'model.ckpt-3'}."
    assert caught.value.given == f"a folder {tmp_path} with no checkpoint of version 2"


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    shutil.copy(MADE / "v1_shards-00000-of-00002", tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(tmp_path / "v1_shards")
    assert caught.value.what == f"The checkpoint {tmp_path / 'v1_shards-?????-of-00002'} is not whole."
    assert caught.value.given == "no file v1_shards-00001-of-00002"
    assert caught.value.expected == "all of its 2 files of values"


def test_another_file_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(FOLDER / "golden.json")
    assert caught.value.what.endswith("golden.json is damaged or cut short, or is no table of TensorFlow's.")


@pytest.mark.parametrize("named", ["", "/model.ckpt", "/model.ckpt.index"])
def test_a_checkpoint_in_a_store_is_copied_with_all_its_files(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = RemotePath(f"memory://{uuid.uuid4().hex}/weights")
    write_bundle(tmp_path / "model.ckpt", {b"w": entry(1, [1], data=b"abcd")}, b"abcd")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt"')
    for file in [*tmp_path.glob("model.ckpt*"), tmp_path / "checkpoint"]:
        (folder / file.name).upload(file)
    source = open_weights_file(f"{folder}{named}")
    assert source.read("w").numpy().tobytes() == b"abcd"
    with pytest.raises(NotFoundError, match=f"There are no weights called {folder}/other"):
        open_weights_file(f"{folder}/other")
