"""Checkpoints of runs as a source of weights, among all others."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from lockstep.checkpoints.manifest import DamagedError
from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError
from lockstep.training.run_weights import RunWeights, open_weights, run_at_step
from lockstep.weights.assignment import Target, WarmStart, assign_tensors
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.source import TensorInfo


def write(workdir: Path, *steps: int, state: str = "") -> Path:
    store = Store(workdir / "checkpoints")
    for step in steps:
        sections = {
            "parameters": {"conv.weight": torch.full((2, 3), float(step)), "conv.bias": torch.zeros(3)},
            "buffers": {"bn.running_mean": torch.full((3,), 0.5)},
            "slots": {"momentum/conv.weight": torch.ones(2, 3)},
            "average": {"conv.weight": torch.full((2, 3), step + 0.25), "conv.bias": torch.ones(3)},
        }
        store.write(step, {state + name: members for name, members in sections.items()}, {"step": step})
    return workdir


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_parameters_buffers_and_averages(tmp_path: Path) -> None:
    source = open_weights(write(tmp_path, 3))
    assert isinstance(source, RunWeights)
    assert (source.kind, source.step) == ("Lockstep checkpoint", 3)
    assert source.path == tmp_path / "checkpoints" / "step-00000003"
    names = {"conv.weight", "conv.bias", "bn.running_mean"}
    assert source.tensors.keys() == names | {"conv.weight" + AVERAGE, "conv.bias" + AVERAGE}
    assert source.tensors["conv.weight"] == TensorInfo((2, 3), "float32", 24)
    assert torch.equal(source.read("conv.weight"), torch.full((2, 3), 3.0))
    assert torch.equal(source.read("conv.weight" + AVERAGE), torch.full((2, 3), 3.25))
    assert torch.equal(source.read("bn.running_mean"), torch.full((3,), 0.5))


@pytest.mark.parametrize(("prefer_average", "expected"), [(False, 3.0), (True, 3.25)])
def test_a_warm_start_takes_raw_weights_or_averages(tmp_path: Path, prefer_average: bool, expected: float) -> None:
    source = open_weights(write(tmp_path, 3))
    targets = {
        "conv.weight": Target((2, 3), "float32"),
        "conv.bias": Target((3,), "float32"),
        "bn.running_mean": Target((3,), "float32", "buffer"),
    }
    planned = assign_tensors(source, targets, WarmStart(prefer_average=prefer_average))
    assert planned.report.share == 1
    assert not planned.report.unexpected
    loaded = dict(planned.tensors(source))
    assert torch.equal(loaded["conv.weight"], torch.full((2, 3), expected))
    assert torch.equal(loaded["bn.running_mean"], torch.full((3,), 0.5))


def test_slots_on_request(tmp_path: Path) -> None:
    source = open_weights(write(tmp_path, 3), slots=True)
    assert torch.equal(source.read("momentum/conv.weight"), torch.ones(2, 3))


def test_several_states(tmp_path: Path) -> None:
    source = open_weights(write(tmp_path, 3, state="generator."))
    assert "generator.conv.weight" in source.tensors
    assert torch.equal(source.read("generator.conv.weight" + AVERAGE), torch.full((2, 3), 3.25))


@pytest.mark.parametrize(
    ("path", "step"),
    [("", 12), ("checkpoints", 12), ("checkpoints/step-00000007", 7), ("@7", 7), ("@12", 12)],
)
def test_the_ways_to_name_a_checkpoint(tmp_path: Path, path: str, step: int) -> None:
    workdir = write(tmp_path / "run", 7, 12)
    source = open_weights(f"{workdir}{path}" if path.startswith("@") else workdir / path)
    assert source.read("conv.weight")[0, 0] == step


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 8") as error:
        open_weights(f"{write(tmp_path, 7, 12)}@8")
    assert error.value.expected == "one of the steps there are: 7, 12"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workdir = write(tmp_path, 7, 12)
    flip(workdir / "checkpoints/step-00000012/parameters.safetensors")
    with caplog.at_level(logging.WARNING, "lockstep"):
        source = open_weights(workdir)
    assert source.read("conv.weight")[0, 0] == 7
    assert "step-00000012/parameters.safetensors is damaged. Given: sha256 " in caplog.text


@pytest.mark.parametrize("place", [-1, 3, 12], ids=["values", "length of the header", "header"])
def test_a_bit_that_flipped_is_found(tmp_path: Path, place: int) -> None:
    workdir = write(tmp_path, 7)
    flip(workdir / "checkpoints/step-00000007/parameters.safetensors", place)
    with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged"):
        open_weights(workdir)
    with pytest.raises(DamagedError, match=r"parameters.safetensors is damaged"):
        open_weights(f"{workdir}@7").read("conv.weight")


def test_damage_in_what_is_not_listed_is_none_of_a_warm_start(tmp_path: Path) -> None:
    workdir = write(tmp_path, 7)
    flip(workdir / "checkpoints/step-00000007/slots.safetensors")
    assert open_weights(workdir).read("conv.weight")[0, 0] == 7


@pytest.mark.parametrize("name", ["manifest.json", "buffers.safetensors"])
def test_a_file_cut_short_is_found(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 7) / "checkpoints/step-00000007" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DamagedError, match=rf"{name} is damaged"):
        open_weights(path.parent)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000007 has no tensor 'conv'"):
        open_weights(write(tmp_path, 7)).read("conv")


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no weights that are known") as error:
        open_weights(tmp_path)
    assert error.value.given == "a run without a checkpoint"


def test_files_of_other_systems_are_opened_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "weights@2")
    assert open_weights(tmp_path / "weights@2").kind == "torch file"


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("run", None),
        ("run@7", 7),
        ("run/checkpoints", None),
        ("run/checkpoints/", None),
        ("run/checkpoints@7", 7),
        ("run/checkpoints/step-00000007", 7),
    ],
)
def test_a_run_is_known_by_all_of_its_folders(tmp_path: Path, path: str, step: int | None) -> None:
    write(tmp_path / "run", 7, 12)
    assert run_at_step(f"{tmp_path}/{path}") == (tmp_path / "run", step)


@pytest.mark.parametrize("path", ["none", "step-00000007", "checkpoints", "checkpoints/step-00000009", "checkpoints@"])
def test_other_folders_are_no_parts_of_a_run(tmp_path: Path, path: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert run_at_step(f"{tmp_path}/{path}") == (tmp_path / path, None)


def test_a_run_is_known_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = write(tmp_path / "run", 7)
    monkeypatch.chdir(workdir / "checkpoints")
    assert run_at_step(".") == (workdir, None)
    assert run_at_step("step-00000007") == (workdir, 7)


def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workdir = write(tmp_path, 7)
    verify = RunWeights.verify

    def verify_late(weights: RunWeights) -> None:
        if weights.step == 7:
            shutil.rmtree(weights.path)
            write(workdir, 12)
        verify(weights)

    monkeypatch.setattr(RunWeights, "verify", verify_late)
    assert open_weights(workdir).read("conv.weight")[0, 0] == 12
    assert not caplog.records


def test_the_newest_checkpoint_may_be_known_already(tmp_path: Path) -> None:
    workdir = write(tmp_path, 7, 12)
    assert open_weights(workdir, newest=7).read("conv.weight")[0, 0] == 7
    assert open_weights(f"{workdir}@12", newest=7).read("conv.weight")[0, 0] == 12


def test_names_of_two_states_that_are_one_are_refused(tmp_path: Path) -> None:
    sections = {"a.parameters": {"b.weight": torch.ones(1)}, "a.b.parameters": {"weight": torch.zeros(1)}}
    path = Store(tmp_path / "checkpoints").write(1, sections, {})
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path)
    assert str(caught.value) == (
        f"Two tensors of {path} have the name 'a.b.weight'.\n"
        "  given:    one in a.parameters.safetensors, one in a.b.parameters.safetensors\n"
        "  expected: names of states that stay apart with the names of their tensors\n"
        "  hint:     save the run with other names of its states"
    )
