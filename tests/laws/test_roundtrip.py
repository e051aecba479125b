"""read(write(x)) == x."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.checkpoints import Store

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits but those of infinities and NaN, which no checkpoint holds; in any order in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    data = draw(st.binary(min_size=(size := math.prod(shape) * dtype.itemsize), max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = torch.tensor(list(data), dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        tensor.view(torch.uint8).reshape(-1, dtype.itemsize)[~tensor.double().isfinite()] = 0
    tensor = tensor.reshape(shape)
    order = draw(st.permutations(range(len(shape))))
    return tensor.permute(order)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
SECTIONS = st.sampled_from(["parameters", "buffers", "slots", "average", "generator.parameters"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**9),
    st.dictionaries(SECTIONS, st.dictionaries(NAMES, tensors(), max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), JSON, max_size=3),
)
def test_checkpoints(step: int, sections: dict[str, dict[str, Tensor]], values: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Store(Path(folder)).write(step, sections, values)
        found = Store(Path(folder)).read()
    assert found is not None
    assert (found.step, found.path, found.values) == (step, path, values)
    assert list(found.tensors) == list(sections)
    for section, members in sections.items():
        assert {n: bits(t) for n, t in found.tensors[section].items()} == {n: bits(t) for n, t in members.items()}
