from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import lockstep as ls
from lockstep.optim import rules
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_every_dtype_is_updated_as_torch_does_without_fusing(dtype: torch.dtype, nesterov: bool) -> None:
    """Long enough for the vectorised part of a kernel: some are wrong there for 16 bits."""
    torch.manual_seed(0)
    parameter = torch.randn(200).to(dtype)
    theirs = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01, foreach=False)
    ours = ls.optim.SGD(0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01).bind({"weight": parameter})
    for step in range(3):
        gradient = torch.randn(200).to(dtype)
        theirs.grad = gradient.clone()
        optimizer.step()
        ours.update(Gradients(["weight"], [gradient]), step)
    rounding = 1e-6 if dtype.itemsize > 2 else 0.05
    torch.testing.assert_close(parameter, theirs.detach(), rtol=rounding, atol=rounding)


def test_what_the_kernels_cannot_do_is_not_fused() -> None:
    dense = torch.zeros(4, 6)
    assert rules.can_fuse([dense, dense.t(), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)])
    assert not rules.can_fuse([dense, dense[:, ::2]])
    assert not rules.can_fuse([torch.ones(1).expand(4)])
    assert not rules.can_fuse([dense.bfloat16()])
    assert not rules.can_fuse([dense, dense.double()])
    assert not rules.can_fuse([dense], "no_such_rule")


@pytest.mark.parametrize("kernel", ["sgd", "adam", "adamw", "adagrad"])
def test_this_torch_has_the_kernels(kernel: str) -> None:
    assert rules.can_fuse([torch.zeros(3)], kernel)


def test_a_parameter_that_is_not_dense_trains_as_a_dense_one() -> None:
    def trained(weight: torch.Tensor) -> torch.Tensor:
        bound = ls.optim.SGD(0.1, momentum=0.9).bind({"weight": weight})
        for step in range(3):
            bound.update(Gradients(["weight"], [torch.arange(18.0).view(3, 6)]), step)
        return weight.clone()

    wide = torch.arange(36.0).view(3, 12)
    assert torch.equal(trained(wide[:, ::2].clone()), trained(wide[:, ::2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.optim.SGD(-0.1), "lr is out of range"),
        (lambda: ls.optim.SGD(math.nan), "lr is out of range"),
        (lambda: ls.optim.SGD("0.1"), "lr is of the wrong type"),
        (lambda: ls.optim.SGD(0.1, momentum=5.0), r"momentum is out of range.*\n.*\n.*0 or more, below 1"),
        (lambda: ls.optim.SGD(0.1, nesterov=True), "there is none"),
        (lambda: ls.optim.SGD(0.1, weight_decay=-1.0), "weight_decay is out of range"),
        (lambda: ls.optim.SGD(0.1, weight_decay={"bias$": -1.0}), r"weight_decay of 'bias\$' is out of range"),
        (lambda: ls.optim.Cosine(-1.0, 10), "initial is out of range"),
        (lambda: Constant(math.inf), r"value is out of range.*\n.*\n.*finite"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make()
