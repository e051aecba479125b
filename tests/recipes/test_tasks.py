"""What models are trained by and scored by: losses by name, with an auxiliary head and without; scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations.mixing import MixDraws
from lockstep.errors import InputError
from lockstep.losses import softmax_cross_entropy
from lockstep.metrics.detection_sets import DETECTION_METRICS
from lockstep.recipes.data import DetectionData
from lockstep.recipes.parts import CrossEntropy, DetectionEvaluation, DetectionMetrics, Evaluate
from lockstep.recipes.tasks import CONFUSION, MISTAKES, Classification, Detection

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 1.0, 5.0]])
LABELS = torch.tensor([0, 2, 1])


class Heads(NamedTuple):
    logits: Tensor
    auxiliary_logits: Tensor | None


class ThreeHeads(NamedTuple):
    """As torchvision's GoogLeNet has them, in training."""

    logits: Tensor
    aux_logits2: Tensor | None
    aux_logits1: Tensor | None


class Fixed(nn.Module):
    """Returns what it was made with."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images: Tensor) -> Any:
        return self.outputs


def batch_of(labels: Tensor = LABELS) -> ls.Batch:
    count = len(labels)
    return ls.Batch({"image": torch.zeros(count), "label": labels}, position=0, batch_size=count, towers=range(1))


def task(top: tuple[int, ...] = (1,), **loss: float) -> Classification:
    return Classification(lambda batch: batch["image"], CrossEntropy(**loss), top)


def test_one_head_has_one_loss() -> None:
    losses, metrics = task().losses(Fixed(LOGITS), batch_of())
    assert [*losses] == ["cross_entropy"]
    expected = -LOGITS.log_softmax(1)[torch.arange(3), LABELS].mean()
    assert losses["cross_entropy"].item() == pytest.approx(expected.item())
    assert {name: value.item() for name, value in metrics.items()} == {"top1": pytest.approx(1 / 3)}


@pytest.mark.parametrize("weight", [0.0, 0.4, 2.0])
def test_an_auxiliary_head_counts_by_its_weight(weight: float) -> None:
    losses, _ = task(auxiliary_weight=weight).losses(Fixed(Heads(LOGITS, 2 * LOGITS)), batch_of())
    assert losses["cross_entropy"].item() == pytest.approx(softmax_cross_entropy(LOGITS, LABELS).item())
    expected = weight * softmax_cross_entropy(2 * LOGITS, LABELS).item()
    assert losses["auxiliary_cross_entropy"].item() == pytest.approx(expected)


def test_several_auxiliary_heads_add_up() -> None:
    losses, _ = task(auxiliary_weight=0.3).losses(Fixed(ThreeHeads(LOGITS, 2 * LOGITS, 3 * LOGITS)), batch_of())
    both = sum(softmax_cross_entropy(times * LOGITS, LABELS).item() for times in (2, 3))
    assert losses["auxiliary_cross_entropy"].item() == pytest.approx(0.3 * both)


@pytest.mark.parametrize("outputs", [Heads(LOGITS, None), ThreeHeads(LOGITS, None, None), LOGITS])
def test_missing_auxiliary_heads_have_no_loss(outputs: Any) -> None:
    assert [*task().losses(Fixed(outputs), batch_of())[0]] == ["cross_entropy"]


def test_both_heads_have_smoothed_labels() -> None:
    """(1 - 0.1) * p + 0.1 / 4, over all four classes."""
    losses, _ = task(label_smoothing=0.1, auxiliary_weight=1.0).losses(Fixed(Heads(LOGITS, LOGITS)), batch_of())
    smooth = 0.9 * nn.functional.one_hot(LABELS, 4) + 0.1 / 4
    expected = -(smooth * LOGITS.log_softmax(1)).sum(1).mean().item()
    assert losses["cross_entropy"].item() == pytest.approx(expected)
    assert losses["auxiliary_cross_entropy"].item() == pytest.approx(expected)


def test_one_class_cannot_be_wrong() -> None:
    losses, metrics = task(label_smoothing=0.1).losses(Fixed(torch.ones(2, 1)), batch_of(torch.zeros(2).long()))
    assert losses["cross_entropy"].item() == 0
    assert metrics["top1"].item() == 1


def test_mixed_images_have_mixed_labels() -> None:
    mix = MixDraws(mixup=1.0)
    numbers = torch.tensor([[0.75, 0, 0, 0, 0], [1.0, 0, 0, 0, 0], [0.5, 0, 0, 0, 0]])
    fields = {"image": torch.zeros(3, 3, 2, 2), "image.mix": numbers, "label": LABELS}
    batch = ls.Batch(fields, position=0, batch_size=3, towers=range(1))
    mixing = Classification(lambda batch: batch["image"], CrossEntropy(), mixing=mix)
    losses, metrics = mixing.losses(Fixed(Heads(LOGITS, LOGITS)), batch)
    right = nn.functional.one_hot(LABELS, 4).double()
    share = numbers[:, :1].double()
    expected = -((share * right + (1 - share) * right.flip(0)) * LOGITS.log_softmax(1)).sum(1).mean().item()
    assert losses["cross_entropy"].item() == pytest.approx(expected)
    assert losses["auxiliary_cross_entropy"].item() == pytest.approx(0.4 * expected)
    assert metrics["top1"].item() == pytest.approx(1 / 3)


def test_the_gradient_reaches_both_heads() -> None:
    logits, auxiliary = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    losses, metrics = task().losses(Fixed(Heads(logits, auxiliary)), batch_of())
    torch.stack([*losses.values()]).sum().backward()
    assert logits.grad is not None
    assert auxiliary.grad is not None
    assert torch.allclose(auxiliary.grad, 0.4 * logits.grad)
    assert not metrics["top1"].requires_grad


# Scores ---------------------------------------------------------------------------------------------------------------


def test_a_class_is_among_so_many_with_the_highest_scores() -> None:
    """The third label's score is that of two others: ties count as inside."""
    given = task((1, 3, 4))
    assert given.score_names == ["top1", "top3", "top4"]
    scores = given.score(Fixed(LOGITS), batch_of())
    assert {name: value.tolist() for name, value in scores.items()} == {
        "top1": [1, 0, 0], "top3": [1, 1, 1], "top4": [1, 1, 1]
    }  # fmt: skip


