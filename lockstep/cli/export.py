"""`lockstep export`: write the model of a run as a file that plain torch, or ONNX Runtime, loads in two lines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.shared import Command, add_json_argument, add_weights_arguments, check_target, write_found
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.listing import format_size
from lockstep.reporting.console import show_elapsed

_ANY = "any"


def _add_arguments(export: argparse.ArgumentParser) -> None:
    add_weights_arguments(export)
    export.add_argument("--to", required=True, metavar="FILE", help="model.safetensors, model.pt2 or model.onnx")
    export.add_argument(
        "--raw-images",
        nargs="?",
        const=_ANY,
        metavar="HEIGHTxWIDTH",
        help="of a detector: the graph resizes images of any size, or of this one, and boxes are in their pixels",
    )
    export.add_argument("--batch", action="store_true", help="of a detector: it takes many images of one size at once")
    add_json_argument(export)
    export.add_argument("--force", action="store_true", help="overwrite the file")


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from lockstep.cli.given_run import chosen_run
    from lockstep.runs.export import FORMATS, ImagesOfGraph, check_packages, encode_model
    from lockstep.runs.trained import trained_model

    path = Path(arguments.to)
    what = "A model is exported as .safetensors (tensors alone), .pt2 (torch.export) or .onnx."
    check_target(path, FORMATS, what, overwrite=arguments.force)
    check_packages(path.suffix)
    raw = arguments.raw_images
    images = ImagesOfGraph(arguments.batch, raw is not None, None if raw in (None, _ANY) else _size(raw))
    run = chosen_run(arguments)
    trained = trained_model(run.name, run.weights, allow_code=arguments.allow_code)
    with show_elapsed(f"exporting to {path}"):
        parts = encode_model(trained, path.suffix, images)
        with atomic_write(path, failure=InputError) as file:
            num_bytes = sum(file.write(part) for part in parts)
    recipe, step, weights = trained.recipe.name, trained.step, trained.weights
    facts = {"file": str(path), "bytes": num_bytes, "recipe": recipe, "step": step, "weights": weights}
    text = f"{path}: {weights} weights of step {step} of {recipe}, {format_size(num_bytes)}"
    write_found(arguments, facts, [text])
    return 0


def _size(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", text):
        raise InputError(
            "This is no size of images.",
            given=f"--raw-images {text}",
            expected="height and width in pixels",
            hint="--raw-images 480x640; for images of any size name no size, and write the flag after the run",
        )
    height, width = text.split("x")
    return int(height), int(width)


COMMAND = Command("write the model of a run as a file that needs no Lockstep", _add_arguments, _run)
