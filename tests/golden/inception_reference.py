"""The recorded runs of TF-Slim's Inception-v3, ready to be repeated with ours (see make_inception_golden.py).

recorded = recorded_run("float64")
state = reference_state(net, recorded.shapes, inputs.RUNS["float64"])
losses = train(state, inputs.RUNS["float64"])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import inception_inputs as inputs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import lockstep as ls
from lockstep.models.inception_v3 import InceptionV3, InceptionV3Net
from lockstep.optim import Exponential, MovingAverage, RMSProp
from lockstep.recipes.parts import CrossEntropy
from lockstep.recipes.tasks import Classification
from lockstep.towers.towers import Variance
from lockstep.weights.name_maps import SLIM_INCEPTION_V3
from lockstep.weights.names import Destination, apply_renames

MAPPING = ls.weights.WarmStart(name_map="slim_inception_v3", require_loaded=1.0)
TASK = Classification(
    lambda batch: batch["image"],
    CrossEntropy(label_smoothing=inputs.LABEL_SMOOTHING, auxiliary_weight=inputs.AUXILIARY_WEIGHT),
)


class Recorded(NamedTuple):
    """One of the runs in `training.npz`."""

    shapes: Mapping[str, Sequence[int]]
    """Of the variables, in TensorFlow's layout, by their names, in the order of the sketches."""
    num_penalties: int
    losses: npt.NDArray[np.float64]
    """Cross entropy, that of the auxiliary logits, penalty: before the update of each step."""
    changes: npt.NDArray[np.float64]
    """A sketch (see `inception_inputs.sketch`) of what the run added to each variable."""
    average_changes: npt.NDArray[np.float64]
    """The same for the moving averages, which began with the variables' values."""


def recorded_run(name: str) -> Recorded:
    with np.load(inputs.FIXTURES / "training.npz", allow_pickle=False) as file:
        values = {each.removeprefix(f"{name}/"): file[each] for each in file.files if each.startswith(f"{name}/")}
    shapes = json.loads(str(values.pop("variables")))
    return Recorded(shapes, int(values.pop("num_penalties")), **values)


def shrunken_net(**settings: Any) -> InceptionV3Net:
    """Ours with as few filters as TF-Slim's has here: fewer than the 16 that both keep in use."""
    shrunken = {"depth_multiplier": inputs.DEPTH_MULTIPLIER, "min_depth": inputs.MIN_DEPTH}
    return InceptionV3(**{"num_classes": inputs.NUM_CLASSES, "dropout": 0.0, **shrunken, **settings}).build(seed=0)


def reference_state(net: InceptionV3Net, shapes: Mapping[str, Sequence[int]], run: inputs.Run) -> ls.TrainState:
    """What the run began with: the reference trainer's update, and the weights that TF-Slim's net was given."""
    rate = Exponential(run.learning_rate, inputs.DECAY_STEPS, inputs.DECAY_FACTOR)
    state = ls.TrainState(
        net.to(getattr(torch, run.dtype)),
        RMSProp(rate, inputs.RMSPROP_DECAY, inputs.RMSPROP_EPSILON, momentum=inputs.RMSPROP_MOMENTUM),
        regularization=[ls.losses.L2(inputs.L2_WEIGHT)],
        average=MovingAverage(inputs.AVERAGE_DECAY, statistics=True),
    )
    ls.warm_start(state, inputs.weights(shapes, run.start, run.dtype), MAPPING)
    return state


def towers_of(run: inputs.Run) -> ls.Towers:
    """As in TensorFlow: fused batch norm, for float32 alone, keeps a corrected variance, and the other one does not."""
    variance: Variance = "unbiased" if run.dtype == "float32" else "biased"
    return ls.Towers(run.num_towers, batch_norm="last", variance=variance)


def train(state: ls.TrainState, run: inputs.Run, towers: ls.Towers | None = None) -> npt.NDArray[np.float64]:
    """Cross entropy, that of the auxiliary logits, and penalty, of each step; on the run's own towers by default."""
    towers, losses = towers or towers_of(run), []
    for step, (images, labels) in enumerate(inputs.batches(run)):
        size = len(labels)
        fields = {"image": as_ours(images), "label": torch.from_numpy(labels)}
        batch = ls.Batch(fields, position=step * size, batch_size=size, towers=range(run.num_towers))
        report = ls.train_step(state, TASK.losses, batch, towers)
        losses.append([report.losses[name] for name in ("cross_entropy", "auxiliary_cross_entropy", "l2")])
    return np.array(losses)


def as_ours(images: inputs.Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def changes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], run: inputs.Run
) -> npt.NDArray[np.float64]:
    """Sketches of what was added to the values that each variable began with, in the order of the variables."""
    initial = inputs.weights(shapes, run.start, run.dtype)
    places, _ = apply_renames({name: [Destination(name)] for name in shapes}, SLIM_INCEPTION_V3.renames)
    ours = {name: _to_reference(tensors[places[name][0].name], shape) for name, shape in shapes.items()}
    return np.stack([inputs.sketch(value - initial[name]) for name, value in ours.items()])


def _to_reference(tensor: Tensor, shape: Sequence[int]) -> inputs.Array:
    """A tensor of ours in TensorFlow's layout: kernels (height, width, in, out)."""
    array: inputs.Array = tensor.detach().numpy()
    if array.ndim == 1:
        return array
    array = array.reshape(*array.shape, *[1] * (4 - array.ndim)).transpose(2, 3, 1, 0)
    if array.shape[:2] == (5, 5) and shape[0] == 1:  # TF-Slim makes the auxiliary head's 1x1, for a map of 1x1
        border = np.delete(array.reshape(25, -1), 12, axis=0)
        assert not border.any(), "the border of the auxiliary kernel was idle, and has changed"
        return array[2:3, 2:3]
    return array
