"""The one map an example: pixels, masks, boxes and keypoints agree to the pixel, whatever is done to an image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import DataError
from lockstep.images.masks import DenseMasks, dense_masks
from lockstep.images.moves import (
    AS_IT_IS,
    MIRRORED,
    QUARTER_TURN,
    UPSIDE_DOWN,
    Move,
    Region,
    Turn,
    move,
    moved_boxes,
    moved_masks,
    moved_points,
    nearest,
)

TURNS = [Turn(*(bool(number & bit) for bit in (1, 2, 4))) for number in range(8)]
BOXES = torch.tensor([[0, 0.25, 0.75, 1], [0.25, 0.5, 0.75, 1]])
OWNER = torch.zeros(2, dtype=torch.int64)

turns = st.sampled_from(TURNS)
sides = st.tuples(st.integers(1, 9), st.integers(1, 9))


@st.composite
def moves_of(draw: st.DrawFn, height: int, width: int) -> Move:
    top, left = draw(st.integers(-3, height - 1)), draw(st.integers(-3, width - 1))
    rows, columns = draw(st.integers(max(1, 1 - top), height + 4)), draw(st.integers(max(1, 1 - left), width + 4))
    to = draw(st.none() | sides)
    middles = draw(st.booleans())
    return move((height, width), Region(top, left, rows, columns), draw(turns), to, half_pixel_centers=middles)


@st.composite
def chains(draw: st.DrawFn) -> list[Move]:
    """Moves of an image, one after another."""
    height, width = draw(sides)
    found: list[Move] = []
    for _ in range(draw(st.integers(1, 4))):
        found.append(draw(moves_of(height, width)))
        height, width = found[-1].to_height, found[-1].to_width
    return found


def moved_raster(raster: Tensor, by: Move) -> Tensor:
    """The plain way: pad, cut, turn, and resize by picking pixels."""
    padded = torch.nn.functional.pad(raster, [20, 20, 20, 20])
    top, left, height, width = by.region
    part = by.turn(padded[:, top + 20 : top + 20 + height, left + 20 : left + 20 + width])
    rows = torch.from_numpy(nearest(part.shape[1], by.to_height, by.half_pixel_centers))
    columns = torch.from_numpy(nearest(part.shape[2], by.to_width, by.half_pixel_centers))
    return part[:, rows][:, :, columns]


@given(chains(), st.randoms())
def test_masks_that_were_moved_several_times_are_read_once(chain: list[Move], random: object) -> None:
    bits = np.random.default_rng(chain[0].height).integers(0, 2, (2, chain[0].height, chain[0].width))
    stored = dense_masks(bits.astype(np.float32), chain[0].height, chain[0].width)
    masks, raster = stored, torch.from_numpy(bits).to(torch.uint8)
    for each in chain:
        masks, raster = moved_masks(masks, each), moved_raster(raster, each)  # type: ignore[assignment]
        assert (masks.height, masks.width) == raster.shape[1:]
    assert torch.equal(masks.decode(), raster)
    assert torch.equal(masks.selected([1]).decode(), raster[1:])
    by_rows = torch.from_numpy(bits)
    by_columns = by_rows.transpose(1, 2).contiguous().transpose(1, 2)
    for raster in (by_rows, by_columns):
        assert torch.equal(moved_masks(raster, chain[0]), moved_raster(by_rows, chain[0]))  # type: ignore[arg-type]


@given(turns, turns)
def test_two_turns_are_one(one: Turn, other: Turn) -> None:
    pixels = torch.arange(2 * 3 * 4).view(2, 3, 4)
    assert torch.equal(one.then(other)(pixels), other(one(pixels)))
    assert one.sides(3, 4) == tuple(one(pixels).shape[1:])


@given(turns, st.data())
def test_a_region_is_found_again_before_the_turn(turn: Turn, data: st.DataObject) -> None:
    pixels = torch.arange(5 * 7).view(1, 5, 7)
    turned = turn(pixels)
    top, left = data.draw(st.integers(0, turned.shape[1] - 1)), data.draw(st.integers(0, turned.shape[2] - 1))
    height = data.draw(st.integers(1, turned.shape[1] - top))
    width = data.draw(st.integers(1, turned.shape[2] - left))
    before = turn.region_before(Region(top, left, height, width), 5, 7)
    cut = pixels[:, before.top : before.top + before.height, before.left : before.left + before.width]
    assert torch.equal(turn(cut), turned[:, top : top + height, left : left + width])


@pytest.mark.parametrize("turn", [MIRRORED, UPSIDE_DOWN, Turn(False, True, True)])
def test_flips_and_half_turns_undo_themselves(turn: Turn) -> None:
    there = [move((4, 4), turn=turn)]
    points = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1))
    twice = moved_points(moved_points(points, OWNER, there), OWNER, there)
    torch.testing.assert_close(twice, points, rtol=0, atol=2**-23)
    torch.testing.assert_close(moved_boxes(moved_boxes(BOXES, OWNER, there), OWNER, there), BOXES, rtol=0, atol=2**-23)
    assert turn.then(turn) == AS_IT_IS


def test_boxes_are_where_the_object_detection_api_has_them() -> None:
    """The numbers of its preprocessor_test.py."""
    cases = {
        MIRRORED: [[0, 0, 0.75, 0.75], [0.25, 0, 0.75, 0.5]],
        UPSIDE_DOWN: [[0.25, 0.25, 1, 1], [0.25, 0.5, 0.75, 1]],
        QUARTER_TURN: [[0, 0, 0.75, 0.75], [0, 0.25, 0.5, 0.75]],
    }
    for turn, expected in cases.items():
        assert moved_boxes(BOXES, OWNER, [move((4, 8), turn=turn)]).tolist() == expected


@given(chains())
def test_a_box_moves_as_its_corners_and_stays_upright(chain: list[Move]) -> None:
    boxes = BOXES
    corners = BOXES.view(2, 2, 2)
    for each in chain:
        boxes, corners = moved_boxes(boxes, OWNER, [each]), moved_points(corners, OWNER, [each])
        assert (boxes[:, :2] <= boxes[:, 2:]).all()
    torch.testing.assert_close(boxes, torch.cat([corners.amin(1), corners.amax(1)], 1), rtol=1e-5, atol=1e-4)


@given(chains())
def test_a_pixel_and_a_point_on_it_go_the_same_way(chain: list[Move]) -> None:
    """Where nothing is resized, a mask of one pixel and a keypoint at its middle stay together."""
    height, width = chain[0].height, chain[0].width
    raster = torch.zeros(1, height, width, dtype=torch.uint8)
    raster[0, height // 2, width // 3] = 1
    point = torch.tensor([[(height // 2 + 0.5) / height, (width // 3 + 0.5) / width]])
    for each in chain:
        if (each.height, each.width) != raster.shape[1:]:
            return
        by = move((each.height, each.width), each.region, each.turn)
        raster, point = moved_raster(raster, by), moved_points(point, OWNER[:1], [by])
    here = raster[0].nonzero()
    if len(here):
        middle = (here[0] + 0.5) / torch.tensor(raster.shape[1:])
        torch.testing.assert_close(point[0], middle, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "to"), [(5, 5), (5, 10), (10, 4), (7, 3), (1, 6), (300, 299)])
def test_the_nearest_pixel_is_torchs(length: int, to: int) -> None:
    line = torch.arange(length, dtype=torch.float32).view(1, 1, length)
    for mode, middles in (("nearest", False), ("nearest-exact", True)):
        expected = torch.nn.functional.interpolate(line, to, mode=mode).flatten().long()
        assert nearest(length, to, middles).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("length", "to", "expected"), [(3, 5, [0, 1, 1, 2, 2]), (5, 3, [0, 2, 4]), (4, 1, [0]), (4, 4, [0, 1, 2, 3])]
)
def test_with_aligned_corners_the_first_and_the_last_pixel_stay(length: int, to: int, expected: list[int]) -> None:
    assert nearest(length, to, False, align_corners=True).tolist() == expected


@pytest.mark.parametrize("masks", [torch.zeros(1, 4, 5), dense_masks(np.zeros((1, 4, 5)), 4, 5)])
def test_masks_of_another_size_than_their_image_are_refused(masks: Tensor | DenseMasks) -> None:
    with pytest.raises(DataError, match="masks of 4 x 5 pixels, an image of 4 x 6"):
        moved_masks(masks, move((4, 6), turn=MIRRORED))
