from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.losses import L1, L2, softmax_cross_entropy
from lockstep.losses.regularization import Regularizer, _by_norms, _by_tensor

each_kind = pytest.mark.parametrize("kind", [L1, L2])


class Net(nn.Module):
    """Convolution, batch norm and a head: three weights, of them one of one dimension, and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.conv(images)).flatten(1))
        return logits


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters())


def random_gradients(net: nn.Module) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in net.parameters()]


def test_l2_is_half_the_sum_of_squares_of_weights_alone() -> None:
    net = make_net()
    expected = 4e-5 * (net.conv.weight.square().sum() + net.head.weight.square().sum()) / 2
    bound = L2(4e-5).bind(parameters_of(net))
    assert bound.parameter_names == ("conv.weight", "head.weight")
    assert bound.name == "l2"
    for loss in (L2(4e-5)(net), torch.tensor(bound.loss(), dtype=torch.float64)):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_l1_is_the_sum_of_sizes_of_weights_alone() -> None:
    net = make_net()
    expected = 4e-5 * (net.conv.weight.abs().sum() + net.head.weight.abs().sum())
    bound = L1(4e-5).bind(parameters_of(net))
    assert bound.name == "l1"
    for loss in (L1(4e-5)(net), torch.tensor(bound.loss(), dtype=torch.float64)):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@each_kind
def test_the_loss_follows_the_parameters(kind: type[Regularizer]) -> None:
    net = make_net()
    bound = kind(0.5).bind(parameters_of(net))
    with torch.no_grad():
        net.conv.weight.zero_()
        net.head.weight.fill_(2.0)
    net.head.weight.data = net.head.weight.data.clone().add_(1.0)  # what a change of memory format does
    assert bound.loss() == pytest.approx(0.5 * 48 * (3.0 if kind is L1 else 4.5))


@each_kind
def test_the_gradients_added_are_those_of_the_loss(kind: type[Regularizer]) -> None:
    net = make_net()
    with torch.no_grad():
        net.head.weight[0] = 0.0
    gradients = random_gradients(net)
    own = torch.autograd.grad(kind(0.3)(net), list(net.parameters()), allow_unused=True)
    added = kind(0.3).bind(parameters_of(net)).add_gradients(gradients)
    for name, total, gradient, penalty in zip(parameters_of(net), added, gradients, own, strict=True):
        assert total is not None
        assert gradient is not None
        assert (penalty is not None) == (name in ("conv.weight", "head.weight"))
        torch.testing.assert_close(total, gradient if penalty is None else gradient + penalty, rtol=1e-12, atol=1e-15)


@each_kind
def test_no_gradient_is_changed_in_place(kind: type[Regularizer]) -> None:
    net = make_net()
    gradients = random_gradients(net)
    kept = [g.clone() for g in gradients if g is not None]
    added = kind(0.3).bind(parameters_of(net)).add_gradients(gradients)
    for gradient, before, after in zip(gradients, kept, added, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, before)
        assert after is gradient or (after is not None and after.data_ptr() != gradient.data_ptr())
    assert added[0] is not gradients[0]
    assert not any(gradient.requires_grad for gradient in added if gradient is not None)


@each_kind
@pytest.mark.parametrize("owned", [False, True])
def test_a_parameter_without_a_gradient_gets_that_of_the_penalty(kind: type[Regularizer], owned: bool) -> None:
    net = make_net()
    bound, gradients = kind(0.3).bind(parameters_of(net)), random_gradients(net)
    (expected,) = torch.autograd.grad(kind(0.3)(net), [net.conv.weight])
    complete = bound.add_gradients(gradients)
    gradients[0] = None
    added = bound.add_gradients(gradients, owned=owned)
    torch.testing.assert_close(added[0], expected)
    torch.testing.assert_close(added[1:], complete[1:], rtol=0, atol=0)
    nothing = bound.add_gradients([None] * len(gradients), owned=owned)
    assert [g is not None for g in nothing] == [name in bound.parameter_names for name in parameters_of(net)]


@each_kind
def test_gradients_keep_the_memory_layout_of_their_parameters(kind: type[Regularizer]) -> None:
    net = make_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    gradients: list[Tensor | None] = [torch.ones_like(p) for p in net.parameters()]
    added = kind(0.3).bind(parameters_of(net)).add_gradients(gradients)
    assert [g.stride() for g in added if g is not None] == [p.stride() for p in net.parameters()]
    assert not net.conv.weight.is_contiguous()


@each_kind
@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        (None, ["conv.weight", "head.weight"]),
        (r"bias$", ["conv.bias", "norm.bias", "head.bias"]),
        ("head.weight", ["head.weight"]),
        ((r"^norm\.", "conv.bias"), ["conv.bias", "norm.weight", "norm.bias"]),
    ],
    ids=str,
)
def test_parameters_are_chosen_by_name(kind: type[Regularizer], pattern: Any, chosen: list[str]) -> None:
    net = make_net()
    value = kind(0.1, pattern)
    bound = value.bind(parameters_of(net))
    assert bound.parameter_names == tuple(chosen)
    alone = value.penalty([parameters_of(net)[name] for name in chosen])
    torch.testing.assert_close(value(net), alone)
    assert bound.loss() == pytest.approx(alone.item(), rel=1e-6)
    before = random_gradients(net)
    pairs = zip(net.named_parameters(), before, bound.add_gradients(before), strict=True)
    assert [name for (name, _), gradient, total in pairs if total is not gradient] == chosen


def test_frozen_parameters_have_no_penalty() -> None:
    net = make_net()
    net.conv.requires_grad_(False)
    torch.testing.assert_close(L2(1.0)(net), net.head.weight.square().sum() / 2)
    with pytest.raises(InputError, match=r"A pattern of L2 matches no parameter") as caught:
        L2(1.0, r"^conv\.")(net)
    caught.match(r"given: +'\^conv\\\\.'")
    caught.match(r"expected: one that is found in a name such as 'norm.weight'")


@each_kind
def test_gradients_are_those_of_differences(kind: type[Regularizer]) -> None:
    weight = torch.tensor([[0.5, -2.0], [1.5, 0.7]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: kind(0.3).penalty([w, 2.0 * w]), (weight,))


@each_kind
def test_both_ways_to_add_up_give_one_loss_and_one_gradient(kind: type[Regularizer]) -> None:
    power = 1 if kind is L1 else 2
    tensors = [torch.randn(3, 4, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)]
    for tensor in tensors:
        tensor.requires_grad_()
    totals = [add_up(tensors, power) for add_up in (_by_tensor, _by_norms)]
    torch.testing.assert_close(*totals, rtol=1e-12, atol=0)
    ours, others = (torch.autograd.grad(total, tensors) for total in totals)
    torch.testing.assert_close(ours, others, rtol=1e-12, atol=1e-15)


@each_kind
def test_the_loss_of_a_large_tensor_does_not_drift(kind: type[Regularizer]) -> None:
    weights = torch.full((1000, 1000), 0.1)
    exact = 0.1 * 1e6 * (0.1 if kind is L1 else 0.01 / 2)
    assert kind(0.1).penalty([weights]).item() == pytest.approx(exact, rel=1e-6)


@each_kind
def test_16_bit_parameters_are_added_up_in_float32_and_keep_16_bit_gradients(kind: type[Regularizer]) -> None:
    net = make_net(torch.bfloat16)
    bound = kind(0.5).bind(parameters_of(net))
    assert bound.loss() == pytest.approx(kind(0.5)(make_net().bfloat16().double()).item(), rel=1e-6)
    assert {g.dtype for g in bound.add_gradients(random_gradients(net)) if g is not None} == {torch.bfloat16}


@each_kind
@pytest.mark.parametrize("weight", [0.0, -1e-4, float("inf"), float("nan")])
def test_a_weight_that_makes_no_penalty_is_refused(kind: type[Regularizer], weight: float) -> None:
    with pytest.raises(InputError, match=r"weight is out of range") as caught:
        kind(weight)
    caught.match(rf"given: +weight={weight}")
    caught.match(r"expected: above 0, finite")
    caught.match(r"hint: +give a weight such as 4e-5")


@each_kind
def test_a_penalty_without_parameters_is_refused(kind: type[Regularizer]) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__} has no parameter to penalise") as caught:
        kind(0.1).bind({"scale": torch.ones(3)})
    caught.match(r"given: +pattern=None, parameters 'scale'")
    caught.match(r"expected: a trained parameter of two or more dimensions")
    caught.match(rf"hint: +name what is meant, as in {kind.__name__}\(0.1, r'weight\$'\)")


def test_penalties_are_values() -> None:
    l1: Regularizer = L1(4e-5)
    assert L2(4e-5) == L2(4e-5)
    assert l1 != L2(4e-5)
    assert repr(L1(0.1, "conv")) == "L1(weight=0.1, pattern='conv')"


# In a loss function ---------------------------------------------------------------------------------------------------


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """What an Inception network is trained on: a main and an auxiliary loss, smoothed, and penalties."""
    logits = model(batch["image"])
    return {
        "cross_entropy": softmax_cross_entropy(logits, batch["label"], label_smoothing=0.1),
        "auxiliary": 0.4 * softmax_cross_entropy(-logits, batch["label"], label_smoothing=0.1),
        "l2": L2(0.5)(model),
        "l1": L1(0.25)(model),
    }


class Head(nn.Linear):
    """No batch norm: its statistics would depend on the towers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input.flatten(1))


def make_head() -> Head:
    torch.manual_seed(0)
    return Head(8, 4, dtype=torch.float64)


IMAGES = torch.randn(8, 2, 2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 1, 2])


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_a_penalty_counts_once_however_many_towers_there_are(towers: int) -> None:
    head, by_hand = make_head(), make_head()
    expected = losses(by_hand, ls.Batch({"image": IMAGES, "label": LABELS}, position=0, batch_size=8, towers=range(1)))
    sum(expected.values(), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    loader = ls.data.Loader(ls.data.Arrays({"image": IMAGES, "label": LABELS}), batch_size=8, order="sequential")
    state = ls.TrainState(head, ls.optim.SGD(lr=0.1))
    report = ls.train(state, losses, loader, ls.Towers(towers), until=ls.Steps(1))
    assert report is not None
    assert dict(report.losses) == pytest.approx({name: loss.item() for name, loss in expected.items()}, rel=1e-12)
    assert report.total == pytest.approx(sum(loss.item() for loss in expected.values()), rel=1e-12)
    for parameter, other in zip(head.parameters(), by_hand.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(parameter, other - 0.1 * other.grad, rtol=1e-12, atol=1e-15)
