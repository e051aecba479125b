"""`lockstep import checkpoint`: weights of any system as a file of safetensors, in torch's names and layouts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.checkpoints.encoding import check_saveable, encode_tensors
from lockstep.cli.converting import size
from lockstep.cli.target_file import check_target
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.records.shards import check_local
from lockstep.screen import write_lines
from lockstep.training.run_weights import open_weights
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.averages import select_variables
from lockstep.weights.layouts import CONVOLUTION, CONVOLUTION_1D, CONVOLUTION_3D, DENSE, DEPTHWISE, Layout
from lockstep.weights.names import Destination, apply_renames
from lockstep.weights.source import TensorInfo, WeightSource
from lockstep.weights.warm_start import Target, WarmStart

_WEIGHT = ".weight"
# What TensorFlow's weights of so many axes are: those of a convolution, or of a dense layer.
_BY_AXES = {2: DENSE, 3: CONVOLUTION_1D, 4: CONVOLUTION, 5: CONVOLUTION_3D}


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Write the file, and what became of every tensor."""
    check_local(arguments.path)
    path = Path(arguments.to)
    what = "Weights are imported into a file of safetensors."
    check_target(path, [".safetensors"], what, overwrite=arguments.force)
    mapping = WarmStart(name_map=arguments.map, prefer_average=arguments.average)
    source = open_weights(arguments.path)
    planned = assign_tensors(source, targets(source, mapping), mapping)
    tensors = dict(planned.tensors(source))
    check_saveable({"weights": tensors})
    with atomic_write(path, failure=InputError) as file:
        for part in encode_tensors(tensors):
            file.write(part)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    report = str(planned.report.after(tensors))
    write_lines([*report.splitlines(), f"{path}: {len(tensors):,} tensors, {size(num_bytes)}"])
    return 0


def targets(source: WeightSource, mapping: WarmStart) -> dict[str, Target]:
    """What a model would have that takes all weights of a file: their names by the map, and torch's shapes."""
    tensors, _ = select_variables(source, prefer_average=mapping.prefer_average)
    infos = {variable: source.tensors[tensor] for variable, tensor in tensors.items()}
    variables = {
        name: info for name, info in infos.items() if isinstance(getattr(torch, info.dtype, None), torch.dtype)
    }
    places, _ = apply_renames({name: [Destination(name)] for name in variables}, mapping.resolved_map.renames)
    by_system = mapping.resolved_map.system == "tensorflow"
    return {
        place.name: _target(name, place, variables[name], by_system=by_system)
        for name, each in places.items()
        for place in each
    }


def _target(variable: str, place: Destination, info: TensorInfo, *, by_system: bool) -> Target:
    layout: Layout | None = place.layout
    if layout is None and by_system and place.name.endswith(_WEIGHT):
        layout = DEPTHWISE if "depthwise" in variable.rpartition("/")[2] else _BY_AXES.get(len(info.shape))
    shape = layout.shape(info.shape) if layout else None
    return Target(shape or info.shape, info.dtype, role="kernel" if shape else "table")
