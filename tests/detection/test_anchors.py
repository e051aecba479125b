"""Anchors, with the numbers of the object detection API's own tests."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from lockstep.detection.anchors import anchors, anchors_per_cell
from lockstep.detection.blocks import (
    AnchorGrid,
    DefaultBoxGenerator,
    FlexibleGridAnchorGenerator,
    GridAnchorGenerator,
    MultiscaleAnchorGenerator,
    PyramidAnchorGenerator,
    SsdAnchorGenerator,
)
from lockstep.errors import InputError

SSD_MAPS = [(38, 38), (19, 19), (10, 10), (5, 5), (3, 3), (1, 1)]
RATIOS = (1.0, 2.0, 0.5, 3.0, 1 / 3)


def close(made: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(made, tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-3)


def test_a_grid_has_each_ratio_with_each_scale() -> None:
    generator = GridAnchorGenerator(256, 256, 16, 16, 7, -3, (0.5, 1.0, 2.0), (0.25, 1.0, 4.0))
    expected = [
        *([-121, -35, 135, 29], [-249, -67, 263, 61], [-505, -131, 519, 125]),
        *([-57, -67, 71, 61], [-121, -131, 135, 125], [-249, -259, 263, 253]),
        *([-25, -131, 39, 125], [-57, -259, 71, 253], [-121, -515, 135, 509]),
    ]
    close(anchors(generator, [(1, 1)], (100, 100))[0], [list(map(float, row)) for row in expected])


def test_cells_follow_each_other_row_by_row_with_all_their_anchors() -> None:
    generator = GridAnchorGenerator(10, 10, 19, 20, scales=(0.5, 1.0), aspect_ratios=(1.0,))
    centres = anchors(generator, [(2, 2)], (40, 40))[0].view(4, 2, 2, 2).mean(2)
    assert centres.tolist() == [[[y, x]] * 2 for y in (0, 19) for x in (0, 20)]


def test_an_ssd_has_three_anchors_a_cell_in_its_finest_map() -> None:
    made = anchors(SsdAnchorGenerator(aspect_ratios=RATIOS), SSD_MAPS, (300, 300))
    assert sum(map(len, made)) == 7308
    first = made[0][:3]
    assert (first[:, 2:] - first[:, :2]).div(300).square().prod(1).sqrt().tolist() == pytest.approx([0.01, 0.04, 0.04])
    assert ((first[:, 3] - first[:, 1]) / (first[:, 2] - first[:, 0])).tolist() == pytest.approx([1, 2, 0.5])
    everywhere = SsdAnchorGenerator(aspect_ratios=RATIOS, reduce_boxes_in_lowest_layer=False)
    assert sum(map(len, anchors(everywhere, SSD_MAPS, (300, 300)))) == 11640


def test_ssd_anchors_are_square_in_images_that_are_not() -> None:
    generator = SsdAnchorGenerator(1, scales=(1.0,), aspect_ratios=(1.0,), reduce_boxes_in_lowest_layer=False)
    close(anchors(generator, [(1, 2)], (320, 640))[0][::2], [[0, 0, 320, 320], [0, 320, 320, 640]])


def test_strides_and_offsets_of_an_ssd_are_in_pixels() -> None:
    generator = SsdAnchorGenerator(
        1, scales=(0.1,), aspect_ratios=(1.0,), interpolated_scale_aspect_ratio=0.0, reduce_boxes_in_lowest_layer=False,
        height_stride=(25,), width_stride=(20,), height_offset=(10,), width_offset=(5,),
    )  # fmt: skip
    close(anchors(generator, [(2, 1)], (100, 200))[0], [[5, 0, 15, 10], [30, 0, 40, 10]])


def test_the_last_ssd_scale_is_between_max_scale_and_the_image() -> None:
    made = anchors(SsdAnchorGenerator(aspect_ratios=(1.0,)), SSD_MAPS, (100, 100))[-1]
    assert (made[:, 2] - made[:, 0]).tolist() == pytest.approx([95, 100 * math.sqrt(0.95)])


def test_a_pyramids_cells_are_centred_only_where_they_divide_the_image() -> None:
    generator = MultiscaleAnchorGenerator(5, 6, 4.0, (1.0,), 1)
    fine, coarse = anchors(generator, [(2, 2), (1, 1)], (64, 64))
    close(fine, [[-48, -48, 80, 80], [-48, -16, 80, 112], [-16, -48, 112, 80], [-16, -16, 112, 112]])
    close(coarse, [[-96, -96, 160, 160]])
    odd = anchors(generator, [(3, 3), (2, 2)], (65, 65))[0]
    close(odd[:2], [[-64, -64, 64, 64], [-64, -32, 64, 96]])


def test_a_pyramid_has_all_scales_of_a_ratio_before_the_next_ratio() -> None:
    made = anchors(MultiscaleAnchorGenerator(6, 6, 4.0, (1.0, 2.0), 2), [(1, 1)], (64, 64))[0]
    close(
        made,
        [
            *([-96, -96, 160, 160], [-149.0193, -149.0193, 213.0193, 213.0193]),
            *([-58.50967, -149.0193, 122.50967, 213.0193], [-96, -224, 160, 288]),
        ],
    )


def test_a_flexible_grid_is_as_said() -> None:
    grid = AnchorGrid(32, 16, base_sizes=(8.0, 16.0), aspect_ratios=(1.0, 4.0), height_offset=4, width_offset=6)
    made = anchors(FlexibleGridAnchorGenerator((grid,)), [(2, 1)], (64, 64))[0]
    close(made, [[0, 2, 8, 10], [0, -10, 8, 22], [32, 2, 40, 10], [32, -10, 40, 22]])


def test_a_grid_with_another_number_of_ratios_is_refused() -> None:
    with pytest.raises(InputError, match=r"2 base_sizes and 1 aspect_ratios"):
        anchors_per_cell(FlexibleGridAnchorGenerator((AnchorGrid(8, 8, (8.0, 9.0), (1.0,)),)))


def test_default_boxes_of_torchvision() -> None:
    generator = DefaultBoxGenerator(((2.0,),), (0.2, 0.8), steps=(50,))
    made = anchors(generator, [(1, 2)], (100, 200))[0]
    assert anchors_per_cell(generator) == (4,)
    wide = 0.2 * math.sqrt(2)
    sizes = [(0.2, 0.2), (0.4, 0.4), (0.1 * math.sqrt(2), wide), (wide, 0.1 * math.sqrt(2))]
    centred = [[25 - 50 * h, 75 - 100 * w, 25 + 50 * h, 75 + 100 * w] for h, w in sizes]
    close(made[4:], centred)


def test_default_boxes_are_not_larger_than_the_image() -> None:
    generator = DefaultBoxGenerator(((),), (0.9, 1.6))
    close(anchors(generator, [(1, 1)], (10, 10))[0][1:], [[0, 0, 10, 10]])


def test_anchors_of_torchvisions_pyramids_have_whole_sizes_around_the_corner_of_their_cell() -> None:
    generator = PyramidAnchorGenerator(((32,), (64,)), (0.5, 1.0))
    fine, coarse = anchors(generator, [(2, 3), (1, 1)], (67, 99))
    close(fine[2:4], [[-11, 10, 11, 56], [-16, 17, 16, 49]])
    close(coarse, [[-23, -45, 23, 45], [-32, -32, 32, 32]])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_there_are_as_many_anchors_as_counted(rows: int, columns: int, layers: int) -> None:
    generator = SsdAnchorGenerator(layers, aspect_ratios=RATIOS)
    made = anchors(generator, [(rows, columns)] * layers, (64, 48))
    assert [len(each) for each in made] == [rows * columns * number for number in anchors_per_cell(generator)]


def test_another_number_of_feature_maps_is_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)SsdAnchorGenerator.*anchors for 2 feature maps"):
        anchors(SsdAnchorGenerator(), [(2, 2), (1, 1)], (64, 64))
