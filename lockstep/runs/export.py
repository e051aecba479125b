"""Export the model of a run to a file that needs no Lockstep: safetensors, torch.export or ONNX."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from lockstep.checkpoints.encoding import encode_tensors
from lockstep.checks import Checked, PositiveInt
from lockstep.errors import InputError, LockstepError
from lockstep.recipes.tasks import Detection
from lockstep.runs.trained import Trained
from lockstep.screen import log

FORMATS = (".safetensors", ".pt2", ".onnx")
"""Endings of the file: the tensors alone, or the model with them."""
METADATA = "lockstep.json"
"""The file in a .pt2 that says where the model comes from."""
INPUT, OUTPUT = "images", "scores"
"""Names of inputs in batches, and of the output of a classifier, in a .onnx."""
IMAGE = "image"
"""Name of the input in the .onnx of a detector of one image; its outputs have the names of `DetectorGraph.found`."""

_ONNX_PACKAGES = ("onnx", "onnxscript")
_MOST_ONNX_BYTES = 2**31 - 2**20  # the limit of a protobuf message, less room for the graph
_SIZE_TRACED = (73, 97)  # of images of any size: none that means something to a network
_EXAMPLES_TRACED = 2  # with one, torch would take the size of the batch for a constant


def check_packages(ending: str) -> None:
    """Refuse a format whose packages are not installed, or cannot be imported."""
    for name in _ONNX_PACKAGES if ending == ".onnx" else ():
        try:
            import_module(name)
        except Exception as error:  # one that does not fit the others fails in many ways
            raise InputError(
                "Files of ONNX cannot be written here.",
                given=f"{type(error).__name__}: {error}",
                expected=f"the packages {' and '.join(_ONNX_PACKAGES)}",
                hint="pip install 'lockstep-train[onnx]'; or export a .pt2, which needs torch alone",
            ) from error


@dataclass(frozen=True)
class ImagesOfGraph(Checked):
    """The images that an exported detector takes."""

    batch: bool = False
    """Images of one size, (batch, 3, height, width), and not one alone."""
    raw: bool = False
    """Images as they are stored, which the graph resizes, and whose pixels the boxes are in; else resized ones."""
    size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width of the raw images; None: any."""


def encode_model(
    trained: Trained, ending: str, images: ImagesOfGraph = ImagesOfGraph()
) -> Iterable[bytes | memoryview]:
    """Encode a model in one of the formats; returns the parts of the file.

    Raises:
        InputError: the images are said of what is no graph of a detector; or the model cannot be traced.
    """
    if images != ImagesOfGraph() and (
        ending == ".safetensors" or not isinstance(trained.recipe.chosen_task, Detection)
    ):
        raise InputError(
            "Only of the graph of a detector it is said what images it takes.",
            given=f"{images} for a {ending} of {type(trained.recipe.model).__name__}",
            expected="the run of a detector, as .pt2 or .onnx",
            hint="leave --raw-images and --batch out; graphs of classifiers take batches of any size",
        )
    if ending == ".safetensors":
        return encode_tensors(trained.model.state_dict(), _metadata(trained))
    trained = _of_whole_numbers(trained, for_onnx=ending == ".onnx")
    return [_pt2(trained, images) if ending == ".pt2" else _onnx(trained, images)]


def _of_whole_numbers(trained: Trained, *, for_onnx: bool) -> Trained:
    """Return the model with int8 weights, if it was trained for that; else as it is."""
    # What is not there is refused before torch is loaded.
    from lockstep.models.quantization import quantizer_of
    from lockstep.runs.build import blank_input
    from lockstep.runs.integer_graph import integer_network

    if quantizer_of(trained.model) is None:
        return trained
    blank = blank_input(trained.recipe, trained.model, _EXAMPLES_TRACED)
    return replace(trained, model=integer_network(trained.model, blank, for_onnx=for_onnx))


def _pt2(trained: Trained, images: ImagesOfGraph) -> memoryview:
    file = io.BytesIO()
    with _quiet():
        torch.export.save(_program(trained, images)[0], file, extra_files={METADATA: json.dumps(_metadata(trained))})
    return file.getbuffer()


def _onnx(trained: Trained, images: ImagesOfGraph) -> bytes:
    num_bytes = sum(tensor.nbytes for tensor in trained.model.state_dict().values())
    if num_bytes > _MOST_ONNX_BYTES:
        raise InputError(
            "The model is too large for one file of ONNX.",
            given=f"{num_bytes:,} bytes of weights",
            expected=f"at most {_MOST_ONNX_BYTES:,}",
            hint="export a .pt2 or .safetensors",
        )
    is_detector = isinstance(trained.recipe.chosen_task, Detection)
    with _quiet():
        program, names = _program(trained, images)
        made: Any = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[IMAGE] if is_detector and not images.batch else [INPUT],
            output_names=names,
            external_data=False,
            verbose=False,
        )
    made.model.metadata_props.update(_metadata(trained))
    data: bytes = made.model_proto.SerializeToString()
    return data


def _metadata(trained: Trained) -> dict[str, str]:
    return {"step": str(trained.step), "recipe": trained.recipe.name, "weights": trained.weights}


def _program(trained: Trained, images: ImagesOfGraph) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Trace a model; returns also the names of its outputs."""
    task = trained.recipe.chosen_task
    if isinstance(task, Detection):
        program, names = _of_detector(trained, task, images)
    else:  # for batches of any size
        example, names = trained.recipe.data.blank(_EXAMPLES_TRACED), [OUTPUT]
        program = torch.export.export(trained.model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            # It names files of this machine, which must not leave it.
            node.meta.pop("stack_trace", None)
    return program, names


def _of_detector(
    trained: Trained, task: Detection, images: ImagesOfGraph
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Trace a detector for images of the size of the run's, of one given, or of any."""
    from lockstep.runs.detector_graph import DetectorGraph  # a module of torch's, which loads it

    resizer = task.data.resizer
    detector = DetectorGraph(trained.model, resizer, batch=images.batch, raw=images.raw, size=images.size)
    size = images.size or (_SIZE_TRACED if images.raw else resizer.largest)
    axes = [(0, "batch")] * images.batch + [(-2, "height"), (-1, "width")] * (images.raw and images.size is None)
    if images.raw and images.size is None and resizer.resize_method == "area":
        raise InputError(
            "A graph resizes images of any size by all methods but area.",
            given='resize_method="area", and raw images of any size',
            expected="the size of the images",
            hint="name it: --raw-images 480x640",
        )
    if not (resizer.has_one_shape or images.size):
        log.warning(
            "the network of the graph sees a square of %d pixels, zeros below the image or at its right, and lockstep "
            "predict the image alone: near its edges boxes and scores are somewhat others. --raw-images HEIGHTxWIDTH "
            "exports the graph for images of one size, which finds the same",
            resizer.largest[0],
        )
    example = torch.zeros(*[_EXAMPLES_TRACED] * images.batch, 3, *size, dtype=torch.uint8)
    free = {axis % example.dim(): torch.export.Dim(name) for axis, name in axes}
    with torch.no_grad():
        names = [*detector.found(example)]  # anchors are made once, and are constants of the graph
        try:
            return torch.export.export(detector, (example,), dynamic_shapes=(free,)), names
        except LockstepError:
            raise
        except Exception as error:  # torch has no base of the errors of tracing
            raise InputError(
                f"The graph of {type(trained.recipe.model).__name__} cannot be traced: its shapes depend on the image.",
                given=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                expected="a detector of Lockstep's own, or one whose shapes are fixed",
                hint="export the tensors alone, as .safetensors; or detect with Lockstep: lockstep predict",
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
