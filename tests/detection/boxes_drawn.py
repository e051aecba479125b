"""Boxes for property tests, as hypothesis draws them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

_EDGE, _SIDE = st.floats(-50, 350, width=32), st.floats(1, 300, width=32)


@st.composite
def boxes_of(draw: st.DrawFn, count: int | None = None) -> Tensor:
    """Boxes with an area, within and around an image of 300 pixels."""
    number = draw(st.integers(1, 6)) if count is None else count
    rows = draw(st.lists(st.tuples(_EDGE, _EDGE, _SIDE, _SIDE), min_size=number, max_size=number))
    top, left, height, width = torch.tensor(rows).unbind(1)
    return torch.stack([top, left, top + height, left + width], 1)
