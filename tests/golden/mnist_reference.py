"""The recorded runs of the reference MNIST net, ready to be repeated in torch.

    run = golden_run("two_towers_float64")
    net, batches = reference_net(run), reference_batches(run)
    ...train net on batches, as run.num_towers, run.learning_rate and run.momentum say...
    check_losses(run, losses)
    check_weights(run, net)

The recording is TensorFlow's (make_mnist_golden.py); its images are MNIST's, licensed CC BY-SA 3.0.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mnist_inputs as inputs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lockstep.models.mnist import MnistNet

Float64s = npt.NDArray[np.float64]

HERE = Path(__file__).parent
LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
FIRST_LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
# Of a gradient, and of the way that a parameter has gone, relative to its norm. In float32 one ReLU that rounding
# turns on or off on the way moves a small layer by 1e-4 and the losses by less than 1e-6.
GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
CHANGE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class GoldenRun:
    """The settings of a recorded run and what was recorded; its momentum is Nesterov's, its rate constant."""

    dtype: torch.dtype
    num_towers: int
    learning_rate: float
    momentum: float
    lrn: bool
    clip_norm: float | None
    """The largest norm of one parameter's gradient; longer ones are scaled down, each parameter for itself."""
    initial_weights_sha256: str
    losses: Float64s
    """Mean cross entropy by step and tower, shape (steps, towers), before the step's update."""
    first_gradients: Mapping[str, Any]
    """Sum, norm and sampled values of the first step's gradients (mean over towers), by TensorFlow's names."""
    weight_changes: Mapping[str, Any]
    """The same of final minus initial weights."""

    @property
    def mean_losses(self) -> Float64s:
        """The objective at each step: the mean over towers, shape (steps,)."""
        return self.losses.mean(axis=1)


def golden(name: str) -> dict[str, Any]:
    """A recording, as it lies in the file."""
    file = (HERE / name).read_bytes()
    recording: dict[str, Any] = json.loads(gzip.decompress(file) if name.endswith(".gz") else file)
    return recording


def golden_run(name: str) -> GoldenRun:
    """The recorded run of that name."""
    run = golden("mnist_golden.json.gz")["runs"][name]
    given = {**run, "dtype": getattr(torch, run["dtype"]), "losses": np.array(run["losses"])}
    return GoldenRun(momentum=inputs.MOMENTUM, **given)


def reference_net(run: GoldenRun) -> MnistNet:
    """Our net in the run's dtype, with the weights that the run began with."""
    weights = inputs.initial_weights(_name(run.dtype))
    assert inputs.digest(weights) == run.initial_weights_sha256, "these are not the weights that TensorFlow was given"
    net = MnistNet(lrn=run.lrn).to(run.dtype)
    net.load_state_dict({_our_name(name): _to_torch(name, value) for name, value in weights.items()})
    return net


def reference_batches(run: GoldenRun) -> list[tuple[Tensor, Tensor]]:
    """Images (32, 1, 28, 28) and labels (32,) of each step; tower t of T takes the t-th of T equal parts."""
    images, labels = inputs.batches(_name(run.dtype))
    batches = [
        (torch.from_numpy(i).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(k))
        for i, k in zip(images, labels, strict=True)
    ]
    return [batches[step % len(batches)] for step in range(len(run.losses))]


def check_losses(run: GoldenRun, losses: npt.ArrayLike) -> None:
    """Fail unless the losses are the recorded ones: shape (steps, towers), or (steps,) of means over towers."""
    given = np.asarray(losses, dtype=np.float64)
    errors = np.abs(given - (run.losses if given.ndim == 2 else run.mean_losses))
    assert errors[0].max() <= FIRST_LOSS_TOLERANCE[run.dtype], errors
    assert errors.max() <= LOSS_TOLERANCE[run.dtype], errors


def check_first_gradients(run: GoldenRun, gradients: Mapping[str, Tensor]) -> None:
    """Fail unless the gradients of step 1, by our parameter names, are the recorded ones."""
    values = {name: _to_reference(name, gradient) for name, gradient in gradients.items()}
    _compare(run.first_gradients, values, GRADIENT_TOLERANCE[run.dtype])


def check_weights(run: GoldenRun, net: nn.Module) -> None:
    """Fail unless the weights went from their initial values where TensorFlow's went."""
    initial = inputs.initial_weights(_name(run.dtype))
    final = {name: _to_reference(name, value) for name, value in net.state_dict().items()}
    changes = {name: value - initial[_reference_name(name)].astype(np.float64) for name, value in final.items()}
    _compare(run.weight_changes, changes, CHANGE_TOLERANCE[run.dtype])


def _compare(recorded: Mapping[str, Any], given: Mapping[str, Float64s], tolerance: float) -> None:
    assert {_reference_name(name) for name in given} == set(recorded)
    for name, value in given.items():
        expected, flat = recorded[_reference_name(name)], value.ravel()
        allowed = tolerance * expected["norm"]
        assert abs(np.linalg.norm(flat) - expected["norm"]) <= allowed, name
        # A sum of n errors of one size and random sign grows with the root of n, as the norm does.
        assert abs(flat.sum() - expected["sum"]) <= allowed * np.sqrt(flat.size), name
        assert np.abs(flat[inputs.sampled_indices(flat.size)] - expected["sampled"]).max() <= allowed, name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _our_name(reference_name: str) -> str:
    return reference_name.replace("/weights", ".weight").replace("/biases", ".bias")


def _reference_name(our_name: str) -> str:
    return our_name.replace(".weight", "/weights").replace(".bias", "/biases")


def _to_torch(reference_name: str, value: npt.NDArray[Any]) -> Tensor:
    """A parameter of TensorFlow as ours.

    Kernels (height, width, in, out) become (out, in, height, width), matrices are transposed. The rows of local3's
    matrix follow the features that are flattened: (7, 7, 64) there, (64, 7, 7) here, so they change places too.
    """
    if reference_name == "local3/weights":
        value = value.reshape(7, 7, 64, -1).transpose(2, 0, 1, 3).reshape(value.shape)
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[value.ndim]
    return torch.from_numpy(np.ascontiguousarray(value.transpose(axes)))


def _to_reference(our_name: str, value: Tensor) -> Float64s:
    """A parameter of ours, or what has its shape, in TensorFlow's layout and in float64: the way back."""
    array = value.detach().to(torch.float64).numpy()
    array = array.transpose({4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[array.ndim])
    if our_name == "local3.weight":
        array = array.reshape(64, 7, 7, -1).transpose(1, 2, 0, 3).reshape(array.shape)
    return array
