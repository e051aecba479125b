"""Axes change places as the operations of both systems ask, and nothing else fits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.weights.layouts import (
    CONVOLUTION,
    CONVOLUTION_1D,
    CONVOLUTION_3D,
    CONVOLUTION_AS_DENSE,
    DENSE,
    DEPTHWISE,
    Layout,
    flattened_layout,
    infer_layout,
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def patches(images: torch.Tensor) -> torch.Tensor:
    """The 3x2 patches of (batch, height, width, channels), as (batch, rows, columns, channels, 3, 2)."""
    return images.unfold(1, 3, 1).unfold(2, 2, 1)


def test_a_convolution_computes_the_same_in_both_systems() -> None:
    images, kernel = normal(2, 5, 6, 4), normal(3, 2, 4, 7)
    expected = torch.einsum("brciyx,yxio->brco", patches(images), kernel)
    found = F.conv2d(images.permute(0, 3, 1, 2), CONVOLUTION.apply(kernel))
    torch.testing.assert_close(found.permute(0, 2, 3, 1), expected)


def test_a_depthwise_convolution_computes_the_same_in_both_systems() -> None:
    images, kernel = normal(2, 5, 6, 4), normal(3, 2, 4, 3)
    # TensorFlow's output channels: those of the first input channel, those of the second, ...
    expected = torch.einsum("brciyx,yxim->brcim", patches(images), kernel).flatten(3)
    found = F.conv2d(images.permute(0, 3, 1, 2), DEPTHWISE.apply(kernel), groups=4)
    torch.testing.assert_close(found.permute(0, 2, 3, 1), expected)


def test_a_dense_layer_computes_the_same_in_both_systems() -> None:
    features, matrix = normal(2, 5), normal(5, 3)
    torch.testing.assert_close(F.linear(features, DENSE.apply(matrix)), features @ matrix)


def test_a_dense_layer_after_a_flattening_follows_the_order_of_the_features() -> None:
    features, matrix = normal(2, 7, 5, 4), normal(7 * 5 * 4, 3)
    layout = Layout("(h=7 w=5 i) o -> o (i h w)")
    found = F.linear(features.permute(0, 3, 1, 2).flatten(1), layout.apply(matrix))
    torch.testing.assert_close(found, features.flatten(1) @ matrix)


def test_a_convolution_over_everything_is_a_dense_layer_after_a_flattening() -> None:
    features, kernel = normal(2, 3, 2, 4), normal(3, 2, 4, 5)
    found = F.linear(features.permute(0, 3, 1, 2).flatten(1), CONVOLUTION_AS_DENSE.apply(kernel))
    torch.testing.assert_close(found, torch.einsum("byxi,yxio->bo", features, kernel))


@pytest.mark.parametrize(
    ("pattern", "before", "after"),
    [
        ("h w i o -> o i h w", (3, 2, 4, 7), (7, 4, 3, 2)),
        ("h w i m -> (i m) 1 h w", (3, 2, 4, 7), (28, 1, 3, 2)),
        ("i o -> o i", (4, 7), (7, 4)),
        ("i o -> o i", (4, 7, 1), None),
        ("i o -> i o", (4, 7), (4, 7)),
        ("(h=7 w=5 i) o -> o (i h w)", (140, 3), (3, 140)),
        ("(h=7 w=5 i) o -> o (i h w)", (141, 3), None),
        ("1 1 i o -> o i", (1, 1, 4, 7), (7, 4)),
        ("1 1 i o -> o i", (3, 1, 4, 7), None),
        ("h=3 i -> i h", (3, 2), (2, 3)),
        ("h=3 i -> i h", (2, 3), None),
        ("(a=2 b) c -> a b c", (0, 3), (2, 0, 3)),
    ],
)
def test_a_layout_knows_which_shapes_it_takes_and_makes(
    pattern: str, before: tuple[int, ...], after: tuple[int, ...] | None
) -> None:
    layout = Layout(pattern)
    assert layout.shape(before) == after
    if after is None:
        with pytest.raises(InputError, match="cannot be laid out"):
            layout.apply(torch.zeros(before))
    else:
        laid_out = layout.apply(torch.zeros(before))
        assert laid_out.shape == after
        assert laid_out.is_contiguous()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.permutations("abcd"))
def test_a_layout_and_its_reverse_give_the_values_back(shape: list[int], order: list[str]) -> None:
    there, back = Layout(f"a b c d -> {' '.join(order)}"), Layout(f"{' '.join(order)} -> a b c d")
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert torch.equal(back.apply(there.apply(values)), values)
    assert there.apply(values).shape == there.shape(tuple(shape))


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "i o",
        "i o -> o",
        "i o -> o i i",
        "i i -> i i",
        "io -> oi",
        "i 2 -> 2 i",
        "(h w i) o -> o (i h w)",
        "(h=0 i) o -> o (i h)",
        "((h=2 i) o) -> o i h",
        "(h=2 i o -> o i h",
        "a -> a -> a",
    ],
)
def test_what_is_no_layout_is_refused(pattern: str) -> None:
    with pytest.raises(InputError) as refusal:
        Layout(pattern)
    assert str(refusal.value) == (
        "This is no layout.\n"
        f"  given:    {pattern!r}\n"
        "  expected: the same letters on both sides of an arrow, and in parentheses the lengths of all but one\n"
        '  hint:     write it as in "h w i o -> o i h w" or "(h=7 w=7 i) o -> o (i h w)"'
    )


def test_a_layout_is_text() -> None:
    with pytest.raises(InputError, match="pattern is of the wrong type"):
        Layout(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ((3, 3, 4, 8), (8, 4, 3, 3), CONVOLUTION),
        ((3, 3, 4, 2), (8, 1, 3, 3), DEPTHWISE),
        ((1, 1, 4, 8), (8, 4), CONVOLUTION_AS_DENSE),
        ((4, 8), (8, 4), DENSE),
        ((5, 5), (5, 5), DENSE),
        ((5, 4, 8), (8, 4, 5), CONVOLUTION_1D),
        ((3, 3, 3), (3, 3, 3), CONVOLUTION_1D),
        ((2, 3, 5, 4, 8), (8, 4, 2, 3, 5), CONVOLUTION_3D),
        ((3, 3, 3, 3, 3), (3, 3, 3, 3, 3), CONVOLUTION_3D),
        ((4, 8), (4, 8), None),
        ((4,), (4,), None),
        ((), (), None),
        ((3, 3, 4, 8), (8, 5, 3, 3), None),
    ],
)
def test_shapes_choose_among_the_layouts_of_tensorflow(
    before: tuple[int, ...], after: tuple[int, ...], layout: Layout | None
) -> None:
    assert infer_layout("tensorflow", before, after) == layout
    assert infer_layout("torch", before, after) is None


@pytest.mark.parametrize(
    ("num_places", "num_dimensions", "pattern"),
    [
        (49, 2, "(h=7 w=7 i) o -> o (i h w)"),
        (25, 1, "(w=25 i) o -> o (i w)"),
        (27, 3, "(d=3 h=3 w=3 i) o -> o (i d h w)"),
        (98, 2, "(h=H w=W i) o -> o (i h w)"),
    ],
)
def test_the_layout_after_a_flattening(num_places: int, num_dimensions: int, pattern: str) -> None:
    assert flattened_layout(num_places, num_dimensions) == pattern
    features = torch.arange(num_places * 2).reshape(num_places, 2)  # for one output: channels last
    if "H" not in pattern:
        assert torch.equal(Layout(pattern).apply(features.reshape(-1, 1)), features.T.reshape(1, -1))
