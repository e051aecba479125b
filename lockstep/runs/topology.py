"""The topology of a run: which worker computes which towers, where, and where the state lives, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.parallel.exchange import AllReduce
from lockstep.parallel.served import Asynchronous, Backups, is_served
from lockstep.parallel.tree import assign_towers
from lockstep.terminal import num_columns
from lockstep.workers.devices import describe_accelerator

if TYPE_CHECKING:
    from lockstep.parallel.exchange import Exchange
    from lockstep.runs.build import Parts
    from lockstep.training.state import TrainState
    from lockstep.workers.rank import Worker


def describe_topology(parts: Parts, exchange: Exchange, worker: Worker) -> list[str]:
    """Describe how a run would go on from where its parts stand, in lines; all workers call it, and get the same."""
    state, loader, count = parts.state, parts.loader, parts.towers.count
    size = loader.batch_size // count
    towers, positions = _part_of(worker, parts, exchange)
    here = {
        "host": worker.host,
        "worker": str(worker.rank),
        "device": " ".join([str(worker.device), describe_accelerator(worker.device).get("gpu", "")]).rstrip(),
        "threads": str(torch.get_num_threads()),
        "towers": towers,
        "first positions": positions,
    }
    workers: list[dict[str, str]] = worker.group.gather(here)
    return [
        f"{count} x {size} examples an update, from step {state.step}, position {loader.position}",
        f"exchange: {_transport(exchange, worker)}",
        "",
        *_table([here, *(each.values() for each in workers)]),
        "",
        *_describe_state(state),
    ]


def _part_of(worker: Worker, parts: Parts, exchange: Exchange) -> tuple[str, str]:
    """The towers of a worker, and the positions of the first examples that it reads."""
    loader, count = parts.loader, parts.towers.count
    if isinstance(exchange, Backups | Asynchronous) and worker.num_workers > 1:
        if worker.is_chief:
            return "serves", "none"
        num_slices = exchange.num_slices(count)
        size = loader.batch_size // num_slices
        return "one at a time" if num_slices > 1 else "all in turn", _range(
            loader.position + (worker.rank - 1) * size, size
        )
    mine = assign_towers(count, worker.num_workers)[worker.rank]
    size = loader.batch_size // count
    return _range(mine.start, len(mine)), _range(loader.position + mine.start * size, len(mine) * size)


def _transport(exchange: Exchange, worker: Worker) -> str:
    if worker.num_workers == 1:
        return f"{exchange}, of one worker: nothing is sent"
    if is_served(exchange):
        return f"{exchange}, served by worker 0"
    name = exchange.resolve(worker) if isinstance(exchange, AllReduce) else "what it connects by itself"
    return f"{exchange} over {name.replace('_', ' ')}"


def _describe_state(state: TrainState) -> list[str]:
    """Describe each parameter with its slots and its average, and each buffer."""
    sections = state.sections()
    num_bytes = sum(t.numel() * t.itemsize for tensors in sections.values() for t in tensors.values())
    rows: list[Iterable[str]] = [("parameter", "shape", "dtype", "kept beside it")]
    for name, tensor in sections["parameters"].items():
        slots = [key.removesuffix(f"/{name}") for key in sections["slots"] if key.endswith(f"/{name}")]
        beside = slots + (["average"] if name in sections["average"] else [])
        rows.append((*_facts(name, tensor), ", ".join(beside) if name in state.parameters else "not trained"))
    if sections["buffers"]:
        rows.append(("buffer", "shape", "dtype", ""))
        rows += [(*_facts(name, tensor), "") for name, tensor in sections["buffers"].items()]
    return [
        f"state: all of it on the device of each worker, {num_bytes / 1e6:.1f} MB; the chief saves it",
        "",
        *_table(rows),
    ]


def _facts(name: str, tensor: Any) -> tuple[str, str, str]:
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return name, shape, str(tensor.dtype).removeprefix("torch.")


def _range(start: int, length: int) -> str:
    return f"{start} to {start + length - 1}" if length > 1 else str(start)


def _table(rows: Sequence[Iterable[str]]) -> list[str]:
    """Lay out rows in columns, two spaces apart."""
    cells = [list(row) for row in rows]
    widths = [max(map(num_columns, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell + " " * (width - num_columns(cell)) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    return [line.rstrip() for line in lines]
