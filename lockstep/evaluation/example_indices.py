"""Which example of the reader stands in each row of a batch that is scored."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.data.loader import EvaluationBatch
from lockstep.types import Batch


def example_indices(batch: Batch) -> Tensor:
    """The index in the reader of each row of an evaluation's batch, int64 of shape (batch,), on the CPU.

    Examples that could not be read are no rows, and are jumped over; padding has the index of the last row that counts.
    Of a training batch, such as batch-norm statistics are computed from, these are the places in the stream.
    """
    places = torch.arange(batch.position, batch.position + batch.batch_size)
    if not isinstance(batch, EvaluationBatch):
        return places
    left_out = torch.tensor([bad.position for bad in batch.bad], dtype=torch.int64)
    rows = places[~torch.isin(places, left_out)][: batch.valid]
    last = rows[-1] if batch.valid else places[0]
    return torch.cat([rows, last.expand(batch.batch_size - batch.valid)])
