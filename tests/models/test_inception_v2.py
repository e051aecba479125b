"""Inception-v2: first weights that are TF-Slim's own; that its numbers are TensorFlow's is tested in tests/golden."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.models.inception_v2 import draw_own_weights, inception_v2_features


def test_some_layers_have_first_weights_of_their_own_and_others_keep_theirs() -> None:
    net = inception_v2_features()
    for parameter in net.parameters():
        nn.init.constant_(parameter, 7)
    draw_own_weights(net, torch.Generator().manual_seed(0))
    # A normal distribution that is cut at two standard deviations keeps 0.88 of one.
    found = {name: each.std().item() / 0.88 for name, each in net.named_parameters() if each.ndim == 4}
    drawn = {name: stddev for name, stddev in found.items() if stddev}
    assert len(drawn) == 3 + 2 * 8 + 2 * 2 + 8
    assert drawn["Conv2d_1a_7x7.depthwise.weight"] == pytest.approx(1, rel=0.1)
    assert drawn["Conv2d_2b_1x1.0.weight"] == pytest.approx(0.1, rel=0.05)
    assert drawn["Mixed_5c.Branch_3.Conv2d_0b_1x1.0.weight"] == pytest.approx(0.1, rel=0.02)
    assert drawn["Mixed_3b.Branch_2.Conv2d_0a_1x1.0.weight"] == pytest.approx(0.09, rel=0.02)
    assert drawn["Mixed_5a.Branch_0.Conv2d_0a_1x1.0.weight"] == pytest.approx(0.09, rel=0.02)
    assert not any("3x3" in name or "Mixed_3b.Branch_0" in name for name in drawn)


def test_channels_are_scaled_but_for_those_that_remain() -> None:
    net = inception_v2_features(depth=lambda channels: max(channels // 8, 16)).eval()
    with torch.no_grad():
        assert net(torch.zeros(1, 3, 65, 33)).shape == (1, 44 + 40 + 28 + 16, 3, 2)
        assert net[0](torch.zeros(1, 3, 65, 33)).shape == (1, 16, 33, 17)
