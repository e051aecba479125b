"""Activations that are computed again: the bits of a step that keeps them, and less that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import lockstep as ls

BATCH_SIZE, STEPS = 8, 3


class Block(nn.Module):
    """Batch norm, dropout, and a buffer that counts the passes."""

    num_passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.num_passes += 1
        return F.dropout(F.relu(self.norm(self.conv(x))), 0.3, self.training)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Block(), Block()), Block(), nn.Flatten(), nn.Linear(256, 5))


def trained(model: nn.Module, patterns: tuple[str, ...], **towers: Any) -> tuple[dict[str, Tensor], int]:
    """All that the state has learned in some steps, and how many bytes the last of them kept for its backward pass."""
    kept = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        nonlocal kept
        kept = 0
        with saved_tensors_hooks(note, lambda tensor: tensor):
            return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}

    generator = torch.Generator().manual_seed(1)
    arrays = {"image": torch.randn(24, 3, 8, 8, generator=generator), "label": torch.arange(24) % 5}
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))
    loader = ls.data.Loader(ls.data.Arrays(arrays), batch_size=BATCH_SIZE)
    chosen = ls.Towers(activation_checkpointing=patterns, **towers)
    reports = ls.train(state, losses, loader, chosen, until=ls.Steps(STEPS))
    assert reports is not None
    learned = {f"{part}/{name}": value for part, of in state.sections().items() for name, value in of.items()}
    return learned, kept


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    "towers",
    [
        {"count": 1},
        {"count": 2},
        {"count": 2, "batch_norm": "last", "channels_last": True},
        {"count": 1, "variance": "biased"},
        {"count": 1, "precision": "bf16"},
        {"count": 2, "batch_norm": "frozen"},
    ],
    ids=str,
)
@pytest.mark.parametrize("patterns", [(r"^1\.\d$", "2"), (".",)], ids=["each block", "all"])
def test_the_bits_are_those_of_kept_activations(towers: dict[str, Any], patterns: tuple[str, ...]) -> None:
    model, plain_model = make_model(), make_model()
    (learned, kept), (expected, kept_by_all) = trained(model, patterns, **towers), trained(plain_model, (), **towers)
    assert_equal(learned, expected)
    assert kept < kept_by_all / 2
    blocks = [[block.calls for block in each.modules() if isinstance(block, Block)] for each in (model, plain_model)]
    assert blocks[0] == [2 * calls for calls in blocks[1]]
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_module_inside_of_a_chosen_one_is_computed_again_once() -> None:
    model = make_model()
    trained(model, ("^1", r"^1\.0\.conv$"), count=1)
    assert [block.calls for block in model.modules() if isinstance(block, Block)] == [2 * STEPS, 2 * STEPS, STEPS]


def test_a_forward_that_the_script_has_set_is_used_and_stays() -> None:
    model, calls = make_model(), 0
    plain = model[2].forward

    def own(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(x)  # type: ignore[no-any-return]

    model[2].forward = own  # type: ignore[assignment]
    trained(model, ("2",), count=1)
    assert calls == 2 * STEPS
    assert model[2].forward is own


def test_an_error_of_the_model_leaves_its_forward() -> None:
    model = make_model()
    model[4] = nn.Linear(3, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trained(model, ("2",), count=1)
    assert "forward" not in model[2].__dict__


def with_penalty(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """A gradient penalty: the backward pass of the step goes through another one."""
    images = batch["image"].clone().requires_grad_()
    logits = model(images)
    (slope,) = torch.autograd.grad(logits.square().sum(), images, create_graph=True)
    return {"cross_entropy": F.cross_entropy(logits, batch["label"]), "penalty": slope.square().mean()}


def test_a_gradient_of_a_gradient_has_the_same_bits() -> None:
    found = []
    for patterns in ((), (r"^1\.\d$", "2")):
        state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
        arrays = ls.data.Arrays(
            {"image": torch.linspace(-1, 1, 8 * 192).view(8, 3, 8, 8), "label": torch.arange(8) % 5}
        )
        loader = ls.data.Loader(arrays, batch_size=BATCH_SIZE)
        ls.train(state, with_penalty, loader, ls.Towers(2, activation_checkpointing=patterns), until=ls.Steps(2))
        found.append({**state.sections()["parameters"], **state.sections()["buffers"]})
    assert_equal(*found)


def test_a_pattern_that_matches_no_module_is_refused() -> None:
    with pytest.raises(ls.InputError, match="A pattern of activation_checkpointing matches no module") as caught:
        trained(make_model(), ("^layer1",), count=1)
    assert "'1.0.conv'" in caught.value.expected


@pytest.mark.parametrize("other", [{"compile": True}, {"batch_norm": "sync"}], ids=str)
def test_what_it_cannot_be_combined_with_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ls.InputError, match="Activations cannot be computed again with"):
        ls.Towers(2, activation_checkpointing=("1",), **other)
