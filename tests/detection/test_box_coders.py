"""Codes of boxes, with the numbers of the object detection API's own tests; those of torchvision are in its fixture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from lockstep.detection.blocks import (
    FasterRcnnBoxCoder,
    LinearBoxCoder,
    SquareBoxCoder,
    XYBoxCoder,
)
from lockstep.detection.box_coders import AnyBoxCoder, code_size, decode, encode
from tests.detection.boxes_drawn import boxes_of

BOXES = tensor([[10.0, 10.0, 20.0, 15.0], [0.2, 0.1, 0.5, 0.4]])
ANCHORS = tensor([[15.0, 12.0, 30.0, 18.0], [0.1, 0.0, 0.7, 0.9]])


@pytest.mark.parametrize(
    ("coder", "boxes", "expected"),
    [
        (
            FasterRcnnBoxCoder(2, 3, 4, 5),
            BOXES,
            [[-1, -1.25, -1.62186, -0.911608], [-0.166667, -0.666667, -2.772588, -5.493062]],
        ),
        (
            XYBoxCoder((3, 2, 5, 4)),
            BOXES,
            [[-1.25, -1, -0.911608, -1.62186], [-0.666667, -0.166667, -5.493062, -2.772588]],
        ),
        (SquareBoxCoder(2, 3, 4), BOXES, [[-1.581139, -0.790569, -1.175573], [-0.136083, -0.816497, -3.583519]]),
        (LinearBoxCoder(), BOXES, [[5 / 6, 12.5 / 15, 0, -2.5 / 15], [0.35 / 0.9, 1 / 3, -0.05 / 0.9, 1 / 6]]),
    ],
)
def test_codes_are_the_references(coder: AnyBoxCoder, boxes: Tensor, expected: list[list[float]]) -> None:
    codes = encode(coder, boxes, ANCHORS)
    torch.testing.assert_close(codes, tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-4)
    assert codes.shape[-1] == code_size(coder)
    if not isinstance(coder, SquareBoxCoder):
        torch.testing.assert_close(decode(coder, codes, ANCHORS), boxes)


def test_a_square_of_the_boxs_area_is_decoded() -> None:
    codes = tensor([[-1.0, -1.25, -1.62186], [-0.166667, -0.666667, -2.772588]])
    expected = tensor([[14.594306, 7.884875, 20.918861, 14.209432], [0.155051, 0.102989, 0.522474, 0.470412]])
    torch.testing.assert_close(decode(SquareBoxCoder(2, 3, 4), codes, ANCHORS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("coder", [FasterRcnnBoxCoder(), XYBoxCoder(), LinearBoxCoder()])
@given(boxes=boxes_of(4), anchors=boxes_of(4))
def test_what_is_encoded_is_decoded(coder: AnyBoxCoder, boxes: Tensor, anchors: Tensor) -> None:
    if isinstance(coder, XYBoxCoder):  # which decodes nothing larger
        boxes[:, 2:] = torch.minimum(boxes[:, 2:], boxes[:, :2] + 60 * (anchors[:, 2:] - anchors[:, :2]))
    torch.testing.assert_close(decode(coder, encode(coder, boxes, anchors), anchors), boxes, rtol=1e-4, atol=1e-2)


@given(boxes_of(3), st.floats(0.5, 20))
def test_the_codes_do_not_depend_on_the_unit(boxes: Tensor, factor: float) -> None:
    anchors = boxes.flip(0)
    codes = encode(FasterRcnnBoxCoder(), boxes, anchors)
    scaled = encode(FasterRcnnBoxCoder(), factor * boxes, factor * anchors)
    torch.testing.assert_close(scaled, codes, rtol=1e-3, atol=1e-2)


def test_codes_of_a_batch_go_with_the_anchors_of_one_image() -> None:
    codes = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    decoded = decode(XYBoxCoder(), codes, ANCHORS)
    assert torch.equal(decoded[1], decode(XYBoxCoder(), codes[1], ANCHORS))


def test_no_code_decodes_to_an_infinite_size() -> None:
    codes = torch.full((2, 4), 1000.0)
    assert decode(FasterRcnnBoxCoder(), codes, ANCHORS).isfinite().all()
    sizes = decode(XYBoxCoder(), codes, ANCHORS)
    torch.testing.assert_close(sizes[:, 2] - sizes[:, 0], 62.5 * (ANCHORS[:, 2] - ANCHORS[:, 0]))


def test_a_box_without_area_has_finite_codes() -> None:
    for coder in (FasterRcnnBoxCoder(), XYBoxCoder(), SquareBoxCoder()):
        assert encode(coder, tensor([[1.0, 1.0, 1.0, 1.0]]), ANCHORS[:1]).isfinite().all(), coder
    thin = encode(SquareBoxCoder(1, 1, 1), tensor([[10.0, 10.0, 10.0, 20.0]]), ANCHORS[:1])
    assert thin[0, 2].item() == pytest.approx(-20.670586)
