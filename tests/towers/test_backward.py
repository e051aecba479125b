from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.towers import backward


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


def test_hooks_get_gradients_as_they_come(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    parameters = (*model.parameters(), nn.Parameter(torch.ones(3)))
    parameters[0].grad = torch.full_like(parameters[0], 7.0)
    x = torch.randn(5, 4)
    came: dict[int, Tensor] = {}
    expected = backward.gradients(model(x).square().mean(), parameters, torch.tensor(0.25))
    hooks = {index: partial(came.__setitem__, index) for index in (0, 2, 3, 4)}
    found = backward.hooked_gradients(model(x).square().mean(), parameters, torch.tensor(0.25), hooks)
    assert found[4] is None
    assert all(map(torch.equal, found[:4], expected[:4]))
    if way == "engine":
        assert list(came)[-1] == 0, "the backward pass goes from the last layer to the first"
        assert all(came[index] is found[index] for index in (0, 2, 3))
    assert parameters[0].grad.tolist() == torch.full_like(parameters[0], 7.0).tolist()
    assert not any(p._post_accumulate_grad_hooks for p in parameters)


def test_a_gradient_comes_once_where_a_function_differentiates_inside() -> None:
    """As invertible networks and implicit layers do: what they compute on the way is not the gradient yet."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
            context.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = context.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(x * weight, (x, weight), gradients)  # type: ignore[return-value]

    weight, x = nn.Parameter(torch.tensor([3.0])), torch.tensor([2.0], requires_grad=True)
    came: list[Tensor] = []
    total = (Inside.apply(x, weight) + weight).sum()  # type: ignore[no-untyped-call]
    backward.hooked_gradients(total, (weight,), torch.tensor(1.0), {0: came.append})
    assert [gradient.tolist() for gradient in came] == [[3.0]]


def test_hooks_are_gone_after_an_error_and_not_called_beside_those_of_a_script() -> None:
    weight = nn.Parameter(torch.ones(2))

    def fails(gradient: Tensor) -> None:
        raise ValueError("in the hook")

    with pytest.raises(ValueError, match="in the hook"):
        backward.hooked_gradients(weight.sum(), (weight,), torch.tensor(1.0), {0: fails})
    assert not weight._post_accumulate_grad_hooks
    assert weight.grad is None
    of_script: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(of_script.append)
    (found,) = backward.hooked_gradients(weight.sum(), (weight,), torch.tensor(1.0), {0: fails})
    assert found is not None
    assert of_script == []


# -- reentrant checkpointing -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A layer with dropout, as it is or under checkpointing, after a trained stem or the input itself."""

    def __init__(self, *, stem: bool, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 3) if stem else nn.Identity()
        self.part = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x if x.requires_grad else x.requires_grad_()
        if self.use_reentrant is None:
            return self.head(self.part(x))  # type: ignore[no-any-return]
        return self.head(checkpoint(self.part, x, use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def trained(num_towers: int, *, stem: bool, use_reentrant: bool | None) -> dict[str, Tensor]:
    return train(Checkpointed(stem=stem, use_reentrant=use_reentrant), num_towers)


def train(model: nn.Module, num_towers: int) -> dict[str, Tensor]:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    loader = ls.data.Loader(ls.data.Arrays({"x": x}), batch_size=12)
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))
    ls.train(state, losses, loader, ls.Towers(num_towers), until=ls.Steps(3))
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Reversible(torch.autograd.Function):
    """What reversible nets do: the backward runs a part again, and a backward pass of its own through it."""

    @staticmethod
    def forward(context: Any, x: Tensor, part: nn.Module) -> Tensor:
        context.part = part
        context.save_for_backward(x)
        output: Tensor = part(x)
        return output

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            context.part(x).backward(gradients[0])
        return x.grad, None


class WithReversible(nn.Module):
    """Two layers, of which the first is also used without the function."""

    def __init__(self, *, is_reversible: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.inside, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.is_reversible = is_reversible

    def forward(self, x: Tensor) -> Tensor:
        part = nn.Sequential(self.inside, self.both)
        x = torch.tanh(self.both(x))
        x = Reversible.apply(x, part) if self.is_reversible else part(x)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_towers", [1, 3])
def test_parts_that_run_a_backward_pass_of_their_own_are_trained_as_others_are(num_towers: int) -> None:
    plain, found = (train(WithReversible(is_reversible=it), num_towers) for it in (False, True))
    for name, parameter in plain.items():
        torch.testing.assert_close(found[name], parameter, msg=name)


@pytest.mark.parametrize("stem", [False, True])
@pytest.mark.parametrize("num_towers", [1, 3])
def test_checkpointed_parts_are_trained_as_others_are(num_towers: int, stem: bool) -> None:
    plain = trained(num_towers, stem=stem, use_reentrant=None)
    for use_reentrant in (False, True):
        found = trained(num_towers, stem=stem, use_reentrant=use_reentrant)
        assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


class Switched(Checkpointed):
    """Checkpointed from the second step on; its statistics and its dropout tell whether a tower ran twice."""

    def __init__(self, *, stem: bool) -> None:
        super().__init__(stem=stem, use_reentrant=None)
        self.part = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


def trained_after_a_switch(num_towers: int, *, stem: bool, switches: bool, **towers: Any) -> list[Tensor]:
    def switched(model: Switched, batch: ls.Batch) -> dict[str, Tensor]:
        model.use_reentrant = True if switches and batch.position else None
        return {"distance": (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()}

    model = Switched(stem=stem)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    loader = ls.data.Loader(ls.data.Arrays({"x": x}), batch_size=12)
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))
    ls.train(state, switched, loader, ls.Towers(num_towers, **towers), until=ls.Steps(3))  # type: ignore[arg-type]
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("stem", [False, True])
@pytest.mark.parametrize("num_towers", [1, 3])
def test_checkpointing_that_begins_later_is_trained_too(num_towers: int, stem: bool) -> None:
    plain = trained_after_a_switch(num_towers, stem=stem, switches=False)
    found = trained_after_a_switch(num_towers, stem=stem, switches=True)
    assert all(map(torch.equal, found, plain))


def refused_after_a_switch() -> str:
    with pytest.raises(ls.InputError) as caught:
        trained_after_a_switch(2, stem=False, switches=True, batch_norm="sync")
    return str(caught.value)


@pytest.mark.process
def test_with_synchronised_batch_norm_it_has_to_begin_at_once(run_workers: Callable[..., list[Any]]) -> None:
    for text in run_workers(refused_after_a_switch, 2):
        assert "Reentrant checkpointing begins after the first step" in text
        assert "use_reentrant=False" in text


def test_gradients_of_others_stay_where_reentrant_checkpointing_is_used() -> None:
    model, other = Checkpointed(stem=False, use_reentrant=True), nn.Linear(1, 1)
    for kept in (model.head.weight, other.weight):
        kept.grad = torch.full_like(kept, 7.0)
    total = other(model(torch.ones(2, 3))).square().mean()
    assert backward.is_reentrant(total)
    found = backward.reentrant_gradients(total, tuple(model.parameters()), torch.tensor(1.0))
    assert all(gradient is not None for gradient in found)
    assert torch.equal(model.head.weight.grad, torch.full_like(model.head.weight, 7.0))
    assert torch.equal(other.weight.grad, torch.full_like(other.weight, 7.0))
    assert other.bias.grad is None
    assert model.part[0].weight.grad is None


def test_other_graphs_are_not_reentrant() -> None:
    model = Checkpointed(stem=True, use_reentrant=False)
    assert not backward.is_reentrant(model(torch.ones(2, 3)).mean())
