"""Batches that were refused, kept in the workdir to be looked at.

refused/position-000000123/
  report.json           why, where it came from, and the names of all examples of the batch; written by the chief
  worker-0.safetensors  the tensors of a worker that hosts a guilty tower, rows in the order of the stream
  worker-0.json         its towers, and the fields that are no tensors
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoints.encoding import encoded
from lockstep.data.loader import Loader
from lockstep.durable import atomic_write, make_folder
from lockstep.types import Batch, Refusal
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")

MAX_KEPT = 20
"""Folders there may be; later batches are refused all the same, and not kept."""


class KeptBatches:
    """The refused batches of one run. Whatever goes wrong in keeping one is a line in the log."""

    def __init__(self, folder: Path, loader: Loader, worker: Worker) -> None:
        self._folder, self._loader, self._worker = folder, loader, worker

    def keep(self, refusal: Refusal, step: int) -> None:
        """Write this worker's part of a refused batch, and the report, which is the chief's to write.

        Args:
            refusal: of the attempt.
            step: updates completed before it.
        """
        folder = self._folder / f"position-{refusal.position:09d}"
        try:
            self._write(folder, refusal, step)
        except Exception as error:  # what has to be told is the refusal itself
            log.warning("the refused batch cannot be kept in %s: %r", folder, error)

    def _write(self, folder: Path, refusal: Refusal, step: int) -> None:
        if not folder.exists() and len(list(self._folder.glob("position-*"))) >= MAX_KEPT:
            if self._worker.is_chief:
                log.info("%s holds %d refused batches; this one is not kept", self._folder, MAX_KEPT)
            return
        if refusal.batch is None and not self._worker.is_chief:
            return
        make_folder(folder)
        if refusal.batch is not None:
            self._write_batch(folder, refusal.batch)
        if self._worker.is_chief:
            report = {
                "step": step,
                "position": refusal.position,
                "reasons": refusal.reasons,
                "culprits": refusal.culprits,
                "examples": self._loader.example_ids(refusal.position, self._loader.batch_size),
            }
            _write_json(folder / "report.json", report)
            log.info("the refused batch is kept in %s", folder)

    def _write_batch(self, folder: Path, batch: Batch) -> None:
        name = f"worker-{self._worker.rank}"
        tensors = {field: value for field, value in batch.items() if isinstance(value, Tensor)}
        with atomic_write(folder / f"{name}.safetensors") as file:
            file.writelines(encoded(tensors))
        rest = {field: value for field, value in batch.items() if field not in tensors}
        about = {"position": batch.position, "batch_size": batch.batch_size, "towers": list(batch.towers)}
        _write_json(folder / f"{name}.json", {**about, "fields": rest})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1, default=_plain) + "\n").encode())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else repr(value)
