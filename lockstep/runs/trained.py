"""The model of a run, with the weights of one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.checkpoints.store import Store
from lockstep.errors import InputError
from lockstep.evaluation.scores import Weights
from lockstep.recipes.recipe import Recipe
from lockstep.run_files import RECIPE
from lockstep.runs.workdir import Workdir, with_code_of_run
from lockstep.tensors import write_values
from lockstep.training.run_weights import RunWeights, open_weights
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.source import WeightSource

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Trained:
    """The model of a run at one step, on the CPU, in evaluation mode, its parameters without gradients."""

    model: nn.Module
    recipe: Recipe
    """The run's, with the settings of the stage that the step belongs to."""
    step: int
    weights: Weights
    workdir: Workdir


def trained_model(run: str, weights: Weights | None = None, *, allow_code: bool = False) -> Trained:
    """Build the model of a run, with the weights of a checkpoint.

    Args:
        run: the workdir, for its newest checkpoint that is intact; or `WORKDIR@STEP`.
        weights: the parameters as they are, or their moving averages, with those of statistics if the run averages
            them; None: as the recipe scores them.
        allow_code: call the code of a user's own that the recipe names, though others may have written the run.

    Raises:
        InputError: there is no run, or it keeps no averages.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    source = open_weights(run)
    workdir = Workdir(source.path.absolute().parent.parent)  # of checkpoints/step-00001000
    recipe = workdir.recipe() if workdir.holds_run else None
    if not isinstance(source, RunWeights) or recipe is None:
        raise InputError(
            f"{run} is no run with a trained model.",
            given=f"{source.path} ({source.kind})",
            expected=f"the workdir of a run (with a {RECIPE} and checkpoints), or WORKDIR@STEP",
            hint="name a workdir; `lockstep import checkpoint` makes .safetensors of other files",
        )
    from lockstep.runs.build import build_model
    from lockstep.runs.stages import recipe_at  # what is not there is refused before torch is loaded

    recipe = with_code_of_run(recipe, workdir.path, allow_code=allow_code)
    weights = weights or recipe.evaluate.weights
    model = build_model(recipe)
    take_weights(model, source, average=weights == "average")
    checkpoint = Store(source.path.parent).read(source.step) if recipe.stages else None
    at_stage = recipe_at(recipe, checkpoint) if checkpoint else recipe  # its images may have another size
    return Trained(model.eval().requires_grad_(False), at_stage, source.step, weights, workdir)


def take_weights(model: nn.Module, source: WeightSource, *, average: bool) -> None:
    """Load all parameters and buffers from a checkpoint of the model's own run, which must have no others."""
    averaged = {name.removesuffix(AVERAGE) for name in source.tensors if name.endswith(AVERAGE)} if average else set()
    if average and not averaged:
        raise no_averages("This run")
    from lockstep.training.saved_state import check_compatible

    names = [name for name in source.tensors if not name.endswith(AVERAGE)]
    values = {name: source.read(name + AVERAGE if name in averaged else name) for name in names}
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_compatible({"model": own}, {"model": values})
    with torch.no_grad():
        for name, tensor in own.items():
            write_values(tensor, values[name])


def no_averages(run: str) -> InputError:
    """Make the error for averages that a run does not keep."""
    return InputError(
        f"{run} keeps no averages of its parameters.",
        given='averaged weights (--average; in Python weights="average")',
        expected="a run whose recipe has an average",
        hint="take the raw ones (leave --average out), or train with an average: --set average.decay=0.9999",
    )
