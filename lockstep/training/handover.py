"""One state that goes on where another one stands: the next stage of a run."""

from __future__ import annotations

import torch

from lockstep.training.attempt import LossScale
from lockstep.training.extra_state import extra_state, set_extra_state
from lockstep.training.state import TrainState


def hand_over(before: TrainState, after: TrainState) -> None:
    """Have a state that has made no step go on from where another one stands, with a model of the same kind.

    Parameters, buffers, extra state, averages, the step, smoothed losses, refusals and the loss scale go on. The slots
    of the optimizer stay fresh, and it counts its steps from here. A parameter that had no average begins it at its
    present value; one that is no longer trained has none.

    Args:
        before: stays as it is.
        after: shares no tensor with it; other parameters may be trained, by another optimizer.
    """
    old, new = before.sections(), after.sections()
    present = {**old["parameters"], **old["buffers"]}
    with torch.no_grad():
        for name, tensor in {**new["parameters"], **new["buffers"]}.items():
            tensor.copy_(present[name])
        for name, average in new["average"].items():
            average.copy_(old["average"].get(name, present[name]))
    set_extra_state(after.model, extra_state(before.model))
    after.step = after.first_step = before.step
    after.num_skipped = before.num_skipped
    after.loss_scale = LossScale(**before.loss_scale.values())
    after.smoothed.load(before.smoothed.values())
