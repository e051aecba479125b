"""What is drawn onto an image: where, in which colour, and what is left as it was."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import InputError
from lockstep.images.drawing import COLOURS, GREEN, RED, Marks, draw_marks, printable, side_by_side

HEIGHT, WIDTH = 40, 60
GREY = 100


def grey() -> Tensor:
    return torch.full((3, HEIGHT, WIDTH), GREY, dtype=torch.uint8)


def is_colour(image: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """Where an image has a colour."""
    return (image == torch.tensor(colour, dtype=torch.uint8)[:, None, None]).all(0)


def edge(top: int, left: int, bottom: int, right: int) -> Tensor:
    """The outermost pixels of a rectangle, its ends inside of it."""
    found = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    found[top : bottom + 1, left : right + 1] = True
    found[top + 1 : bottom, left + 1 : right] = False
    return found


def test_a_box_is_an_outline_with_a_dark_one_in_it() -> None:
    image = grey()
    drawn = draw_marks(image, Marks(boxes=torch.tensor([[0.25, 0.5, 0.75, 1.0]])))
    assert torch.equal(is_colour(drawn, COLOURS[0]), edge(10, 30, 29, 59))
    assert torch.equal(is_colour(drawn, (0, 0, 0)), edge(11, 31, 28, 58))
    untouched = ~(edge(10, 30, 29, 59) | edge(11, 31, 28, 58))
    assert (drawn[:, untouched] == GREY).all()
    assert torch.equal(image, grey()), "the image given stays as it is"


def test_large_images_have_thicker_lines() -> None:
    image = torch.zeros(3, 450, 600, dtype=torch.uint8)
    drawn = draw_marks(image, Marks(boxes=torch.tensor([[0.0, 0.0, 1.0, 1.0]])))
    assert is_colour(drawn, COLOURS[0])[200, :5].tolist() == [True, True, True, False, False]


def test_objects_without_classes_have_colours_in_turn_and_those_of_one_class_have_one() -> None:
    left = torch.arange(8)[:, None] * 5 / WIDTH
    boxes = torch.cat([torch.zeros(8, 1), left, torch.ones(8, 1), left + 3 / WIDTH], dim=1)

    def found(**more: Any) -> list[Any]:
        drawn = draw_marks(grey(), Marks(boxes=boxes, **more))
        return [tuple(drawn[:, 20, 5 * number].tolist()) for number in range(8)]

    assert found() == [*COLOURS, COLOURS[0]]
    labels = [1, 1, 3, 1, 8, 9, 0, 3]
    assert found(labels=labels) == [COLOURS[place] for place in (0, 0, 2, 0, 0, 1, 6, 2)]
    assert found(labels=labels, colours=[RED] * 8) == [RED] * 8


def test_masks_and_keypoints_have_the_colour_of_their_class() -> None:
    masks = torch.ones(1, 1, 1, dtype=torch.uint8)
    points = torch.tensor([[[0.5, 0.5]]])
    drawn = draw_marks(grey(), Marks(labels=[5], masks=masks, keypoints=points))
    assert drawn[:, 0, 0].tolist() == [GREY // 2 + part // 2 for part in COLOURS[4]]
    assert is_colour(drawn, COLOURS[4]).any()


def test_colours_differ_for_the_colour_blind() -> None:
    """As those without green cones see them (Viénot, Brettel and Mollon 1999), any two are apart."""
    linear = (np.array(COLOURS) / 255) ** 2.2
    seen = linear @ np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]).T
    lightness = seen.clip(0, 1) ** (1 / 2.2) * 255
    apart = [np.abs(one - other).max() for one, other in combinations(lightness, 2)]
    assert min(apart) > 30


def test_a_name_stands_above_its_box() -> None:
    box = torch.tensor([[0.5, 0.2, 0.9, 0.9]])
    bare, named = (draw_marks(grey(), Marks(boxes=box, names=names)) for names in ((), ("cat",)))
    rows = (bare != named).any(0).any(1).nonzero().ravel()
    assert (int(rows[0]), int(rows[-1])) == (20 - 14, 19)
    assert is_colour(named, COLOURS[0])[6, 12:20].all(), "on a ground of the box's colour"
    assert is_colour(named, (0, 0, 0))[6:20].any(), "in black on bright colours"


def test_a_name_is_white_on_a_dark_colour() -> None:
    boxes = torch.tensor([[0.0, 0.0, 0.01, 0.01], [0.5, 0.2, 0.9, 0.9]])
    drawn = draw_marks(grey(), Marks(boxes=boxes, names=["", "cat"]))
    assert is_colour(drawn, (255, 255, 255))[6:20].any()


@pytest.mark.parametrize(
    ("box", "corner"), [((0.0, 0.0, 0.9, 0.9), (1, 1)), ((0.1, 0.95, 0.9, 1.0), (5, 45)), ((0.9, 0.9, 1, 1), (23, 45))]
)
def test_a_name_stays_within_the_image(box: tuple[float, ...], corner: tuple[int, int]) -> None:
    bare, named = (draw_marks(grey(), Marks(boxes=torch.tensor([box]), names=names)) for names in ((), ("cat",)))
    changed = (bare != named).any(0)
    assert changed.sum() > 100, "all of it is seen"
    assert is_colour(named, COLOURS[0])[corner]


def test_boxes_that_are_not_finite_are_left_out_and_others_keep_their_colours_and_names() -> None:
    good = [0.5, 0.2, 0.9, 0.9]
    boxes = torch.tensor([[math.nan, 0, 1, 1], good, [0, 0, 1, math.inf]])
    drawn = draw_marks(grey(), Marks(boxes=boxes, names=["bad", "cat", "worse"]))
    alone = draw_marks(grey(), Marks(boxes=torch.tensor([[math.nan] * 4, good]), names=["", "cat"]))
    assert torch.equal(drawn, alone)
    assert is_colour(drawn, COLOURS[1]).any()
    assert not is_colour(drawn, COLOURS[0]).any()


@settings(max_examples=50)
@given(st.lists(st.floats(width=32), min_size=4, max_size=4), st.integers(1, 9), st.integers(1, 9), st.text(max_size=5))
def test_anything_can_be_drawn(box: list[float], height: int, width: int, name: str) -> None:
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    drawn = draw_marks(image, Marks(torch.tensor([box]), [name], windows=torch.tensor([box, box])))
    assert (drawn.shape, drawn.dtype) == (image.shape, torch.uint8)
    assert not image.any()
    assert bool(drawn.any()) == all(map(math.isfinite, box)), "however odd it is, something of it is seen"


def test_masks_are_half_of_the_colour_wherever_the_object_is() -> None:
    masks = torch.zeros(2, 2, 2, dtype=torch.uint8)  # smaller than the image: each of its pixels is a quarter of it
    masks[0, 0, 0] = masks[1, 1, 1] = 1
    drawn = draw_marks(grey(), Marks(masks=masks))
    corners = drawn[:, [0, HEIGHT // 2 - 1, HEIGHT // 2, -1, 0], [0, WIDTH // 2 - 1, WIDTH // 2, -1, -1]].T.tolist()
    first, second = ([GREY // 2 + part // 2 for part in colour] for colour in COLOURS[:2])
    assert corners == [first, first, second, second, [GREY] * 3]


def test_keypoints_are_dots_and_those_that_are_missing_are_not_drawn() -> None:
    points = torch.tensor([[[0.5, 0.25], [math.nan, math.nan]], [[0.25, 0.75], [3.0, 0.5]]])
    drawn = draw_marks(grey(), Marks(keypoints=points))
    assert is_colour(drawn, COLOURS[0])[20, 15]
    assert is_colour(drawn, COLOURS[1])[10, 45]
    assert ((drawn != GREY).any(0).sum()) < 60


def test_lines_may_be_broken_and_colours_chosen() -> None:
    boxes = torch.tensor([[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.2, 0.2]])
    drawn = draw_marks(grey(), Marks(boxes=boxes, colours=[GREEN, RED], dashed=[True, False]))
    whole = edge(10, 30, 29, 59)
    is_dash = torch.arange(29) % 8 < 4
    assert torch.equal(is_colour(drawn, GREEN)[10, 30:59], is_dash), "from the left upper corner on"
    assert torch.equal(is_colour(drawn, GREEN)[10:29, 30], is_dash[:19])
    assert not is_colour(drawn, GREEN)[~whole].any()
    assert torch.equal(is_colour(drawn, RED), edge(0, 0, 7, 11))


def test_an_object_without_a_label_is_drawn_too() -> None:
    boxes = torch.tensor([[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.2, 0.2]])
    drawn = draw_marks(grey(), Marks(boxes=boxes, labels=[3]))
    assert torch.equal(is_colour(drawn, COLOURS[2]), edge(10, 30, 29, 59))
    assert torch.equal(is_colour(drawn, COLOURS[0]), edge(0, 0, 7, 11))


def test_around_a_single_window_the_image_is_darkened() -> None:
    drawn = draw_marks(grey(), Marks(windows=torch.tensor([[0.25, 0.5, 0.75, 1.0]], dtype=torch.float64)))
    assert torch.equal(is_colour(drawn, (255, 255, 255)), edge(10, 30, 29, 59))
    assert (drawn[:, :10] == GREY // 8 * 5).all()
    assert (drawn[:, 12:28, 32:58] == GREY).all()


def test_several_windows_are_numbered_and_nothing_is_darkened() -> None:
    windows = torch.tensor([[0.5, 0.1, 0.9, 0.4], [0.5, 0.6, 0.9, 0.9]])
    drawn = draw_marks(grey(), Marks(windows=windows))
    assert (drawn[:, -1] == GREY).all()
    first, second = (drawn[:, 6:20, left : left + 8] for left in (6, 36))
    assert (first == 255).any()
    assert not torch.equal(first, second), "1 and 2"


@pytest.mark.parametrize(
    "image",
    [torch.zeros(3, 4, 4), torch.zeros(1, 4, 4, dtype=torch.uint8), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)],
    ids=["floats", "grey", "a batch"],
)
def test_only_colour_images_are_drawn_onto(image: Tensor) -> None:
    with pytest.raises(InputError) as caught:
        draw_marks(image, Marks())
    assert caught.value.what == "Nothing can be drawn onto this image."
    assert caught.value.given == f"a tensor of shape {tuple(image.shape)}, {image.dtype}"
    assert caught.value.expected == "uint8 of shape (3, height, width)"
    assert caught.value.hint == "bring its values to 0 to 255, and give one image of three channels"


def test_text_is_made_printable() -> None:
    assert printable("a\nb\tc\udc80 é猫") == "a?b?c? é猫"


def test_images_are_put_side_by_side() -> None:
    wide, narrow = grey(), grey()[:, :, :10]
    row = side_by_side([wide, narrow])
    assert row.shape == (3, wide.shape[1], wide.shape[2] + 4 + 10)
    assert torch.equal(row[:, :, : wide.shape[2]], wide)
    assert (row[:, :, wide.shape[2] : -10] == 255).all()
    assert torch.equal(side_by_side([narrow]), narrow)
