"""The model of a run as a file: read back by a process that has no Lockstep, with the scores of an evaluation."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from saved_runs import saved
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.evaluation.scores import Weights
from lockstep.images.normalisation import scale_image
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs import export
from lockstep.runs.export import METADATA, check_packages, encode_model
from lockstep.runs.trained import Trained, trained_model

FILES = ("raw.safetensors", "average.safetensors", "raw.pt2", "average.pt2")
NUM_EXAMPLES = 5

# What a user without Lockstep would write: the files in, the scores out.
READER = """
import sys

sys.modules["lockstep"] = None
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.local3, self.local4 = nn.Linear(3136, 1024), nn.Linear(1024, 10)
        self.softmax_linear = nn.Linear(10, 10)

    def forward(self, images):
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        return self.softmax_linear(F.relu(self.local4(F.relu(self.local3(hidden.flatten(1))))))


images = torch.from_numpy(np.load("images.npy"))
for file in sys.argv[1:]:
    if file.endswith(".pt2"):
        model = torch.export.load(file).module()
    else:
        model = Net()
        model.load_state_dict(load_file(file))
    with torch.no_grad():
        np.save(f"{file}.npy", model(images).numpy())
try:
    import lockstep
except ImportError:
    print("no lockstep")
"""


class Images:
    """A few images of noise."""

    cost = "memory"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(256, (NUM_EXAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def read_batch(self, indices: Any) -> dict[str, Tensor]:
        return {"image": self.pixels[torch.from_numpy(indices)]}

    def example_id(self, index: int) -> str:
        return str(index)


def made_run(folder: Path, *settings: str) -> tuple[Recipe, ls.TrainState]:
    """A run with a checkpoint of step 7, whose averages are not its weights."""
    given = with_settings(find("mnist"), list(settings))
    return given, saved(folder, given)


def evaluated(state: ls.TrainState, weights: Weights) -> np.ndarray[Any, Any]:
    """The scores that an evaluation sees."""
    seen: list[Tensor] = []

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        seen.append(model(scale_image(batch["image"])))
        return {"top1": seen[-1][:, 0]}

    ls.evaluate(state, score, ls.data.Loader(Images(), batch_size=NUM_EXAMPLES, num_processes=0), weights=weights)
    (scores,) = seen
    return scores.numpy()


def write(trained: Trained, path: Path) -> None:
    path.write_bytes(b"".join(encode_model(trained, path.suffix)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ls.TrainState]:
    """A run that keeps averages; beside it the images, as the model is given them."""
    folder = tmp_path_factory.mktemp("export") / "run"
    _, state = made_run(folder, "average.decay=0.9")
    np.save(folder.parent / "images.npy", scale_image(Images().pixels).numpy())
    return folder, state


@pytest.mark.process
def test_plain_torch_gets_the_scores_of_an_evaluation(run: tuple[Path, ls.TrainState]) -> None:
    folder, state = run
    for name in FILES:
        write(trained_model(str(folder), "average" if name.startswith("average") else "raw"), folder.parent / name)
    said = subprocess.run(
        [sys.executable, "-I", "-c", READER, *FILES],
        cwd=folder.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.stdout == "no lockstep\n", said.stderr
    scores = {name: np.load(folder.parent / f"{name}.npy") for name in FILES}
    for weights in ("raw", "average"):
        expected = evaluated(state, weights)
        assert np.array_equal(scores[f"{weights}.safetensors"], expected)
        assert np.array_equal(scores[f"{weights}.pt2"], expected)
    assert not np.array_equal(scores["raw.pt2"], scores["average.pt2"])


def test_onnx_gets_the_scores_of_an_evaluation(run: tuple[Path, ls.TrainState]) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder, state = run
    onnxruntime = importlib.import_module("onnxruntime")
    write(trained_model(str(folder), "average"), folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    images = np.load(folder.parent / "images.npy")
    expected = evaluated(state, "average")
    for num in (1, NUM_EXAMPLES):
        (scores,) = session.run(None, {export.INPUT: images[:num]})
        assert np.abs(scores - expected[:num]).max() < 1e-5
    found = session.get_modelmeta().custom_metadata_map
    assert found == {"step": "7", "recipe": "mnist", "weights": "average"}
    assert str(Path(ls.__file__).parent).encode() not in (folder / "model.onnx").read_bytes()


@pytest.mark.parametrize("lrn", ["false", "true"])
def test_a_program_takes_batches_of_any_size(tmp_path: Path, lrn: str) -> None:
    _, state = made_run(tmp_path / "run", f"model.lrn={lrn}")
    path = tmp_path / "model.pt2"
    write(trained_model(f"{tmp_path / 'run'}@7", "raw"), path)
    found = {METADATA: ""}
    model = torch.export.load(path, extra_files=found).module()
    for num in (1, 3):
        images = torch.rand(num, 1, 28, 28) - 0.5
        assert np.array_equal(model(images).numpy(), state.model(images).detach().numpy())
    assert json.loads(found[METADATA]) == {"step": "7", "recipe": "mnist", "weights": "raw"}
    assert str(Path(ls.__file__).parent).encode() not in path.read_bytes()


def test_safetensors_have_the_names_of_the_model_and_say_where_they_come_from(
    run: tuple[Path, ls.TrainState], tmp_path: Path
) -> None:
    folder, state = run
    write(trained_model(str(folder), "average"), tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"step": "7", "recipe": "mnist", "weights": "average"}
        assert set(file.keys()) == state.model.state_dict().keys()


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'onnx'"), RuntimeError("made for NumPy 1")])
def test_export_names_missing_or_broken_packages(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(export, "import_module", refuse)
    check_packages(".pt2")
    with pytest.raises(InputError, match=r"Files of ONNX cannot be written here") as caught:
        check_packages(".onnx")
    assert f"{type(error).__name__}: {error}" in str(caught.value)
    assert "pip install 'lockstep-train[onnx]'" in str(caught.value)


def test_a_model_too_large_for_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_MOST_ONNX_BYTES", 11)
    trained = Trained(nn.Linear(2, 1), torch.zeros(2, 2), 0, "tiny", "raw")
    with pytest.raises(InputError, match="too large for one file of ONNX") as caught:
        encode_model(trained, ".onnx")
    assert "12 bytes of weights" in str(caught.value)
