"""What the tests of Slim's model_deploy assert of clones, said of towers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import Logistic, losses

import lockstep as ls


def reference_rows() -> dict[str, Tensor]:
    """The 16 rows of model_deploy_test: one-hot, drawn by NumPy's generator of seed 0."""
    draws = np.random.RandomState(0)
    labels = draws.randint(0, 2, size=16)
    columns = [2 * label + draws.randint(0, 2) for label in labels]
    return {"row": torch.eye(4)[columns], "label": torch.from_numpy(labels).float()}


def make_loader(num_towers: int) -> ls.data.Loader:
    """In each batch all rows once for each tower: a clone of the reference had a batch of its own."""
    rows = {name: values.repeat(num_towers, *[1] * (values.ndim - 1)) for name, values in reference_rows().items()}
    return ls.data.Loader(ls.data.Arrays(rows), batch_size=16 * num_towers, order="sequential")


def make_state(*, batch_norm: bool = False) -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(Logistic(batch_norm=batch_norm), ls.optim.SGD(lr=1.0))


def test_a_description_of_a_run_makes_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Parameter, "__new__", lambda *_: pytest.fail("a parameter was made"))
    recipe = ls.recipes.find("mnist")
    assert ls.Towers(2) == ls.Towers(2)
    assert (recipe.num_workers, recipe.device) == (None, None)


@pytest.mark.parametrize("num_towers", [1, 4])
def test_towers_share_their_parameters_and_have_no_names_of_their_own(num_towers: int) -> None:
    state = make_state(batch_norm=True)
    names = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    report = ls.train(state, losses, make_loader(num_towers), ls.Towers(num_towers), until=ls.Steps(1))
    assert report is not None
    assert [*state.parameters] == [name for name, _ in state.model.named_parameters()] == names
    assert [name for name, _ in state.model.named_buffers() if "running" in name] == [
        "norm.running_mean",
        "norm.running_var",
    ]
    # One loss, and one gradient for each parameter, however many towers there are.
    assert [*report.losses] == ["log_loss"]
    assert report.total == pytest.approx(report.losses["log_loss"])


def test_a_model_without_statistics_commits_none() -> None:
    state = make_state()
    ls.train(state, losses, make_loader(1), until=ls.Steps(1))
    assert [name for name, _ in state.model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert [*state.model.buffers()] == []


@pytest.mark.parametrize("num_towers", [1, 4])
def test_the_optimizer_gets_a_gradient_for_each_parameter(num_towers: int) -> None:
    got: dict[str, Tensor | None] = {}

    def keep(gradients: ls.optim.Gradients, _: int) -> None:
        got.update(zip(gradients.names, gradients.tensors, strict=True))

    state = ls.TrainState(Logistic(), ls.optim.SGD(lr=1.0), gradient_transforms=[keep])
    ls.train(state, losses, make_loader(num_towers), ls.Towers(num_towers), until=ls.Steps(1))
    assert [*got] == [*state.parameters]
    assert all(gradient is not None and gradient.device == torch.device("cpu") for gradient in got.values())


def test_two_towers_with_batch_norm_learn_and_keep_the_statistics_of_the_first() -> None:
    state, loader = make_state(batch_norm=True), make_loader(2)
    reports = list(ls.train_steps(state, losses, loader, ls.Towers(2, batch_norm="first"), until=ls.Steps(11)))
    assert reports[10].total < reports[0].total / 5
    means, variances = torch.tensor([0.125, 0.25, 0.375, 0.25]), torch.tensor([0.109375, 0.1875, 0.234375, 0.1875])
    norm = state.model.norm
    torch.testing.assert_close(norm.running_mean, means)
    torch.testing.assert_close(norm.running_var, variances * 16 / 15)


def test_two_towers_whose_only_loss_is_a_regularisation() -> None:
    def only_decay(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"decay": 0.1 * model.linear.weight.square().sum()}

    state = make_state()
    before = state.model.linear.weight.detach().clone()
    report = ls.train(state, only_decay, make_loader(2), ls.Towers(2), until=ls.Steps(1))
    assert report is not None
    assert report.total == pytest.approx(0.1 * before.square().sum().item())
    torch.testing.assert_close(state.model.linear.weight.detach(), 0.8 * before)
    scored = ls.evaluate(state, lambda model, batch: {"score": model(batch["row"])}, make_loader(1))
    assert scored.num_examples == 16
