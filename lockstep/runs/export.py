"""Export the model of a run to a file that needs no Lockstep: safetensors, torch.export or ONNX."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoints.encoding import encode_tensors
from lockstep.errors import InputError, LockstepError
from lockstep.recipes.tasks import Detection, network_input
from lockstep.runs.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMATS = (".safetensors", ".pt2", ".onnx")
"""Endings of the file: the tensors alone, or the model with them."""
METADATA = "lockstep.json"
"""The file in a .pt2 that says where the model comes from."""
INPUT, OUTPUT = "images", "scores"
"""Names of input and output in the .onnx of a classifier."""
IMAGE, FOUND = "image", ("boxes", "scores", "labels", "num_detections")
"""Names of input and outputs in the .onnx of a detector."""

_ONNX_PACKAGES = ("onnx", "onnxscript")
_MOST_ONNX_BYTES = 2**31 - 2**20  # the limit of a protobuf message, less room for the graph
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


def encode_model(trained: Trained, ending: str) -> Iterable[bytes | memoryview]:
    """Encode a model in one of the formats; returns the parts of the file."""
    if ending == ".safetensors":
        return encode_tensors(trained.model.state_dict(), _metadata(trained))
    return [_pt2(trained) if ending == ".pt2" else _onnx(trained)]


def _pt2(trained: Trained) -> memoryview:
    file = io.BytesIO()
    with _quiet():
        torch.export.save(_program(trained), file, extra_files={METADATA: json.dumps(_metadata(trained))})
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
    is_detector = isinstance(trained.recipe.chosen_task, Detection)
    with _quiet():
        made: Any = torch.onnx.export(
            _program(trained),
            dynamo=True,
            input_names=[IMAGE] if is_detector else [INPUT],
            output_names=[*FOUND] if is_detector else [OUTPUT],
            external_data=False,
            verbose=False,
        )
    made.model.metadata_props.update(_metadata(trained))
    data: bytes = made.model_proto.SerializeToString()
    return data


def _metadata(trained: Trained) -> dict[str, str]:
    """Return the origin of a model, as it is written to the file."""
    return {"step": str(trained.step), "recipe": trained.recipe.name, "weights": trained.weights}


def _program(trained: Trained) -> torch.export.ExportedProgram:
    task = trained.recipe.chosen_task
    if isinstance(task, Detection):
        program = _of_detector(trained, task)
    else:  # for batches of any size
        example = trained.recipe.data.blank(_EXAMPLES_TRACED)
        program = torch.export.export(trained.model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            # It names files of this machine, which must not leave it.
            node.meta.pop("stack_trace", None)
    return program


def _of_detector(trained: Trained, task: Detection) -> torch.export.ExportedProgram:
    """Trace a detector for one image of the size of the run's."""
    detector, image = _image_detector(trained.model), torch.zeros(3, *task.data.resizer.largest, dtype=torch.uint8)
    with torch.no_grad():
        detector(image)  # anchors are made once, and are constants of the graph
        try:
            return torch.export.export(detector, (image,))
        except LockstepError:
            raise
        except Exception as error:  # torch has no base of the errors of tracing
            raise InputError(
                f"The graph of {type(trained.recipe.model).__name__} cannot be traced: its shapes depend on the image.",
                given=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                expected="a detector of one stage",
                hint="export the tensors alone, as .safetensors; or detect with Lockstep: lockstep predict",
            ) from error


def _image_detector(model: nn.Module) -> nn.Module:
    """Make a module that detects on one image: uint8 (3, height, width), red, green and blue, as large as it is traced.

    It returns float32 boxes (n, 4) of top, left, bottom and right in pixels of that image, float32 scores (n,), int64
    labels (n,) from 1 on, and the number of them, int64; the best first, and below them rows of zeros up to the most
    that there may be.
    """
    from lockstep.detection.boxes import clip

    class ImageDetector(torch.nn.Module):  # its base is loaded when the first model is exported
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            detector: Any = self.model
            inputs = network_input(detector, image[None].float())
            (found,) = detector.postprocess(detector(inputs, None))
            height, width = image.shape[1:]
            return clip(found.boxes, (height, width)), found.scores, found.labels, (found.labels > 0).sum()

    return ImageDetector().eval()


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
