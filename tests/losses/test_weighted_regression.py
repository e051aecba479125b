from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.errors import InputError
from lockstep.losses import absolute_difference, cosine_distance, squared_error

PREDICTIONS = torch.tensor([[4, 8, 12], [8, 1, 3]])
LABELS = torch.tensor([[1, 9, 2], [-5, -2, 6]])


@pytest.mark.parametrize(
    ("weights", "absolute", "squared"),
    [
        (1.0, 5.5, 49.5),
        (2.3, 5.5 * 2.3, 49.5 * 2.3),
        (torch.tensor(2.3), 5.5 * 2.3, 49.5 * 2.3),
        (torch.tensor([1.2, 0.0]), 5.6, 1.2 * 110 / 3),
        (torch.tensor([1.2, 3.4]), (1.2 * 14 + 3.4 * 19) / 6, 767.8 / 6),
        (torch.tensor([[1.2], [3.4]]), (1.2 * 14 + 3.4 * 19) / 6, 767.8 / 6),
        (torch.tensor([[3, 6, 5], [0, 4, 2]]), 16.6, 587 / 5),
        (torch.tensor([[0, 0, 0], [0, 0, 2]]), 6.0, 18.0),
        (torch.zeros(2, 3), 0.0, 0.0),
    ],
    ids=str,
)
def test_differences_are_those_of_the_reference(weights: Any, absolute: float, squared: float) -> None:
    assert absolute_difference(PREDICTIONS, LABELS, weights=weights).item() == pytest.approx(absolute, rel=1e-6)
    assert squared_error(PREDICTIONS, LABELS, weights=weights).item() == pytest.approx(squared, rel=1e-6)


def test_right_predictions_cost_nothing() -> None:
    assert absolute_difference(LABELS, LABELS).item() == 0.0
    assert squared_error(LABELS, LABELS).item() == 0.0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("ours", "torchs"), [(absolute_difference, F.l1_loss), (squared_error, F.mse_loss)])
def test_values_and_gradients_are_torchs_own(ours: Any, torchs: Any, reduction: str) -> None:
    generator = torch.Generator().manual_seed(2)
    predictions = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    both = [loss(predictions, labels, reduction=reduction) for loss in (ours, torchs)]
    torch.testing.assert_close(*both, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value.sum(), predictions)[0] for value in both]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


# Six vectors of length 1: three pairs alike, two at right angles, two opposite.
DIRECTIONS = torch.tensor([[[1, 0, 0], [0, 0, -1]], [[1, 0, 0], [1, 0, 0]], [[0, 0, -1], [1, 0, 0]]])
RIGHT_ONES = torch.tensor([[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [1, 0, 0]], [[0, 0, 1], [0, 1, 0]]])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (1.0, 1.0),
        (torch.tensor([1, 0, 0]), 1.0),
        (torch.tensor([[1, 0], [0, 1], [1, 1]]), 3 / 4),
        (torch.tensor([[[1], [0]], [[0], [1]], [[1], [1]]]), 3 / 4),
        (torch.zeros(3), 0.0),
        (torch.zeros(3, 2), 0.0),
    ],
    ids=str,
)
def test_cosine_distances_are_those_of_the_reference(weights: Any, expected: float) -> None:
    assert cosine_distance(DIRECTIONS, RIGHT_ONES, dim=2, weights=weights).item() == pytest.approx(expected)
    assert cosine_distance(RIGHT_ONES, RIGHT_ONES, dim=-1, weights=weights).item() == 0.0


def test_the_dimension_of_the_vectors_is_gone() -> None:
    distances = cosine_distance(DIRECTIONS, RIGHT_ONES, dim=2, reduction="none")
    assert distances.tolist() == [[0.0, 2.0], [1.0, 0.0], [2.0, 1.0]]
    turned = cosine_distance(DIRECTIONS.movedim(2, 0), RIGHT_ONES.movedim(2, 0), dim=0, reduction="none")
    assert torch.equal(turned, distances)


def test_cosine_distance_is_torchs_own_of_vectors_of_length_one() -> None:
    generator = torch.Generator().manual_seed(4)
    ours, theirs = (F.normalize(torch.randn(5, 3, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))
    expected = 1 - F.cosine_similarity(ours, theirs, dim=1)
    torch.testing.assert_close(cosine_distance(ours, theirs, dim=1, reduction="none"), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dim", [3, -4])
def test_a_dimension_that_is_not_there_is_refused(dim: int) -> None:
    with pytest.raises(InputError, match=r"dim is out of range") as caught:
        cosine_distance(DIRECTIONS, RIGHT_ONES, dim=dim)
    caught.match(rf"given: +dim={dim}")
    caught.match(r"expected: -3 or more, below 3")


def test_directions_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(InputError, match=r"given: +predictions of shape \(3, 2, 3\), labels of shape \(2, 3\)"):
        cosine_distance(DIRECTIONS, RIGHT_ONES[0], dim=1)
