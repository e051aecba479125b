from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.parallel import backward


@pytest.fixture(params=["engine", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "public":
        monkeypatch.setattr(backward, "_run", None)
    return str(request.param)


def test_both_ways_give_what_autograd_gives(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    unused = nn.Parameter(torch.ones(3))
    parameters = (*model.parameters(), unused)
    x = torch.randn(5, 4)
    expected = torch.autograd.grad(model(x).square().mean() / 4, parameters, allow_unused=True)
    found = backward.gradients(model(x).square().mean(), parameters, torch.tensor(0.25))
    assert found[-1] is None
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert a is not None
        assert torch.equal(a, b)
        assert not a.requires_grad
    assert all(p.grad is None for p in parameters)


def test_the_engine_is_there() -> None:
    """Else the public function does, 20 to 30 us slower a step: then look for the engine's new name."""
    assert backward._run is not None
