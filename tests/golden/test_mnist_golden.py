"""The MNIST net, its towers and its update give the numbers that TensorFlow gave (recorded by make_mnist_golden.py)."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from mnist_reference import (
    FIRST_LOSS_TOLERANCE,
    GoldenRun,
    check_first_gradients,
    check_losses,
    check_weights,
    golden_run,
    reference_batches,
    reference_net,
)
from torch import Tensor, nn

from lockstep.losses.weighted import softmax_cross_entropy


def train(run: GoldenRun, net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Train as the run did, by hand; returns the losses (steps, towers) and the gradients of the first step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=run.learning_rate, momentum=run.momentum, nesterov=True)
    losses, first = [], {}
    for images, labels in batches:
        halves = zip(images.chunk(run.num_towers), labels.chunk(run.num_towers), strict=True)
        tower_losses = [softmax_cross_entropy(net(part), part_labels) for part, part_labels in halves]
        optimizer.zero_grad()
        (sum(tower_losses) / run.num_towers).backward()
        if run.clip_norm is not None:
            for parameter in net.parameters():
                # Torch's clip_grad_norm_ divides by norm + 1e-6, which would show.
                parameter.grad *= run.clip_norm / max(run.clip_norm, parameter.grad.norm().item())
        first = first or {name: p.grad.clone() for name, p in net.named_parameters()}
        optimizer.step()
        losses.append([loss.item() for loss in tower_losses])
    return np.array(losses), first


@pytest.mark.parametrize(
    "name",
    [pytest.param("two_towers_float64", marks=pytest.mark.slow), "two_towers_float32", "two_towers_lrn_float32"],
)
def test_two_towers_give_tensorflows_numbers(name: str) -> None:
    run = golden_run(name)
    net = reference_net(run)
    losses, first = train(run, net, reference_batches(run))
    assert losses.shape == (10 if run.lrn else 20, 2)
    check_losses(run, losses)
    check_losses(run, losses.mean(axis=1))
    check_first_gradients(run, first)
    check_weights(run, net)


@pytest.mark.slow
def test_one_tower_with_clipped_gradients_gives_slims_numbers() -> None:
    run = golden_run("slim_float64")
    net = reference_net(run)
    losses, _ = train(run, net, reference_batches(run))
    assert losses.shape == (20, 1)
    check_losses(run, losses)
    check_weights(run, net)


def test_channels_last_gives_the_same_first_step() -> None:
    run = golden_run("two_towers_float32")
    net = reference_net(run).to(memory_format=torch.channels_last)
    images, labels = reference_batches(run)[0]
    losses, first = train(run, net, [(images.contiguous(memory_format=torch.channels_last), labels)])
    assert np.abs(losses - run.losses[:1]).max() <= FIRST_LOSS_TOLERANCE[run.dtype]
    check_first_gradients(run, first)


# The checks themselves, so that they can be trusted when they pass ------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.1 + 1e-7},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"momentum": 0.9 - 1e-6}, {"clip_norm": 0.1})),
    ],
    ids=str,
)
def test_other_settings_give_other_numbers(change: dict[str, float]) -> None:
    run = golden_run("two_towers_float64")
    run = replace(run, losses=run.losses[:4])
    losses, _ = train(replace(run, **change), reference_net(run), reference_batches(run))
    with pytest.raises(AssertionError):
        check_losses(run, losses)


def test_the_local_response_normalisation_shows() -> None:
    run = golden_run("two_towers_lrn_float32")
    _, first = train(run, reference_net(replace(run, lrn=False)), reference_batches(run)[:1])
    with pytest.raises(AssertionError):
        check_first_gradients(run, first)


def test_a_wrong_weight_is_seen() -> None:
    run = golden_run("two_towers_float64")
    net = reference_net(run)
    with pytest.raises(AssertionError):
        check_weights(run, net)


def test_a_swapped_layout_is_seen() -> None:
    run = golden_run("two_towers_float64")
    net = reference_net(run)
    turned = copy.deepcopy(net)
    with torch.no_grad():
        turned.conv2.weight.copy_(net.conv2.weight.flip(-1))
    images, labels = reference_batches(run)[0]
    _, first = train(run, turned, [(images, labels)])
    with pytest.raises(AssertionError):
        check_first_gradients(run, first)
