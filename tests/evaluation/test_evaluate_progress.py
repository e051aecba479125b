from __future__ import annotations

import torch
from torch import nn

import lockstep as ls


def test_progress_is_told_before_and_after_each_micro_batch() -> None:
    state = ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(7, 1)}), batch_size=3)
    told: list[tuple[int, int]] = []

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        return {"y": model(batch["x"]).squeeze(1)}

    ls.evaluate(state, score, loader, progress=lambda *counts: told.append(counts))
    assert told == [(0, 7), (3, 7), (6, 7), (7, 7)]
    told.clear()
    ls.evaluate(state, score, loader, drop_last=True, progress=lambda *counts: told.append(counts))
    assert told == [(0, 6), (3, 6), (6, 6)]
