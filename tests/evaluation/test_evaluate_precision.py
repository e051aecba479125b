"""In which precision scores are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.evaluation import evaluate
from lockstep.evaluation.precise_statistics import PreciseStatistics
from lockstep.towers.backends import backends_of_scores

SIZE = 40


def make_state() -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return ls.TrainState(model, ls.optim.SGD(0.1))


def make_loader() -> ls.data.Loader:
    generator = torch.Generator().manual_seed(7)
    fields = {"x": torch.randn(SIZE, 4, generator=generator), "label": torch.arange(SIZE) % 3}
    return ls.data.Loader(ls.data.Arrays(fields), batch_size=8)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": nn.functional.cross_entropy(model(batch["x"]), batch["label"])}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"largest": model(batch["x"]).amax(1)}


def trained_in(precision: Any) -> ls.TrainState:
    state = make_state()
    ls.train(state, losses, make_loader(), towers=ls.Towers(1, precision=precision), until=ls.Steps(1))
    return state


def largest_by_hand(state: ls.TrainState, dtype: torch.dtype | None) -> float:
    model, x = state.model.eval(), make_loader().reader.read_batch(np.arange(SIZE))["x"]
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return sum(float(model(part).amax(1).double().sum()) for part in x.split(8))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_scores_are_computed_as_the_towers_compute(precision: Any, dtype: torch.dtype | None) -> None:
    state = trained_in(precision)
    result = ls.evaluate(state, score, make_loader())
    assert (result.precision, result.facts["precision"]) == (precision, precision)
    assert result.sums["largest"] == largest_by_hand(state, dtype)
    assert str(result).endswith("over 40 examples" + (f" in {precision}" if dtype else ""))


def test_another_precision_can_be_asked_for() -> None:
    state = trained_in("bf16")
    result = ls.evaluate(state, score, make_loader(), precision="fp32")
    assert (result.precision, result.sums["largest"]) == ("fp32", largest_by_hand(state, None))


def test_a_state_that_was_never_trained_is_scored_in_fp32() -> None:
    assert ls.evaluate(make_state(), score, make_loader()).precision == "fp32"


def test_a_resumed_state_is_scored_in_the_precision_that_it_was_trained_in(tmp_path: Path) -> None:
    ls.save(trained_in("bf16"), make_loader(), tmp_path)
    state, loader = make_state(), make_loader()
    assert ls.resume(state, loader, tmp_path) == 1
    assert ls.evaluate(state, score, loader).precision == "bf16"


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="precision cannot be 'half'"):
        ls.evaluate(make_state(), score, make_loader(), precision="half")  # type: ignore[arg-type]


def test_statistics_are_computed_afresh_in_it_too() -> None:
    seen = []

    def noting(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return score(model, batch)

    afresh = PreciseStatistics(make_loader(), num_batches=1)
    ls.evaluate(trained_in("bf16"), noting, make_loader(), statistics=afresh)
    assert seen == [(True, torch.bfloat16)] * (1 + SIZE // 8)
    assert not torch.is_autocast_enabled("cpu")


class Kept:
    """A metric of NumPy's, which has no bfloat16."""

    def reset(self) -> None:
        self.values: list[Any] = []

    def update(self, logits: Tensor) -> None:
        self.values.append(logits.numpy())

    def compute(self) -> int:
        return len(np.concatenate(self.values))


def test_a_metric_gets_what_autocast_computed_in_float32() -> None:
    def logits(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"kept": (model(batch["x"]),)}

    kept = Kept()
    result = ls.evaluate(trained_in("bf16"), logits, make_loader(), metrics={"kept": kept})
    assert (result["kept"], {each.dtype for each in kept.values}) == (SIZE, {np.dtype(np.float32)})


@pytest.mark.parametrize(("exact", "tf32"), [(False, None), (False, True), (True, None)])
def test_scores_are_computed_with_the_flags_of_the_towers(
    monkeypatch: pytest.MonkeyPatch, exact: bool, tf32: bool | None
) -> None:
    """As on a GPU, which has such flags."""
    seen = []

    def watched(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        seen.append((torch.backends.cudnn.conv.fp32_precision == "tf32", torch.backends.cuda.matmul.allow_tf32))  # type: ignore[attr-defined]
        return score(model, batch)

    state, towers = make_state(), ls.Towers(1, matmul_tf32=tf32)
    ls.train(state, losses, make_loader(), towers, ls.AllReduce(exact=exact), until=ls.Steps(1))
    monkeypatch.setattr(
        evaluate, "backends_of_scores", lambda given, device: backends_of_scores(given, torch.device("cuda"))
    )
    ls.evaluate(state, watched, make_loader())
    assert set(seen) == {(not exact, bool(tf32))}
