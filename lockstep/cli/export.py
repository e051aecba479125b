"""`lockstep export`: the model of a run as a file that plain torch, or ONNX Runtime, loads in two lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.converting import size
from lockstep.cli.target_file import check_target
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.records.shards import check_local
from lockstep.runs.export import FORMATS, check_packages, encode_model, trained_model
from lockstep.screen import write_lines


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Write the file, and one line that says what is in it."""
    check_local(arguments.run)
    path = Path(arguments.to)
    what = "A model is exported as .safetensors (tensors alone), .pt2 (torch.export) or .onnx."
    check_target(path, FORMATS, what, overwrite=arguments.force)
    check_packages(path.suffix)
    trained = trained_model(arguments.run, average=arguments.average)
    parts = encode_model(trained, path.suffix)
    with atomic_write(path, failure=InputError) as file:
        num_bytes = sum(file.write(part) for part in parts)
    weights = "averaged" if arguments.average else "raw"
    write_lines([f"{path}: {weights} weights of step {trained.step} of {trained.recipe}, {size(num_bytes)}"])
    return 0
