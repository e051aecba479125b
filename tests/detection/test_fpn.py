"""The feature pyramid: its levels, and what they see."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor, nn

from lockstep.detection.fpn import FeaturePyramidNetwork, LastLevelMaxPool, LastLevelP6P7

CHANNELS = (4, 5, 6)


def maps() -> dict[str, Tensor]:
    drawn = Generator().manual_seed(1)
    sizes = zip(CHANNELS, (19, 10, 5), (23, 12, 6), strict=True)
    return {str(index): torch.randn(2, *size, generator=drawn) for index, size in enumerate(sizes)}


def pyramid(extra: LastLevelMaxPool | LastLevelP6P7 | None = None) -> FeaturePyramidNetwork:
    return FeaturePyramidNetwork(CHANNELS, 8, extra, generator=Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("extra", "added"),
    [
        (None, {}),
        (LastLevelMaxPool(), {"pool": (3, 3)}),
        (LastLevelP6P7(8, 8), {"p6": (3, 3), "p7": (2, 2)}),
        (LastLevelP6P7(6, 8), {"p6": (3, 3), "p7": (2, 2)}),
    ],
)
def test_levels_have_the_names_and_sizes_of_the_maps(
    extra: LastLevelMaxPool | LastLevelP6P7 | None, added: dict[str, tuple[int, int]]
) -> None:
    levels = pyramid(extra)(maps())
    expected = {"0": (19, 23), "1": (10, 12), "2": (5, 6), **added}
    assert {name: tuple(level.shape[2:]) for name, level in levels.items()} == expected
    assert {level.shape[1] for level in levels.values()} == {8}


def test_a_level_sees_coarser_maps_and_no_finer_ones() -> None:
    given = maps()
    inputs = {name: each.requires_grad_() for name, each in given.items()}
    middle = pyramid()(inputs)["1"].sum()
    gradients = torch.autograd.grad(middle, [*inputs.values()], allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [False, True, True]


def test_a_coarser_map_is_added_by_its_nearest_values() -> None:
    net = FeaturePyramidNetwork((1, 1), 1)
    with torch.no_grad():
        for block in (*net.inner_blocks, *net.layer_blocks):
            nn.init.dirac_(block[0].weight)
    fine, coarse = torch.zeros(1, 1, 3, 3), torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    levels = net({"fine": fine, "coarse": coarse})
    assert levels["fine"][0, 0].tolist() == [[1, 1, 2], [1, 1, 2], [3, 3, 4]]


def test_the_extra_level_of_few_channels_is_made_of_the_last_map() -> None:
    of_pyramid, of_maps = LastLevelP6P7(8, 8), LastLevelP6P7(6, 8)
    levels = pyramid(of_pyramid)(maps())
    assert torch.equal(levels["p6"], of_pyramid.p6(levels["2"]))
    assert torch.equal(pyramid(of_maps)(maps())["p6"], of_maps.p6(maps()["2"]))


def test_the_first_weights_depend_on_the_generator_alone() -> None:
    stream = torch.get_rng_state()
    first, second = pyramid(LastLevelP6P7(8, 8)).state_dict(), pyramid(LastLevelP6P7(8, 8)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), stream)
