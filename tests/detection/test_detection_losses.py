"""Losses of boxes and classes, with the numbers of the object detection API's own tests."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

from lockstep.detection.blocks import (
    BootstrappedSigmoid,
    ClassificationLoss,
    L1LocalizationLoss,
    LocalizationLoss,
    PenaltyReducedLogisticFocalLoss,
    WeightedDiceClassificationLoss,
    WeightedGiou,
    WeightedIou,
    WeightedL2,
    WeightedLogitsSoftmax,
    WeightedSigmoid,
    WeightedSigmoidFocal,
    WeightedSmoothL1,
    WeightedSoftmax,
)
from lockstep.detection.losses import classification_loss, localization_loss, takes_boxes

CODES = tensor([[[2.5, 0, 0.4, 0], [0, 0, 0, 0], [0, 2.5, 0, 0.4]], [[3.5, 0, 0, 0], [0, 0.4, 0, 0.9], [0, 0, 1.5, 0]]])
BOXES = tensor([[[1.5, 0, 2.4, 1], [0, 0, 1, 1], [0, 0, 0.5, 0.25]]])
TRUTH = tensor([[[1.5, 0, 2.4, 1], [0, 0, 1, 1], [50, 50, 500.5, 100.25]]])
LOGITS = tensor(
    [
        [[-100.0, 100, -100], [100, -100, -100], [0, 0, -100], [-100, -100, 100]],
        [[-100, 0, 0], [-100, 100, -100], [-100, 100, -100], [100, -100, -100]],
    ]
)
CLASSES = tensor([[[0.0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1]], [[0, 0, 1], [0, 1, 0], [0, 1, 0], [1, 0, 0]]])
WEIGHTS = tensor([[1.0, 1, 0.5, 1], [1, 1, 1, 0]])
LOG_2 = math.log(2)


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (WeightedSmoothL1(), [[2 * 2.08, 0, 2.08], [0, 3 * 0.485, 0]]),
        (WeightedSmoothL1(3.0), [[2 * 3.205, 0, 3.205], [0, 3 * 0.485, 0]]),
        (WeightedL2(), [[4 * 3.205, 0, 3.205], [0, 9 * 0.485, 0]]),
        (L1LocalizationLoss(), [[2 * 2.9, 0, 2.9], [0, 3 * 1.3, 0]]),
    ],
)
def test_losses_of_codes(config: LocalizationLoss, expected: list[list[float]]) -> None:
    weights = tensor([[2.0, 1, 1], [0, 3, 0]])
    losses = localization_loss(config, CODES, torch.zeros_like(CODES), weights)
    torch.testing.assert_close(losses, tensor(expected))
    assert not takes_boxes(config)


@pytest.mark.parametrize(("config", "expected"), [(WeightedIou(), 2.0), (WeightedGiou(), 2 * 1.548825)])
def test_losses_of_boxes(config: LocalizationLoss, expected: float) -> None:
    losses = localization_loss(config, BOXES, TRUTH, tensor([[1.0, 0.5, 2.0]]))
    torch.testing.assert_close(losses, tensor([[0.0, 0.0, expected]]), atol=1e-4, rtol=0)
    assert takes_boxes(config)


def test_softmax_loss_takes_probabilities_and_class_numbers() -> None:
    expected = tensor([[0, 0, 0.5 * LOG_2, 0], [LOG_2, 0, 0, 0]])
    for targets in (CLASSES, CLASSES.argmax(-1)):
        torch.testing.assert_close(classification_loss(WeightedSoftmax(), LOGITS, targets, WEIGHTS), expected)
    of_classes = WEIGHTS[..., None].expand(-1, -1, 3)
    torch.testing.assert_close(classification_loss(WeightedSoftmax(), LOGITS, CLASSES, of_classes), expected)
    scaled = classification_loss(WeightedSoftmax(100.0), LOGITS, CLASSES, WEIGHTS)
    torch.testing.assert_close(scaled[0, 0], tensor([-1.0, 1.0, -1.0]).log_softmax(0)[1].neg())


def test_softmax_loss_against_a_teacher() -> None:
    teacher = torch.where(CLASSES == 1, 100.0, -100.0)
    losses = classification_loss(WeightedLogitsSoftmax(), LOGITS, teacher, WEIGHTS)
    torch.testing.assert_close(losses, classification_loss(WeightedSoftmax(), LOGITS, CLASSES, WEIGHTS))


def test_sigmoid_loss_is_summed_over_the_classes() -> None:
    losses = classification_loss(WeightedSigmoid(), LOGITS, CLASSES, WEIGHTS)
    torch.testing.assert_close(losses, tensor([[0, 0, LOG_2, 0], [2 * LOG_2, 0, 0, 0]]))
    of_classes = WEIGHTS[..., None] * tensor([1.0, 0.0, 1.0])
    losses = classification_loss(WeightedSigmoid(), LOGITS, CLASSES, of_classes)
    torch.testing.assert_close(losses, tensor([[0, 0, 0.5 * LOG_2, 0], [LOG_2, 0, 0, 0]]))


@pytest.mark.parametrize(("alpha", "factor"), [(None, 1.0), (0.25, 0.25), (1.0, 1.0), (0.0, 0.0)])
def test_focal_loss_of_an_object(alpha: float | None, factor: float) -> None:
    losses = classification_loss(
        WeightedSigmoidFocal(2.0, alpha), tensor([[[logit(0.9)]]]), tensor([[[1.0]]]), tensor([[1.0]])
    )
    assert losses.item() == pytest.approx(factor * 0.1**2 * -math.log(0.9), rel=1e-4)


def test_focal_loss_of_the_background() -> None:
    losses = classification_loss(
        WeightedSigmoidFocal(2.0, 0.25), tensor([[[logit(0.2)]]]), tensor([[[0.0]]]), tensor([[2.0]])
    )
    assert losses.item() == pytest.approx(2 * 0.75 * 0.2**2 * -math.log(0.8), rel=1e-4)


def test_focal_loss_without_gamma_is_cross_entropy() -> None:
    logits, targets = torch.linspace(-3, 3, 24).view(2, 4, 3), CLASSES
    focal = classification_loss(WeightedSigmoidFocal(0.0), logits, targets, WEIGHTS)
    torch.testing.assert_close(focal, classification_loss(WeightedSigmoid(), logits, targets, WEIGHTS))


@pytest.mark.parametrize("hard", [False, True])
def test_bootstrapped_loss_believes_the_model_in_part(hard: bool) -> None:
    logits, target = tensor([[[1.5]]]), tensor([[[0.0]]])
    own = 1.0 if hard else 1 / (1 + math.exp(-1.5))
    expected = F.binary_cross_entropy_with_logits(logits, tensor([[[0.4 * own]]]))
    losses = classification_loss(BootstrappedSigmoid(0.6, hard), logits, target, tensor([[1.0]]))
    torch.testing.assert_close(losses.sum(), expected)


def test_loss_of_heat_maps() -> None:
    config = PenaltyReducedLogisticFocalLoss(2.0, 4.0)
    logits, targets = tensor([[[0.0, 0.0, 1e4]]]), tensor([[[1.0, 0.5, 0.0]]])
    losses = classification_loss(config, logits, targets, tensor([[1.0]]))
    assert losses.item() == pytest.approx(0.25 * LOG_2 + 0.5**4 * 0.25 * LOG_2 - 0.9999**2 * math.log(1e-4), rel=1e-3)


@pytest.mark.parametrize("squared", [False, True])
def test_dice_loss_compares_all_anchors_of_an_image(squared: bool) -> None:
    logits = tensor([[[0.0], [logit(0.9)], [logit(0.1)]]])
    targets = tensor([[[0.0], [1.0], [0.0]]])
    either = 0.25 + 0.81 + 0.01 + 1 if squared else 0.5 + 0.9 + 0.1 + 1
    losses = classification_loss(WeightedDiceClassificationLoss(squared), logits, targets, torch.ones(1, 3))
    torch.testing.assert_close(losses, tensor([[1 - 2 * 0.9 / either]]))


ALL: list[ClassificationLoss] = [
    *(WeightedSigmoid(), WeightedSoftmax(), WeightedLogitsSoftmax(), BootstrappedSigmoid(0.5)),
    *(WeightedSigmoidFocal(), PenaltyReducedLogisticFocalLoss(2.0, 4.0), WeightedDiceClassificationLoss()),
]


@pytest.mark.parametrize("config", ALL, ids=lambda config: type(config).__name__)
def test_what_has_no_weight_has_no_loss_and_no_gradient(config: ClassificationLoss) -> None:
    logits = LOGITS.clone().requires_grad_()
    classification_loss(config, logits, CLASSES, torch.zeros(2, 4)).sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_gradients_are_finite_at_large_logits() -> None:
    for config in ALL:
        logits = (LOGITS * 100).requires_grad_()
        classification_loss(config, logits, CLASSES, torch.ones(2, 4)).sum().backward()
        assert isinstance(logits.grad, Tensor)
        assert logits.grad.isfinite().all(), config
