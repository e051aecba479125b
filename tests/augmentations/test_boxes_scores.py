from __future__ import annotations

import pytest
import torch
from pixels_golden import GOLDEN, some_draws

from lockstep.augmentations.boxes import ConvertClassLogitsToSoftmax
from lockstep.errors import InputError
from lockstep.ragged import Ragged


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_probabilities_are_those_of_tensorflow(temperature: float) -> None:
    logits = Ragged(torch.from_numpy(GOLDEN["logits"]), torch.tensor([3, 0, 4]))
    option = ConvertClassLogitsToSoftmax(temperature)
    scores = option({"multiclass_scores": logits}, some_draws(3))["multiclass_scores"]
    torch.testing.assert_close(scores.values, torch.from_numpy(GOLDEN[f"softmax {temperature}"]), rtol=0, atol=1e-6)
    assert scores.lengths.tolist() == [3, 0, 4]


def test_the_numbers_of_the_reference() -> None:
    logits = [torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1000.0, 1.0]])]
    scores = ConvertClassLogitsToSoftmax(temperature=2.0)({"multiclass_scores": logits}, some_draws(2))
    expected = torch.tensor([[0.62245935, 0.37754068], [0.5, 0.5], [1.0, 0.0]])
    torch.testing.assert_close(scores["multiclass_scores"].values, expected)


def test_without_scores_it_says_so() -> None:
    with pytest.raises(InputError, match="no scores of classes to convert"):
        ConvertClassLogitsToSoftmax()({"boxes": []}, some_draws(0))
