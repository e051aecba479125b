"""An attempt on a GPU that is made again: the same bits in an exact run, and a fault that is found."""

from __future__ import annotations

import logging

import pytest
import torch
from gpu_nets import EXACT, assert_equal, everything, learned, losses, make_loader, make_state, worker
from torch import Tensor

import lockstep as ls
from lockstep.types import FaultError

STEPS = 5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_exact_run_is_the_same_with_attempts_made_again(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    worker()
    caplog.set_level(logging.INFO)
    found = []
    for replay_steps in (0, 1):
        state, towers = make_state(**everything()), ls.Towers(2, precision=precision, channels_last=True)  # type: ignore[arg-type]
        state.replay_steps = replay_steps
        reports = [*ls.train_steps(state, losses, make_loader(), towers, EXACT, until=ls.Steps(STEPS))]
        assert [report.verdict for report in reports] == [None] * STEPS
        found.append(learned(state))
    assert_equal(*found)
    assert "made again" not in caplog.text


def test_a_bit_that_flips_once_is_found() -> None:
    worker()
    state, passes = make_state(), []

    def flip(gradient: Tensor) -> Tensor:
        passes.append(1)
        if len(passes) != 5:  # the second tower of the second step, after the one that is made again
            return gradient
        flipped = gradient.detach().clone()
        flipped.view(torch.int32).view(-1)[0] ^= 1 << 20
        return flipped

    state.replay_steps = 1
    next(iter(state.parameters.values())).register_hook(flip)
    with pytest.raises(FaultError) as caught:
        ls.train(state, losses, make_loader(), ls.Towers(2), EXACT, until=ls.Steps(STEPS))
    assert caught.value.verdict.cause == "device"
    assert state.step == 1