def test_heads_beside_the_first_are_not_scored() -> None:
    alone, beside = (task((1, 2)).score(Fixed(each), batch_of()) for each in (LOGITS, Heads(LOGITS, -LOGITS)))
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def test_in_detail_it_says_what_was_taken_for_what_and_how_wrong() -> None:
    found = task((1, 2), label_smoothing=0.1).score_in_detail(Fixed(LOGITS), batch_of())
    assert [*found] == ["top1", "top2", CONFUSION, MISTAKES]
    predicted, labels = found[CONFUSION]
    assert (predicted.tolist(), labels.tolist()) == ([0, 1, 3], [0, 2, 1])
    loss, *rest = found[MISTAKES]
    assert torch.allclose(loss, softmax_cross_entropy(LOGITS, LABELS, reduction="none")), "without smoothing"
    assert [each.tolist() for each in rest] == [[0, 1, 3], [0, 2, 1], [0, 1, 2]]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: CrossEntropy(label_smoothing=1.0), "label_smoothing is out of range."),
        (lambda: CrossEntropy(label_smoothing=-0.1), "label_smoothing is out of range."),
        (lambda: CrossEntropy(label_smoothing="0.1"), "label_smoothing is of the wrong type."),  # type: ignore[arg-type]
        (lambda: CrossEntropy(auxiliary_weight=-1), "auxiliary_weight is out of range."),
        (lambda: CrossEntropy(auxiliary_weight=float("nan")), "auxiliary_weight is out of range."),
        (lambda: Evaluate(top=()), "There is nothing to score."),
        (lambda: Evaluate(top=(0,)), "top[0] is out of range."),
        (lambda: Evaluate(top=(1.0,)), "top[0] is of the wrong type."),  # type: ignore[arg-type]
        (lambda: Evaluate(top=5), "top is of the wrong type."),  # type: ignore[arg-type]
        (lambda: Evaluate(top=(1, True)), "top[1] is of the wrong type."),
        (lambda: Evaluate(patience=0), "patience is out of range."),
        (lambda: Evaluate(examples=0), "examples is out of range."),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, what: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.what == what


@pytest.mark.parametrize("name", DETECTION_METRICS)
def test_the_main_score_of_a_detector_is_one_that_its_metric_computes(name: DetectionMetrics) -> None:
    detection = Detection(DetectionData(), 3, DetectionEvaluation(metrics=(name,)))
    assert detection.main_score == detection.score_names[0]
