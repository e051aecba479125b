"""EfficientNets have the published numbers of parameters, and leave out images in training alone."""

from __future__ import annotations

import pytest
import torch

from lockstep.models.efficientnet import Size, StochasticDepth, efficientnet_features


@pytest.mark.parametrize(
    ("size", "published", "last"), [(0, 5_288_548, 320), (1, 7_794_184, 320), (2, 9_109_994, 352), (7, 66_347_960, 640)]
)
def test_the_number_of_parameters_is_the_published_one(size: Size, published: int, last: int) -> None:
    with torch.device("meta"):
        features = efficientnet_features(size)
    top = last * 4 * last + 2 * 4 * last  # a convolution and its norm, then the classifier of 1000 classes
    assert sum(each.numel() for each in features.parameters()) == published - top - (4 * last + 1) * 1000


def test_whole_images_are_left_out_in_training() -> None:
    layer, hidden = StochasticDepth(0.25), torch.ones(400, 2, 3, 3)
    torch.manual_seed(0)
    dropped = layer(hidden)
    assert dropped.flatten().unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert all(len(each.unique()) == 1 for each in dropped)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.06)
    assert layer.eval()(hidden) is hidden
