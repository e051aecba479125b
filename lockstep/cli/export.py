"""`lockstep export`: write the model of a run as a file that plain torch, or ONNX Runtime, loads in two lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.shared import Command, check_target, format_size
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.reporting.work import show_elapsed
from lockstep.screen import write_lines


def _add_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN[@STEP]", help="the folder of a run, and a step (default: the newest)")
    export.add_argument("--to", required=True, metavar="FILE", help="model.safetensors, model.pt2 or model.onnx")
    export.add_argument("--average", action="store_true", help="export the moving averages of the parameters")
    export.add_argument("--force", action="store_true", help="overwrite the file")


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the file, and one line that says what is in it."""
    from lockstep.records.shards import check_local
    from lockstep.runs.export import FORMATS, check_packages, encode_model
    from lockstep.runs.trained import trained_model

    check_local(arguments.run)
    path = Path(arguments.to)
    what = "A model is exported as .safetensors (tensors alone), .pt2 (torch.export) or .onnx."
    check_target(path, FORMATS, what, overwrite=arguments.force)
    check_packages(path.suffix)
    trained = trained_model(arguments.run, "average" if arguments.average else "raw")
    with show_elapsed(f"exporting to {path}"):
        parts = encode_model(trained, path.suffix)
        with atomic_write(path, failure=InputError) as file:
            num_bytes = sum(file.write(part) for part in parts)
    weights = "averaged" if arguments.average else "raw"
    write_lines(
        [f"{path}: {weights} weights of step {trained.step} of {trained.recipe.name}, {format_size(num_bytes)}"]
    )
    return 0


COMMAND = Command("write the model of a run as a file that needs no Lockstep", _add_arguments, _run)
