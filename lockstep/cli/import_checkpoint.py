"""`lockstep import checkpoint`: write weights of any system as safetensors, in torch's names and layouts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.shared import Command, check_target, format_size
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.reporting.work import show_progress
from lockstep.screen import write_lines

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.weights.layouts import Layout
    from lockstep.weights.names import Destination
    from lockstep.weights.source import TensorInfo, WeightSource
    from lockstep.weights.warm_start import Target, WarmStart

_WEIGHT = ".weight"


def _add_arguments(importing: argparse.ArgumentParser) -> None:
    importing.add_argument("path", help="weights of any supported system, or a run (or run@STEP)")
    importing.add_argument("--to", required=True, metavar="FILE", help="the file of safetensors")
    importing.add_argument("--average", action="store_true", help="take moving averages where there are some")
    importing.add_argument(
        "--map", metavar="NAME", help="give TensorFlow's weights torch's names and layouts: tensorflow, mnist, ..."
    )
    importing.add_argument("--force", action="store_true", help="overwrite the file")


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the file, and what became of every tensor."""
    from lockstep.checkpoints.encoding import check_saveable, encode_tensors
    from lockstep.records.shards import check_local
    from lockstep.training.run_weights import open_weights
    from lockstep.weights.assignment import assign_tensors
    from lockstep.weights.warm_start import WarmStart

    check_local(arguments.path)
    path = Path(arguments.to)
    what = "Weights are imported into a file of safetensors."
    check_target(path, [".safetensors"], what, overwrite=arguments.force)
    mapping = WarmStart(name_map=arguments.map, prefer_average=arguments.average)
    source = open_weights(arguments.path)
    planned = assign_tensors(source, targets(source, mapping), mapping)
    tensors: dict[str, Tensor] = {}
    with show_progress(f"importing {source.path}") as show:
        for name, tensor in planned.tensors(source):
            tensors[name] = tensor
            show(len(tensors), len(planned.report.loaded))
    check_saveable({"weights": tensors})
    with atomic_write(path, failure=InputError) as file:
        for part in encode_tensors(tensors):
            file.write(part)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    report = str(planned.report.after(tensors))
    write_lines([*report.splitlines(), f"{path}: {len(tensors):,} tensors, {format_size(num_bytes)}"])
    return 0


def targets(source: WeightSource, mapping: WarmStart) -> dict[str, Target]:
    """Return the parameters of a model that takes all weights of a file: named by the map, in torch's shapes."""
    import torch

    from lockstep.weights.assignment import select_variables
    from lockstep.weights.names import Destination, apply_renames

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
    from lockstep.weights.layouts import CONVOLUTION, CONVOLUTION_1D, CONVOLUTION_3D, DENSE, DEPTHWISE
    from lockstep.weights.warm_start import Target

    # A weight of TensorFlow is that of a dense layer, or of a convolution, by its number of axes.
    by_axes = {2: DENSE, 3: CONVOLUTION_1D, 4: CONVOLUTION, 5: CONVOLUTION_3D}
    layout: Layout | None = place.layout
    if layout is None and by_system and place.name.endswith(_WEIGHT):
        layout = DEPTHWISE if "depthwise" in variable.rpartition("/")[2] else by_axes.get(len(info.shape))
    shape = layout.shape(info.shape) if layout else None
    return Target(shape or info.shape, info.dtype, role="kernel" if shape else "table")


COMMAND = Command("weights of any system, as a file of safetensors", _add_arguments, _run)
