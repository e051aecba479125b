"""What is to blame is told from the results alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.training.verdict import TowerResult, judge, result_of

NAMES = ["worker 0", "worker 1", "worker 2"]
GOOD = TowerResult(["0x1.0p+0"], True, [1, 2])
OTHER = TowerResult(["0x1.0p+0"], True, [1, 3])
THIRD = TowerResult(["0x1.0p+0"], True, [1, 4])
BAD = TowerResult(["nan"], False, [None, 2])
BAD_AT_FIRST = TowerResult(["nan"], False, None)
INF_AT_FIRST = TowerResult(["0x1.0p+0"], False, None)


@pytest.mark.parametrize(
    ("original", "runs", "cause", "workers", "words"),
    [
        (BAD_AT_FIRST, [[BAD], [BAD], [BAD]], "data", [], "worker 1 and worker 2: it is the data or the code"),
        (BAD_AT_FIRST, [[BAD]], "data", [], "or a device that errs alike each time, which one worker alone"),
        (INF_AT_FIRST, [[GOOD] * 4] * 3, "device", [1], "the device of worker 1 that has passed, or an operator that"),
        (OTHER, [[GOOD] * 4], "device", [0], "not what it gave at first"),
        (GOOD, [[GOOD] * 4, [GOOD] * 4, [OTHER] * 4], "device", [2], "but on worker 2 not what the others get"),
        (OTHER, [[GOOD] * 4, [OTHER] * 4, [GOOD] * 4], "device", [1], "it is the device of worker 1"),
        (GOOD, [[GOOD] * 4, [OTHER] * 4], "device", [0, 1], "not the same on worker 0 and worker 1: it is the"),
        (GOOD, [[GOOD] * 4, [BAD] * 4], "device", [1], "it is the device of worker 1"),
        (GOOD, [[GOOD] * 4, [OTHER] * 4, [THIRD] * 4], "device", [0, 1, 2], "of one of them"),
        (GOOD, [[GOOD, OTHER, GOOD, GOOD], [GOOD] * 4], "device", [0], "on worker 0, but on worker 1: it is"),
        (GOOD, [[GOOD, OTHER], [OTHER, THIRD], [THIRD, GOOD]], "nondeterministic", [], "an operator is not"),
        (GOOD, [[GOOD, OTHER], [OTHER, THIRD], [GOOD, GOOD]], "nondeterministic", [], "worker 0 and worker 1"),
        (GOOD, [[GOOD, OTHER]], "unclear", [0], "its device, or an operator that is not"),
        (None, [[GOOD] * 4, [GOOD] * 4], "data", [], "it gives the same"),
    ],
)  # fmt: skip
def test_the_cause_is_told(original: Any, runs: list[Any], cause: str, workers: list[int], words: str) -> None:
    suspects = [1] if len(runs) > 1 else [0]
    found = judge(original, suspects, dict(enumerate(runs)), NAMES)
    assert (found.cause, list(found.workers)) == (cause, workers)
    assert words in found.words


def test_the_workers_of_another_kind_are_left_out_by_their_rank() -> None:
    found = judge(GOOD, [0], {0: [GOOD] * 4, 2: [BAD] * 4}, NAMES)
    assert (found.cause, list(found.workers)) == ("device", [2])


def test_a_result_has_each_bit_of_losses_and_tensors() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    result = result_of([[0.5, 1 / 3], torch.tensor([2.0], dtype=torch.float64)], tensors)
    assert result.is_finite
    for index in range(2):
        tensors[index].view(torch.uint8)[5] ^= 4
        other = result_of([[0.5, 1 / 3], [2.0]], tensors)
        assert not other.agrees_with(result)
        tensors[index].view(torch.uint8)[5] ^= 4
    assert result_of([[0.5, 1 / 3], [2.0]], tensors) == result
    assert not result_of([[0.5, math.nextafter(1 / 3, 1)], [2.0]], tensors).agrees_with(result)


def test_an_outline_says_what_is_finite() -> None:
    result = result_of([[1.0, -0.5, math.nan, -math.inf]], [torch.ones(2), torch.tensor([1.0, math.inf])])
    assert result.outline() == TowerResult(["finite", "finite", "nan", "inf"], False, [0, None])
    assert BAD_AT_FIRST.outline() == BAD_AT_FIRST
    assert OTHER.outline() == GOOD.outline() != BAD.outline()


def test_all_that_is_not_finite_is_alike() -> None:
    """The sign and the payload of a NaN say nothing."""
    one, other = torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan])
    other.view(torch.int32)[1] += 7
    assert result_of([[math.nan]], [one]) == result_of([[-math.nan]], [other])
    assert not result_of([[math.nan]], [one]).is_finite
    assert not result_of([[math.inf]], [torch.ones(1)]).is_finite
