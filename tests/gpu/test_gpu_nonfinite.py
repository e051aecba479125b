"""What is not finite, put into a run on a GPU: what is read late says and leaves what a synchronous loop does."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_nets import BATCH_SIZE, EXACT, Net, assert_equal, everything, learned, losses, make_loader, make_state, worker
from torch import Tensor, nn

import lockstep as ls

STEPS = 6
WITHOUT_A_FUSED_KERNEL = (ls.optim.RMSProp(1e-3, momentum=0.9), ls.optim.Adagrad(0.01), ls.optim.LAMB(0.01))
BAD = {2 * BATCH_SIZE + 3: math.nan, 5 * BATCH_SIZE + 7: math.inf}
"""In the third and the sixth batch."""
QUICK = {("stop", "fp32"), ("skip", "fp16"), ("rollback", "bf16")}


def trained(
    policy: str, precision: Any, workdir: Path, *, is_late: bool, **options: Any
) -> tuple[dict[str, Any], list[Any]]:
    """What a run has learned, and what it has said of each attempt, until its end or its first error.

    Late is `train_steps`; else a loop of steps that each wait.
    """
    state, loader = make_state(**everything() | options, nonfinite=policy, nonfinite_budget=2), make_loader(BAD)
    towers = ls.Towers(2, precision=precision, channels_last=True)
    said: list[Any] = []
    ls.save(state, loader, workdir)
    while state.step < STEPS:
        try:
            if is_late:
                reports = ls.train_steps(state, losses, loader, towers, EXACT, until=ls.Steps(STEPS))
            else:
                batches = ls.batches(loader, towers, until=ls.Steps(STEPS))
                reports = (ls.train_step(state, losses, batch, towers, EXACT) for batch in batches)
            for report in reports:
                said.append(
                    (report.step, report.progress.position, report.skipped, report.gradient_norm, dict(report.losses))
                )
        except ls.NonFiniteError as error:
            said.append((state.step, loader.position, str(error)))
            if policy != "rollback":
                break
            ls.rollback(state, loader, workdir, error)
    return learned(state), said


@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in itertools.product(["stop", "skip", "rollback"], ["fp32", "bf16", "fp16"])
    ],
)
def test_a_late_read_tells_and_leaves_what_a_wait_does(policy: str, precision: str, tmp_path: Path) -> None:
    worker()
    late, said_late = trained(policy, precision, tmp_path / "late", is_late=True)
    synchronous, said = trained(policy, precision, tmp_path / "synchronous", is_late=False)
    assert repr(said_late) == repr(said), "NaN differs from itself"
    assert_equal(late, synchronous)
    assert all(value.isfinite().all() for value in late.values())
    assert len(said) > 1


@pytest.mark.parametrize("optimizer", WITHOUT_A_FUSED_KERNEL, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("policy", ["skip", pytest.param("rollback", marks=pytest.mark.slow)])
def test_what_no_kernel_holds_back_is_put_back(policy: str, optimizer: Any, tmp_path: Path) -> None:
    worker()
    late, said_late = trained(policy, "bf16", tmp_path / "late", is_late=True, optimizer=optimizer)
    synchronous, said = trained(policy, "bf16", tmp_path / "synchronous", is_late=False, optimizer=optimizer)
    assert repr(said_late) == repr(said), "NaN differs from itself"
    assert_equal(late, synchronous)
    assert all(value.isfinite().all() for value in late.values())


def test_without_a_policy_numbers_become_what_they_become(tmp_path: Path) -> None:
    worker()
    late, _ = trained("off", "fp32", tmp_path, is_late=True)
    assert not all(value.isfinite().all() for value in late.values())


def steep_losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {name: 1e4 * loss for name, loss in losses(model, batch)[0].items()}


def test_gradients_that_overflow_in_fp16_lower_the_loss_scale() -> None:
    worker()
    state = make_state()
    before = state.loss_scale.value
    reports = ls.train_steps(state, steep_losses, make_loader(), ls.Towers(1, precision="fp16"))
    assert next(reports).skipped
    assert state.loss_scale.value < before
    reports.close()


def test_a_body_that_changes_weights_is_seen_by_the_next_attempt() -> None:
    worker()
    found = []
    for is_late in (True, False):
        state, loader, towers = make_state(), make_loader(), ls.Towers(2)
        batches = ls.batches(loader, towers, until=ls.Steps(STEPS))
        steps = (ls.train_step(state, losses, batch, towers, EXACT) for batch in batches)
        late = ls.train_steps(state, losses, loader, towers, EXACT, until=ls.Steps(STEPS))
        for report in late if is_late else steps:
            if report.step == 3:
                with torch.no_grad():
                    state.model[-1].bias.zero_()
        found.append(learned(state))
    assert_equal(*found)
    assert isinstance(state.model, Net)
