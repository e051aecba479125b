"""The anchors of a detector: boxes of fixed sizes around the centre of each cell of its feature maps.

They depend on the shapes of the image and of the feature maps alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from typing import assert_never

import torch
from torch import Tensor, nn

from lockstep.detection import blocks
from lockstep.detection.boxes import Shape, clip
from lockstep.errors import InputError
from lockstep.tensors import sent_to

AnyAnchorGenerator = blocks.AnchorGenerator | blocks.DefaultBoxGenerator | blocks.PyramidAnchorGenerator
_Pair = tuple[float, float]
"""Values of the vertical and of the horizontal direction."""


def anchors(generator: AnyAnchorGenerator, feature_shapes: Sequence[Shape], image_shape: Shape) -> list[Tensor]:
    """Make the anchors of each feature map, cell by cell and row by row: float32 (cells * anchors of a cell, 4).

    Args:
        generator: what the anchors are.
        feature_shapes: of each feature map, in the generator's order.
        image_shape: of the network's input, in pixels, as the anchors are.

    Raises:
        InputError: the generator has anchors for more feature maps, or for fewer.
    """
    sizes, unit = _cell_sizes(generator), _unit(generator, image_shape)
    grids = _grids(generator, feature_shapes, image_shape)
    if not len(sizes) == len(grids) == len(feature_shapes):
        raise InputError(
            f"{type(generator).__name__} does not make anchors for these feature maps.",
            given=f"sizes for {len(sizes)}, strides and offsets for {len(grids)}",
            expected=f"anchors for {len(feature_shapes)} feature maps, as many as the network makes",
            hint="give it as many layers, levels, scales or strides",
        )
    return [
        _tiled(shape, size, unit, stride, offset)
        for shape, size, (stride, offset) in zip(feature_shapes, sizes, grids, strict=True)
    ]


@lru_cache(maxsize=16)
def anchors_on(
    device: torch.device, generator: AnyAnchorGenerator, feature_shapes: tuple[Shape, ...], image_shape: Shape
) -> tuple[Tensor, ...]:
    """Make `anchors` on a device, those of the latest shapes only once; they are not to be changed."""
    with torch.inference_mode(False):  # what an evaluation makes serves training, too
        return tuple(sent_to(device, each) for each in anchors(generator, feature_shapes, image_shape))


@lru_cache(maxsize=16)
def inside_on(
    device: torch.device, generator: AnyAnchorGenerator, feature_shapes: tuple[Shape, ...], image_shape: Shape
) -> Tensor:
    """Find the places of the `anchors` that lie in the image, int64 (inside,), counted over all feature maps.

    They are found on the host, as a device would have to be waited for; those of the latest shapes only once.
    """
    with torch.inference_mode(False):
        joined = torch.cat(anchors(generator, feature_shapes, image_shape))
        return sent_to(device, (joined == clip(joined, image_shape)).all(1).nonzero()[:, 0])


@torch.no_grad()
def feature_shapes(backbone: nn.Module, image_shape: Shape) -> tuple[Shape, ...]:
    """Find the shapes of a backbone's feature maps on an input of this height and width, without computing them.

    The backbone maps images (batch, 3, height, width) to feature maps, by name or in order. Nothing of it changes.
    """
    shapes = {name: value.to("meta") for name, value in (*backbone.named_parameters(), *backbone.named_buffers())}
    switched = [module for module in backbone.modules() if module.training]
    try:
        for module in switched:  # batch norm would count the call, and refuse a map of one cell
            module.training = False
        maps = torch.func.functional_call(backbone, shapes, torch.empty(1, 3, *image_shape, device="meta"))
    finally:
        for module in switched:
            module.training = True
    return tuple((each.shape[2], each.shape[3]) for each in in_order(maps))


class BackboneAnchors:
    """The anchors on a backbone's feature maps, for inputs of any shape: `feature_shapes` is asked once for each."""

    def __init__(self, generator: AnyAnchorGenerator, backbone: nn.Module) -> None:
        self.generator, self._backbone = generator, backbone
        self._feature_shapes: dict[Shape, tuple[Shape, ...]] = {}

    def __call__(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        """Return the anchors of each feature map on an input of this height and width, (anchors, 4)."""
        return anchors_on(device, self.generator, self._shapes(shape), shape)

    def inside(self, shape: Shape, device: torch.device) -> Tensor:
        """Return the places of those that lie in such an input, int64 (inside,), counted over all feature maps."""
        return inside_on(device, self.generator, self._shapes(shape), shape)

    def _shapes(self, shape: Shape) -> tuple[Shape, ...]:
        if shape not in self._feature_shapes:
            self._feature_shapes[shape] = feature_shapes(self._backbone, shape)
        return self._feature_shapes[shape]


def in_order(maps: Mapping[str, Tensor] | Iterable[Tensor]) -> list[Tensor]:
    """Return feature maps as a list, whether they have names or not."""
    return list(maps.values() if isinstance(maps, Mapping) else maps)


def by_anchor(predicted: Tensor, size: int) -> Tensor:
    """Lay out a map of (batch, anchors of a cell * size, height, width) as (batch, anchors, size)."""
    return predicted.permute(0, 2, 3, 1).reshape(predicted.shape[0], -1, size)


def anchors_per_cell(generator: AnyAnchorGenerator) -> tuple[int, ...]:
    """Count the anchors of a cell, for each feature map."""
    return tuple(len(sizes) for sizes in _cell_sizes(generator))


def _tiled(shape: Shape, sizes: list[_Pair], unit: _Pair, stride: _Pair, offset: _Pair) -> Tensor:
    rows, columns = (
        torch.arange(number, dtype=torch.float64) * step + first
        for number, step, first in zip(shape, stride, offset, strict=True)
    )
    centres = torch.cartesian_prod(rows, columns).view(-1, 1, 2)
    half = 0.5 * torch.tensor(sizes, dtype=torch.float64).view(1, -1, 2) * torch.tensor(unit, dtype=torch.float64)
    return torch.cat([centres - half, centres + half], -1).view(-1, 4).float()


def _cell_sizes(generator: AnyAnchorGenerator) -> list[list[_Pair]]:
    """Return for each feature map height and width of the anchors of a cell, in the generator's unit."""
    match generator:
        case blocks.GridAnchorGenerator(height=height, width=width, scales=scales, aspect_ratios=ratios):
            return [[_size(scale, ratio, height, width) for ratio in ratios for scale in scales]]
        case blocks.SsdAnchorGenerator(base_anchor_height=height, base_anchor_width=width):
            return [[_size(scale, ratio, height, width) for scale, ratio in specs] for specs in _ssd_specs(generator)]
        case blocks.MultiscaleAnchorGenerator(scales_per_octave=number, aspect_ratios=ratios):
            bases = [2**level * generator.anchor_scale for level in _levels(generator)]
            return [
                [_size(base * 2 ** (octave / number), ratio) for ratio in ratios for octave in range(number)]
                for base in bases
            ]
        case blocks.FlexibleGridAnchorGenerator(anchor_grid=grids):
            return [_sizes_of_grid(grid) for grid in grids]
        case blocks.DefaultBoxGenerator():
            return _default_box_sizes(generator)
        case blocks.PyramidAnchorGenerator(sizes=of_maps, anchor_ratios=ratios):
            return [[_whole_size(size, ratio) for ratio in ratios for size in sizes] for sizes in of_maps]
    assert_never(generator)


def _sizes_of_grid(grid: blocks.AnchorGrid) -> list[_Pair]:
    if len(grid.base_sizes) != len(grid.aspect_ratios):
        raise InputError(
            "Each anchor of a grid has a size and an aspect ratio.",
            given=f"{len(grid.base_sizes)} base_sizes and {len(grid.aspect_ratios)} aspect_ratios",
            expected="as many of both",
            hint="repeat those that several anchors have",
        )
    return [_size(size, ratio) for size, ratio in zip(grid.base_sizes, grid.aspect_ratios, strict=True)]


def _unit(generator: AnyAnchorGenerator, image_shape: Shape) -> _Pair:
    """Return how many pixels one of the sizes is high and wide."""
    match generator:
        case blocks.SsdAnchorGenerator():
            return min(image_shape), min(image_shape)
        case blocks.DefaultBoxGenerator():
            return image_shape
    return 1, 1


def _grids(
    generator: AnyAnchorGenerator, feature_shapes: Sequence[Shape], image_shape: Shape
) -> list[tuple[_Pair, _Pair]]:
    """Return for each feature map the distance of two cells, and the centre of the first one, in pixels."""
    by_size = [(image_shape[0] / height, image_shape[1] / width) for height, width in feature_shapes]
    match generator:
        case blocks.GridAnchorGenerator() as grid:
            return [((grid.height_stride, grid.width_stride), (grid.height_offset, grid.width_offset))]
        case blocks.FlexibleGridAnchorGenerator():
            return [
                ((grid.height_stride, grid.width_stride), (grid.height_offset, grid.width_offset))
                for grid in generator.anchor_grid
            ]
        case blocks.SsdAnchorGenerator():
            given = list(zip(generator.height_stride, generator.width_stride, strict=False))
            offsets = list(zip(generator.height_offset, generator.width_offset, strict=False))
            strides = given or by_size
            return list(zip(strides, offsets or map(_half, strides), strict=False))
        case blocks.DefaultBoxGenerator(steps=steps):
            strides = [(step, step) for step in steps] or by_size
            return [(stride, _half(stride)) for stride in strides]
        case blocks.MultiscaleAnchorGenerator():
            return [_pyramid_grid(2**level, image_shape) for level in _levels(generator)]
        case blocks.PyramidAnchorGenerator():
            return [((image_shape[0] // rows, image_shape[1] // columns), (0, 0)) for rows, columns in feature_shapes]
    assert_never(generator)


def _size(scale: float, ratio: float, height: float = 1, width: float = 1) -> _Pair:
    """Return height and width; the ratio is width over height."""
    return scale / sqrt(ratio) * height, scale * sqrt(ratio) * width


def _half(stride: _Pair) -> _Pair:
    return 0.5 * stride[0], 0.5 * stride[1]


def _levels(generator: blocks.MultiscaleAnchorGenerator) -> range:
    return range(generator.min_level, generator.max_level + 1)


def _pyramid_grid(stride: int, image_shape: Shape) -> tuple[_Pair, _Pair]:
    """Put the first centre in the middle of its cell only where the cells divide the image, as the reference does."""
    height, width = image_shape
    return (stride, stride), (0 if height % stride else stride / 2, 0 if width % stride else stride / 2)


def _ssd_specs(generator: blocks.SsdAnchorGenerator) -> list[list[_Pair]]:
    """Return for each feature map scale and aspect ratio of the anchors of a cell."""
    scales = list(generator.scales)
    if not scales:
        step = (generator.max_scale - generator.min_scale) / max(generator.num_layers - 1, 1)
        scales = [generator.min_scale + step * layer for layer in range(generator.num_layers)]
    specs = []
    for scale, next_scale in pairwise([*scales[: generator.num_layers], 1.0]):
        of_map = [(scale, ratio) for ratio in generator.aspect_ratios]
        if between := generator.interpolated_scale_aspect_ratio:
            of_map.append((sqrt(scale * next_scale), between))
        specs.append(of_map)
    if generator.reduce_boxes_in_lowest_layer:
        specs[0] = [(0.1, 1.0), (scales[0], 2.0), (scales[0], 0.5)]
    return specs


def _default_box_sizes(generator: blocks.DefaultBoxGenerator) -> list[list[_Pair]]:
    sizes = []
    for (scale, next_scale), ratios in zip(pairwise(generator.scales), generator.aspect_ratios, strict=False):
        between = sqrt(scale * next_scale)
        of_map = [(scale, scale), (between, between)]
        for ratio in ratios:
            height, width = _size(scale, ratio)
            of_map += [(height, width), (width, height)]
        largest = 1.0 if generator.clip else float("inf")
        sizes.append([(min(height, largest), min(width, largest)) for height, width in of_map])
    return sizes


def _whole_size(size: int, ratio: float) -> _Pair:
    """Round the half of each side to whole pixels, as torchvision does; the ratio is height over width."""
    return 2 * round(size * sqrt(ratio) / 2), 2 * round(size / sqrt(ratio) / 2)
