"""`lockstep import checkpoint` as a user runs it, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoints.store import Store
from lockstep.cli.main import main
from lockstep.storage.remote_path import RemotePath
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.open import open_weights_file

FIXTURES = Path(__file__).parent.parent / "fixtures"
RESNET = FIXTURES / "weights" / "resnet20-12fca82f.th"
TENSORFLOW = FIXTURES / "tf_ckpt"


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """The tensors in the file that the command makes."""

    def run(path: str | Path, *words: str, code: int = 0, to: str = "weights.safetensors") -> Any:
        assert main(["import", "checkpoint", str(path), "--to", str(tmp_path / to), *words]) == code
        return load_file(tmp_path / to) if code == 0 else None

    return run


def archive(folder: Path, **arrays: Any) -> Path:
    with (folder / "weights.npz").open("wb") as file:
        np.savez(file, **arrays)
    return folder / "weights.npz"


def test_names_and_layouts_stay_as_they_are(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, source = made(RESNET), open_weights_file(RESNET)
    assert tensors.keys() == source.tensors.keys()
    assert all(torch.equal(tensor, source.read(name)) for name, tensor in tensors.items())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Weights from {RESNET} (torch file): 97 of 97 tensors of the model, 100.0 %")
    assert lines[-1] == f"{tmp_path / 'weights.safetensors'}: 97 tensors, 1.1 MB"


def test_weights_on_a_bucket_are_imported_and_compared(
    made: Any, bucket: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    (bucket / "resnet.th").write_bytes(RESNET.read_bytes())
    there, here = made(f"{bucket}/resnet.th"), made(RESNET, "--force")
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here)
    capsys.readouterr()
    for paths in ((RESNET, f"{bucket}/resnet.th"), (f"{bucket}/resnet.th", RESNET)):
        assert main(["inspect", str(paths[0]), "--diff", str(paths[1])]) == 0
        assert capsys.readouterr().out == "97 tensors are equal, 0 have other values\n"
    made(f"{bucket}/gone.th", "--force", code=2)
    assert f"There are no weights called {bucket}/gone.th" in capsys.readouterr().err


def test_steps_and_slots_are_left_out(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(TENSORFLOW / "made/saver").keys() == {"bias", "embedding"}
    assert "slot of an optimizer" in capsys.readouterr().out


def test_strings_are_left_out(made: Any) -> None:
    assert all("GRAPH" not in name for name in made(TENSORFLOW / "made/objects"))


def test_averages_on_request(made: Any, tmp_path: Path) -> None:
    path = archive(tmp_path, **{"w": np.ones(2), "w" + AVERAGE: np.zeros(2), "b": np.full(2, 3.0)})
    raw = made(path)
    assert {name: tensor.tolist() for name, tensor in raw.items()} == {"w": [1, 1], "b": [3, 3]}
    averaged = made(path, "--average", "--force")
    assert {name: tensor.tolist() for name, tensor in averaged.items()} == {"w": [0, 0], "b": [3, 3]}


def test_import_of_missing_averages_is_refused(made: Any, tmp_path: Path) -> None:
    made(RESNET, "--average", code=2)
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_run_raw_or_averaged(made: Any, tmp_path: Path) -> None:
    sections = {
        "parameters": {"w": torch.ones(2)},
        "buffers": {"mean": torch.full((2,), 0.5)},
        "slots": {"momentum/w": torch.ones(2)},
        "average": {"w": torch.zeros(2)},
    }
    Store(tmp_path / "run" / "checkpoints").write(5, sections, {})
    assert {n: t.tolist() for n, t in made(tmp_path / "run").items()} == {"w": [1, 1], "mean": [0.5, 0.5]}
    found = made(f"{tmp_path / 'run'}@5", "--average", "--force")
    assert {n: t.tolist() for n, t in found.items()} == {"w": [0, 0], "mean": [0.5, 0.5]}


def test_a_map_gives_names_and_layouts(made: Any, tmp_path: Path) -> None:
    kernel, dense, depthwise = (
        np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((3, 3, 2, 4), (5, 5), (3, 3, 2, 1))
    )
    path = archive(
        tmp_path,
        **{
            "net/conv/weights": kernel,
            "net/conv/BatchNorm/moving_mean": np.zeros(4),
            "net/fc/kernel": dense,
            "net/fc/bias": np.zeros(5),
            "net/deep/depthwise_weights": depthwise,
            "global_step": np.array(3),
        },
    )
    found = made(path, "--map", "tensorflow")
    assert found.keys() == {
        "net.conv.weight",
        "net.conv.bn.running_mean",
        "net.fc.weight",
        "net.fc.bias",
        "net.deep.weight",
    }
    assert np.array_equal(found["net.conv.weight"], kernel.transpose(3, 2, 0, 1))
    assert np.array_equal(found["net.fc.weight"], dense.T)
    assert np.array_equal(found["net.deep.weight"], depthwise.transpose(2, 3, 0, 1))


@pytest.mark.parametrize("name", ["tensorflwo", "mnist"])
def test_a_map_that_is_none_or_matches_nothing(made: Any, name: str) -> None:
    made(RESNET, "--map", name, code=2)


def test_a_file_is_never_overwritten_unless_asked_for(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_text("mine")
    made(RESNET, code=2)
    assert path.read_text() == "mine"
    assert len(made(RESNET, "--force")) == 97


def test_nothing_is_left_where_it_fails(made: Any, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(RESNET.read_bytes()[:-5])
    made(tmp_path / "damaged", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_kinds_that_the_file_cannot_hold_are_refused(made: Any, tmp_path: Path) -> None:
    made(archive(tmp_path, a=np.array([1 + 2j])), code=1)
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize("to", ["weights.pt", "no/such/weights.safetensors"])
def test_a_destination_that_cannot_be(made: Any, tmp_path: Path, to: str) -> None:
    made(RESNET, code=2, to=to)
    assert not any(tmp_path.iterdir())


def test_a_file_may_have_any_name(made: Any) -> None:
    assert len(made(RESNET, to="my weights (1).safetensors")) == 97


def test_a_folder_is_no_destination(made: Any, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    made(RESNET, "--force", code=2, to="folder.safetensors")


def test_import_of_a_missing_checkpoint_is_refused(made: Any, tmp_path: Path) -> None:
    made(tmp_path / "none", code=2)
    made("s3://bucket/weights", code=2)
