"""Export the model of a run to a file that needs no Lockstep: safetensors, torch.export or ONNX."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from lockstep.checkpoints.encoding import encode_tensors
from lockstep.checkpoints.store import Store
from lockstep.errors import InputError
from lockstep.evaluation.scores import Weights
from lockstep.recipes.recipe import Recipe
from lockstep.runs.stages import recipe_at
from lockstep.runs.workdir import RECIPE, Workdir
from lockstep.training.run_weights import RunWeights, open_weights
from lockstep.training.saved_state import check_compatible
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.source import WeightSource

FORMATS = (".safetensors", ".pt2", ".onnx")
"""Endings of the file: the tensors alone, or the model with them."""
METADATA = "lockstep.json"
"""The file in a .pt2 that says where the model comes from."""
INPUT, OUTPUT = "images", "scores"
"""Names of the input and the output of a .onnx."""

_ONNX_PACKAGES = ("onnx", "onnxscript")
_MOST_ONNX_BYTES = 2**31 - 2**20  # the limit of a protobuf message, less room for the graph
_EXAMPLES_TRACED = 2  # with one, torch would take the size of the batch for a constant


@dataclass(frozen=True)
class Trained:
    """The model of a run at one step, on the CPU and in evaluation mode."""

    model: nn.Module
    example: Tensor
    """An input of the model; its first dimension is the batch, of any size."""
    step: int
    recipe: str
    """Its name."""
    weights: Weights

    @property
    def metadata(self) -> dict[str, str]:
        """The origin of the model, as it is written to the file."""
        return {"step": str(self.step), "recipe": self.recipe, "weights": self.weights}


def trained_model(run: str, *, average: bool) -> Trained:
    """Build the model of a run, with the weights of a checkpoint.

    Args:
        run: the workdir, for its newest checkpoint that is intact; or `WORKDIR@STEP`.
        average: take the moving averages of parameters, and of statistics if the run averages them.
    """
    source, recipe = _opened(run)
    model = recipe.model.build(recipe.seed)
    take_weights(model, source, average=average)
    weights: Weights = "average" if average else "raw"
    checkpoint = Store(source.path.parent).read(source.step) if recipe.stages else None
    at_stage = recipe_at(recipe, checkpoint) if checkpoint else recipe  # its images may have another size
    example = at_stage.data.blank(_EXAMPLES_TRACED)
    return Trained(model.eval(), example, source.step, recipe.name, weights)


def take_weights(model: nn.Module, source: WeightSource, *, average: bool) -> None:
    """Load all parameters and buffers from a checkpoint of the model's own run, which must have no others."""
    averaged = {name.removesuffix(AVERAGE) for name in source.tensors if name.endswith(AVERAGE)} if average else set()
    if average and not averaged:
        raise InputError(
            "This run keeps no averages of its parameters.",
            given="--average",
            expected="a run whose recipe has an average",
            hint="leave --average out, or train with one: --set average.decay=0.9999",
        )
    names = [name for name in source.tensors if not name.endswith(AVERAGE)]
    values = {name: source.read(name + AVERAGE if name in averaged else name) for name in names}
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_compatible({"model": own}, {"model": values})
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(values[name])


def check_packages(ending: str) -> None:
    """Refuse a format whose packages are not installed."""
    missing = [name for name in _ONNX_PACKAGES if ending == ".onnx" and find_spec(name) is None]
    if missing:
        raise InputError(
            "Files of ONNX cannot be written here.",
            given=f"not installed: {', '.join(missing)}",
            expected=f"the packages {' and '.join(_ONNX_PACKAGES)}",
            hint="pip install 'lockstep-train[onnx]'; or export a .pt2, which needs torch alone",
        )


def encode_model(trained: Trained, ending: str) -> Iterable[bytes | memoryview]:
    """Encode a model in one of the formats; returns the parts of the file."""
    if ending == ".safetensors":
        return encode_tensors(trained.model.state_dict(), trained.metadata)
    return [_pt2(trained) if ending == ".pt2" else _onnx(trained)]


def _pt2(trained: Trained) -> memoryview:
    file = io.BytesIO()
    with _quiet():
        torch.export.save(_program(trained), file, extra_files={METADATA: json.dumps(trained.metadata)})
    return file.getbuffer()


def _onnx(trained: Trained) -> bytes:
    num_bytes = sum(tensor.nbytes for tensor in trained.model.state_dict().values())
    if num_bytes > _MOST_ONNX_BYTES:
        raise InputError(
            "The model is too large for one file of ONNX.",
            given=f"{num_bytes:,} bytes of weights",
            expected=f"at most {_MOST_ONNX_BYTES:,}",
            hint="export a .pt2 or .safetensors",
        )
    with _quiet():
        made: Any = torch.onnx.export(
            _program(trained),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            external_data=False,
            verbose=False,
        )
    made.model.metadata_props.update(trained.metadata)
    data: bytes = made.model_proto.SerializeToString()
    return data


def _program(trained: Trained) -> ExportedProgram:
    """Trace the graph of the model, for batches of any size."""
    program = torch.export.export(trained.model, (trained.example,), dynamic_shapes=({0: Dim("batch")},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            # It names files of this machine, which must not leave it.
            node.meta.pop("stack_trace", None)
    return program


def _opened(run: str) -> tuple[RunWeights, Recipe]:
    source = open_weights(run)
    workdir = Workdir(source.path.absolute().parent.parent)  # of checkpoints/step-00001000
    recipe = workdir.recipe() if (workdir.path / RECIPE).is_file() else None
    if not isinstance(source, RunWeights) or recipe is None:
        raise InputError(
            f"{run} is no run whose model could be exported.",
            given=f"{source.path} ({source.kind})",
            expected=f"the workdir of a run (with a {RECIPE} and checkpoints), or WORKDIR@STEP",
            hint="name a workdir; `lockstep import checkpoint` makes .safetensors of other files",
        )
    return source, recipe


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about optional packages and deprecated parts of its own."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
