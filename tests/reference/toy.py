"""The toy set of TF-Slim's own tests: 16 one-hot rows of 4, where the hot column is 2 * label + 0 or 1.

It goes with a logistic model, and gradient descent at a rate of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

NUM_ROWS = 16


def make_loader(batch_size: int = NUM_ROWS) -> ls.data.Loader:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 2, (NUM_ROWS,), generator=generator)
    columns = 2 * labels + torch.randint(0, 2, (NUM_ROWS,), generator=generator)
    rows = F.one_hot(columns, 4).float()
    return ls.data.Loader(ls.data.Arrays({"row": rows, "label": labels.float()}), batch_size=batch_size)


class Logistic(nn.Module):
    """One score a row; with batch norm in front where asked for."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.9) if batch_norm else nn.Identity()
        self.linear = nn.Linear(4, 1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(rows)).squeeze(1)
        return scores


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"log_loss": F.binary_cross_entropy_with_logits(model(batch["row"]), batch["label"])}


def loss_after(steps: int, state: ls.TrainState, **options: object) -> float:
    report = ls.train(state, losses, make_loader(), until=ls.Steps(steps), **options)  # type: ignore[arg-type]
    assert report is not None
    assert report.step == steps
    return report.total
