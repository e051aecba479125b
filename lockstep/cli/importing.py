"""`lockstep import`: write what other systems have made in the formats of this one.

Weights become safetensors in torch's names and layouts, a pipeline.config becomes a recipe with a table of its fields.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.shared import Command, add_json_argument, check_target, write_found
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.listing import format_size, hint_for_path
from lockstep.reporting.console import show_progress

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.recipes.messages import Row
    from lockstep.recipes.pipeline_config import Imported
    from lockstep.weights.layouts import Layout
    from lockstep.weights.names import Destination
    from lockstep.weights.source import TensorInfo, WeightSource
    from lockstep.weights.warm_start import Target, WarmStart

_WEIGHT = ".weight"


def _add_checkpoint_arguments(importing: argparse.ArgumentParser) -> None:
    importing.add_argument("path", help="weights of any supported system, or a run (or run@STEP)")
    importing.add_argument("--to", required=True, metavar="FILE", help="the file of safetensors")
    importing.add_argument("--average", action="store_true", help="take moving averages where there are some")
    importing.add_argument(
        "--map", metavar="NAME", help="give TensorFlow's weights torch's names and layouts: tensorflow, mnist, ..."
    )
    importing.add_argument("--force", action="store_true", help="overwrite the file")


def _import_checkpoint(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from lockstep.checkpoints.encoding import check_saveable, encode_tensors
    from lockstep.training.run_weights import open_weights
    from lockstep.weights.assignment import assign_tensors
    from lockstep.weights.warm_start import WarmStart

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
    done = planned.report.after(tensors)
    facts = {"file": str(path), "tensors": len(tensors), "bytes": num_bytes, "report": done.as_json()}
    text = f"{path}: {len(tensors):,} tensors, {format_size(num_bytes)}"
    write_found(arguments, facts, [*str(done).splitlines(), text])
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


_CHECKPOINT = Command("weights of any system, as a file of safetensors", _add_checkpoint_arguments, _import_checkpoint)


_LONGEST_FILE = 1 << 20
_LONGEST_VALUE = 32
_FATES = {"mapped": "mapped", "no effect": "without effect here", "not mapped": "not mapped"}
_HEAD = ("line", "field", "value")


def _add_pipeline_arguments(importing: argparse.ArgumentParser) -> None:
    importing.add_argument("path", type=Path, metavar="FILE", help="the pipeline.config, in the text format")
    importing.add_argument(
        "--to", required=True, type=Path, metavar="RECIPE", help="the recipe's file, which ends in .toml"
    )
    importing.add_argument("--force", action="store_true", help="overwrite the file")
    importing.add_argument(
        "--substitute-model",
        action="store_true",
        help="take the nearest feature extractor where that of the config is not there, and train in floating point "
        "and without context; the report says which",
    )


def _import_pipeline(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from lockstep.recipes.fields import explained_toml
    from lockstep.recipes.pipeline_config import import_pipeline

    path, target = arguments.path, arguments.to
    what = "A pipeline.config is imported as a recipe, a file of TOML."
    check_target(target, [".toml"], what, overwrite=arguments.force)
    name = path.name.removesuffix(path.suffix)
    made = import_pipeline(_text(path), str(path), name, substitute_model=arguments.substitute_model)
    with atomic_write(target, failure=InputError) as file:
        file.write(explained_toml(made.recipe).encode())
    counts = Counter[str](row.outcome.fate for row in made.rows)
    rows = [
        {"line": row.place.line, "field": row.field, "value": row.value, **asdict(row.outcome)} for row in made.rows
    ]
    refused = made.refusal and str(made.refusal)
    facts = {"file": str(target), "fields": rows, "substituted": dict(made.substitutes), "refused": refused}
    summary = ", ".join(f"{counts[fate]} {words}" for fate, words in _FATES.items())
    write_found(arguments, facts, [*_table(made.rows), f"{target}: {len(made.rows)} fields, {summary}", *_more(made)])
    return 0


def _more(made: Imported) -> Iterator[str]:
    if made.substitutes:
        fields = (f"{path}={value}" for path, value in made.substitutes.items())
        yield f"substituted: {', '.join(fields)}"
    if made.refusal:
        yield from f"`lockstep train` refuses it: {made.refusal}".splitlines()


def _text(path: Path) -> str:
    from lockstep.records.shards import check_local

    check_local(path)
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)  # a device has no size, and no end
        if len(content) > _LONGEST_FILE:
            raise InputError(
                f"{path} is no pipeline.config.",
                given=f"more than {_LONGEST_FILE:,} bytes",
                expected=f"at most {_LONGEST_FILE:,} bytes of text",
                hint="name the config, not a model",
            )
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read.",
            given=getattr(error, "strerror", None) or str(error),
            expected="a pipeline.config, in the text format of protocol buffers",
            hint=hint_for_path(path) if not path.exists() else "check the path, and who may read it",
        ) from error


def _table(rows: Sequence[Row]) -> Iterator[str]:
    cells = [(str(row.place.line), f"  {row.name}", _short(row.value)) for row in rows]
    line, name, value = (max(map(len, column)) for column in zip(_HEAD, *cells, strict=True))
    yield f"{_HEAD[0]:>{line}}  {_HEAD[1]:{name}}  {_HEAD[2]:{value}}  becomes"
    within = ""
    for row, (number, field, given) in zip(rows, cells, strict=True):
        if row.within != within:
            within = row.within
            yield f"{'':{line}}  {within}"
        fate = "" if row.outcome.fate == "mapped" else f"{row.outcome.fate}: "
        yield f"{number:>{line}}  {field:{name}}  {given:{value}}  {fate}{row.outcome.text}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."


_PIPELINE = Command(
    "a pipeline.config of TensorFlow's Object Detection API, as a recipe", _add_pipeline_arguments, _import_pipeline
)


KINDS = {"checkpoint": _CHECKPOINT, "pipeline": _PIPELINE}


def _add_arguments(importing: argparse.ArgumentParser) -> None:
    kinds = importing.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, kind in KINDS.items():
        parser = kinds.add_parser(name, help=kind.help, description=f"Import {kind.help}.")
        kind.add_arguments(parser)
        add_json_argument(parser)


COMMAND = Command(
    "make a recipe, or a file of weights, of what other systems have written",
    _add_arguments,
    lambda arguments, argv: KINDS[arguments.kind].run(arguments, argv),
)
