from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.models.inception_v3 import AuxiliaryHead, ConvolutionBatchNorm, InceptionC, InceptionV3, Layers

LAYERS = Layers(InceptionV3(depth_multiplier=0.1))


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def with_weights(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module.double()


def test_average_pools_leave_the_padding_out_unless_told() -> None:
    ones = torch.ones(1, 2, 4, 4)
    assert torch.equal(LAYERS.average_pool(ones), ones)
    counted = Layers(InceptionV3(depth_multiplier=0.1, average_over_padding=True)).average_pool(ones)
    torch.testing.assert_close(counted[0, 0, 0], torch.tensor([4 / 9, 6 / 9, 6 / 9, 4 / 9]))


def test_a_convolution_is_normalised_shifted_and_cut_at_zero() -> None:
    layer = with_weights(ConvolutionBatchNorm(LAYERS, 3, 4, 3, stride=2))
    given = values(5, 3, 9, 9)
    plain = nn.functional.conv2d(given, layer.conv.weight, stride=2)
    mean, variance = plain.mean((0, 2, 3), keepdim=True), plain.var((0, 2, 3), correction=0, keepdim=True)
    expected = ((plain - mean) / (variance + 0.001).sqrt() + layer.bn.bias[:, None, None]).clamp(min=0)
    torch.testing.assert_close(layer(given), expected)
    torch.testing.assert_close(layer.bn.running_mean, 0.0003 * mean.flatten())


def test_no_convolution_has_fewer_than_sixteen_channels() -> None:
    assert [LAYERS.depth(channels) for channels in (32, 160, 170, 2048)] == [16, 16, 17, 204]


def test_branches_are_joined_in_the_order_of_the_reference() -> None:
    block = with_weights(InceptionC(LAYERS, 16, width=128)).eval()
    given = values(1, 16, 5, 5)
    joined = block(given)
    assert joined.shape == (1, block.outputs, 5, 5)
    torch.testing.assert_close(joined[:, :19], block.branch1x1(given))
    torch.testing.assert_close(joined[:, -19:], block.branch_pool(LAYERS.average_pool(given)))


@pytest.fixture(scope="module")
def head() -> nn.Module:
    return with_weights(AuxiliaryHead(LAYERS, 8, num_classes=3)).eval()


def test_the_full_size_convolution_takes_all_that_is_left_of_17x17(head: nn.Module) -> None:
    given = values(2, 8, 17, 17)
    hidden = head.conv0(nn.functional.avg_pool2d(given, 5, stride=3))
    assert hidden.shape == (2, 16, 5, 5)
    scores = head.fc(head.conv1(hidden)[:, :, 0, 0])
    torch.testing.assert_close(head(given), scores)


@pytest.mark.parametrize(
    ("side", "left"), [(1, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 2), (11, 3), (14, 4)], ids=lambda n: str(n)
)
def test_on_small_maps_the_kernel_is_cut(head: nn.Module, side: int, left: int) -> None:
    given = values(2, 8, side, side)
    hidden = head.conv0(nn.functional.avg_pool2d(given, min(side, 5), stride=3))
    assert hidden.shape[2:] == (left, left)
    begin = (5 - left) // 2
    kernel = head.conv1.conv.weight[:, :, begin : begin + left, begin : begin + left]
    expected = head.fc(torch.relu(head.conv1.bn(nn.functional.conv2d(hidden, kernel)))[:, :, 0, 0])
    torch.testing.assert_close(head(given), expected)


def test_on_large_maps_the_mean_over_the_places_is_scored(head: nn.Module) -> None:
    given = values(1, 8, 26, 17)
    hidden = head.conv1(head.conv0(nn.functional.avg_pool2d(given, 5, stride=3)))
    assert hidden.shape[2:] == (4, 1)
    torch.testing.assert_close(head(given), head.fc(hidden.mean((2, 3))))


def test_the_head_is_one_graph_for_torch_compile(head: nn.Module) -> None:
    given = values(2, 8, 7, 7)
    assert torch.equal(torch.compile(head, backend="eager", fullgraph=True)(given), head(given))
