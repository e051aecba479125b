"""Files of torch.save as a source of weights: what is in them is read, and never run."""

from __future__ import annotations

import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged_files import RESNET, TENSORS, count_refused, truncated, with_a_flipped_bit
from torch import Tensor, nn
from torch.nn import functional

from lockstep.errors import CheckpointError
from lockstep.images.decode import Decoding
from lockstep.records.example import parse_example
from lockstep.records.tfrecord import read_all
from lockstep.weights.assignment import Target, WarmStart, assign_tensors
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.names import Rename
from lockstep.weights.torch_file import TorchFile

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])


def saved(folder: Path, content: object, *, zipped: bool = True) -> Path:
    path = folder / "weights"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


class Malicious:
    """What runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (self.command,)


@FORMATS
def test_tensors_come_as_they_were_saved(tmp_path: Path, zipped: bool) -> None:
    source = TorchFile(saved(tmp_path, OrderedDict(TENSORS), zipped=zipped))
    assert list(source.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        found = source.read(name)
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
        assert source.tensors[name].shape == tensor.shape
        assert source.tensors[name].num_bytes == tensor.nbytes


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"state_dict": {"a": 0}, "optimizer": {"b": 0}, "epoch": 3}, ["a"]),
        ({"model_state_dict": {"module.a": 0}, "optimizer_state_dict": {"b": 0}}, ["module.a"]),
        ({"model": {"a": 0}, "epoch": 3}, ["a"]),
        ({"ema": {"a": 0}}, ["a"]),
        ({"model": {"a": 0}, "ema": {"a": 0}}, ["a", "a" + AVERAGE]),
        ({"state_dict": {"a": 0}, "state_dict_ema": {"a": 0}}, ["a", "a" + AVERAGE]),
        ({"net": {"a": 0}, "ema": {"module.a": 0}, "epoch": 3}, ["net.a", "module.a" + AVERAGE]),
        ({"ema": {"a": 0}, "optimizer": {"b": 0}}, ["a"]),
        ({"model": {"a": 0}, "ema_model": {"a": 0}}, ["a", "a" + AVERAGE]),
        ({"net": {"a": 0, "deep": {"b": 0}}, "optimizer": {"state": {0: {"step": 0}}}},
         ["net.a", "net.deep.b", "optimizer.state.0.step"]),
        ({"layers": [0, (0,)]}, ["layers.0", "layers.1.0"]),
        ({"model": "resnet20", "a": 0}, ["a"]),
        (0, ["tensor"]),
    ],
)  # fmt: skip
def test_the_weights_are_found_among_the_rest(tmp_path: Path, content: Any, names: list[str]) -> None:
    count = iter(range(100))

    def with_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_tensors(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(with_tensors, value))
        return torch.tensor(float(next(count))) if value == 0 else value

    source = TorchFile(saved(tmp_path, with_tensors(content)))
    assert list(source.tensors) == names
    assert len({source.read(name).item() for name in names}) == len(names)


def test_what_stands_beside_the_weights(tmp_path: Path) -> None:
    source = TorchFile(saved(tmp_path, {"state_dict": TENSORS, "epoch": 3, "arch": "resnet20", "args": [1]}))
    assert source.values == {"epoch": 3, "arch": "resnet20"}


def test_views_parameters_and_other_strides_become_plain(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    content = {
        "columns": base.T,
        "part": base[1:, 1:],
        "parameter": nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    source = TorchFile(saved(tmp_path, content))
    for name, tensor in content.items():
        found = source.read(name)
        assert torch.equal(found, tensor.detach())
        assert found.is_contiguous()
        assert not found.requires_grad
        assert not found.is_conj()
    source.read("columns").fill_(0)
    assert torch.equal(source.read("part"), base[1:, 1:])


@FORMATS
def test_malicious_files_never_run_and_are_named(tmp_path: Path, zipped: bool) -> None:
    ran = tmp_path / "ran"
    path = saved(tmp_path, {"a": torch.ones(2), "b": Malicious(f"touch {ran}")}, zipped=zipped)
    with pytest.raises(CheckpointError, match=r"loading it could run code, so it was not loaded") as error:
        TorchFile(path)
    assert f"{os.name}.system" in str(error.value)
    assert "torch.save(model.state_dict(), NEW_FILE)" in error.value.hint
    assert not ran.exists()
    torch.load(path, weights_only=False)
    assert ran.exists(), "it would have run"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_malicious_pickles_never_run_and_are_named(tmp_path: Path, protocol: int) -> None:
    path, ran = tmp_path / "weights", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Malicious(f"touch {ran}"), protocol))
    with pytest.raises(CheckpointError, match=rf"{os.name}\.system"):
        TorchFile(path)
    assert not ran.exists()


@FORMATS
@pytest.mark.parametrize(
    ("extra", "named"),
    [(Namespace(lr=0.1), "argparse.Namespace"), (np.float64(0.9), "scalar"), (nn.Linear(1, 1), "Linear")],
    ids=["arguments", "numpy", "module"],
)
def test_an_old_file_with_more_than_tensors_is_refused(tmp_path: Path, extra: object, named: str, zipped: bool) -> None:
    with pytest.raises(CheckpointError, match=r"holds more than tensors") as error:
        TorchFile(saved(tmp_path, {"state_dict": TENSORS, "extra": extra}, zipped=zipped))
    assert named in error.value.given
    assert str(tmp_path / "weights") in error.value.what


def test_a_flipped_value_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(5), "b": torch.zeros(3)})
    whole = path.read_bytes()
    place = whole.index(torch.ones(5).numpy().tobytes())
    path.write_bytes(whole[:place] + b"\1" + whole[place + 1 :])
    source = TorchFile(path)
    assert list(source.tensors) == ["a", "b"]
    with pytest.raises(CheckpointError, match=r"weights is damaged or cut short") as error:
        source.read("a")
    assert "Bad CRC-32" in error.value.given


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, TENSORS)
    finally:
        torch.serialization.set_crc32_options(computed)
    source = TorchFile(path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in TENSORS.items())


def test_values_that_are_none_of_plain_numbers(tmp_path: Path) -> None:
    content = {"sparse": torch.eye(3).to_sparse(), "nowhere": torch.ones(3, device="meta"), "plain": torch.ones(1)}
    source = TorchFile(saved(tmp_path, content))
    for name in ("sparse", "nowhere"):
        with pytest.raises(CheckpointError, match=rf"'{name}' of .*weights holds what torch has no kind for"):
            source.read(name)
    assert source.read("plain").item() == 1


def test_a_value_that_stands_for_many_takes_no_memory(tmp_path: Path) -> None:
    source = TorchFile(saved(tmp_path, {"a": torch.ones(1).expand(1 << 40)}))
    with pytest.raises(CheckpointError, match=r"'a' of .*weights is damaged") as error:
        source.read("a")
    assert error.value.given == f"{1 << 42} bytes"


def test_dicts_without_end_are_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = {"a": torch.ones(1)}
    content["again"] = content
    with pytest.raises(CheckpointError, match=r"weights cannot be used") as error:
        TorchFile(saved(tmp_path, content))
    assert error.value.given == "more than 32 dicts or lists, one inside of another"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be used") as error:
        TorchFile(saved(tmp_path, {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}))
    assert error.value.given == "two tensors 'a.b'"


@pytest.mark.parametrize(("content", "given"), [({"epoch": 3}, "a dict with epoch"), (3, "a int")])
def test_a_file_without_tensors_is_refused(tmp_path: Path, content: object, given: str) -> None:
    with pytest.raises(CheckpointError, match=r"weights holds no tensors") as error:
        TorchFile(saved(tmp_path, content))
    assert error.value.given == given


def test_a_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data.pkl", b"")
        archive.writestr("net/constants.pkl", b"")
    with pytest.raises(CheckpointError, match=r"is a program of TorchScript, which has code"):
        TorchFile(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match=r"weights is damaged") as error:
        TorchFile(path)
    assert error.value.given == f"records of {1 << 20} bytes"


def test_what_is_no_file_of_torch(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(CheckpointError, match=r"text is no file of torch.save"):
        TorchFile(tmp_path / "text")
    with pytest.raises(CheckpointError, match=r"none cannot be read"):
        TorchFile(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no tensor 'x'"):
        TorchFile(saved(tmp_path, TENSORS)).read("x")


@FORMATS
def test_truncated_files_are_refused(tmp_path: Path, zipped: bool) -> None:
    path = saved(tmp_path, TENSORS, zipped=zipped)
    assert count_refused(path, 60, truncated, has_checksums=True) == 60


@FORMATS
def test_flipped_bits_do_no_harm(tmp_path: Path, zipped: bool) -> None:
    path = saved(tmp_path, TENSORS, zipped=zipped)
    assert count_refused(path, 200, with_a_flipped_bit, has_checksums=zipped)


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters, which halves the image and pads the channels (option A)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.padding = (num_out - num_in) // 2
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        x = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(x + shortcut)


class ResNet20(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def cifar_images() -> tuple[Tensor, Tensor]:
    """The 128 images as the network takes them, and their labels."""
    decoding = Decoding()
    examples = [parse_example(payload) for _, payload in read_all(RESNET.parent / "cifar10_test.tfrecord")]
    pixels = torch.stack([decoding.decode(bytes(example["image"][0]), "image") for example in examples])
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalised = (pixels / 255 - mean[:, None, None]) / deviation[:, None, None]
    return normalised, torch.tensor([int(example["label"][0]) for example in examples])


def test_resnet_20_scores_as_torch_has_it() -> None:
    by_torch, by_plan = ResNet20().eval(), ResNet20().eval()
    content = torch.load(RESNET, map_location="cpu", weights_only=True)["state_dict"]
    by_torch.load_state_dict({name.removeprefix("module."): value for name, value in content.items()}, strict=False)

    source = TorchFile(RESNET)
    targets = {
        name: Target(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in by_plan.state_dict().items()
    }
    planned = assign_tensors(source, targets, WarmStart(rename=(Rename(r"^module\.", ""),)))
    assert planned.report.unexpected == planned.report.ignored == planned.report.mismatched == ()
    assert {each.source for each in planned.report.loaded} == content.keys() == source.tensors.keys()
    with torch.no_grad():
        for name, tensor in planned.tensors(source):
            by_plan.state_dict()[name].copy_(tensor)
        images, labels = cifar_images()
        expected, found = by_torch(images), by_plan(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # The network is right in 91.8 % of all test images.
    assert (found.argmax(1) == labels).float().mean() > 0.85
