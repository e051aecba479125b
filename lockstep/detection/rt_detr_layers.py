"""The layers of RT-DETR: a ResNet-vd, the hybrid encoder, and the decoder with deformable attention.

Zhao et al., "DETRs Beat YOLOs on Real-time Object Detection" (2023). Parameters have the names of the files that are
published for transformers, without their "model." in front. Boxes are the x and y of their centre, width and height,
all as shares of the image, since that is what the weights have learned.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.detection.anchors import by_anchor
from lockstep.detection.boxes import Shape
from lockstep.models.layers import RELU, ActivationLayer, NormLayer, conv2d

_POINTS, _LEVELS = 4, 3
"""Places that a head looks at on each level; levels, at strides 8, 16 and 32."""
_BLOCKS_OF_FUSION = 3
_TEMPERATURE = 10_000.0
_LEAST_SHARE = 1e-5


class RtDetrSizes(NamedTuple):
    """The sizes of a net."""

    depths: tuple[int, ...]
    """Blocks of each of the backbone's four stages."""
    bottleneck: bool
    """Blocks of three convolutions, not of two."""
    decoder_layers: int
    expansion: float
    """Channels inside of a fusion, as a share of those outside."""
    channels: int = 256
    feed_forward: int = 1024
    """Hidden values of the encoder's feed-forward layers."""
    stem: int = 64
    """Channels of the backbone's first map; a stage has twice those of the one before."""
    queries: int = 256
    """Values of a query."""
    decoder_feed_forward: int = 1024
    heads: int = 8

    @property
    def stages(self) -> tuple[int, ...]:
        """Channels of the backbone's four stages."""
        return tuple(self.stem * (4 if self.bottleneck else 1) << stage for stage in range(len(self.depths)))


def _layer(
    inputs: int,
    outputs: int,
    kernel_size: int,
    stride: int = 1,
    activation: ActivationLayer | None = None,
    norm_layer: NormLayer = nn.BatchNorm2d,
    names: tuple[str, str] = ("conv", "norm"),
) -> nn.Sequential:
    """Make a convolution without bias, a norm and an activation; the first two have these names."""
    layers = OrderedDict[str, nn.Module]()
    layers[names[0]] = conv2d(inputs, outputs, kernel_size, stride, bias=False)
    layers[names[1]] = norm_layer(outputs)
    if activation is not None:
        layers["activation"] = activation()
    return nn.Sequential(layers)


# Backbone -------------------------------------------------------------------------------------------------------------

_of_backbone = partial(_layer, names=("convolution", "normalization"))


class ResNetVd(nn.Module):
    """A ResNet with three small convolutions at its beginning, whose shortcuts average before they have fewer cells.

    He et al., "Bag of Tricks for Image Classification with Convolutional Neural Networks" (2018).
    """

    def __init__(self, sizes: RtDetrSizes, norm_layer: NormLayer) -> None:
        super().__init__()
        make, stem = partial(_of_backbone, norm_layer=norm_layer), sizes.stem
        first = nn.Sequential(
            make(3, stem // 2, 3, 2, RELU), make(stem // 2, stem // 2, 3, 1, RELU), make(stem // 2, stem, 3, 1, RELU)
        )
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        stages, inputs = nn.Sequential(), stem
        for stage, (outputs, depth) in enumerate(zip(sizes.stages, sizes.depths, strict=True)):
            blocks = nn.Sequential()
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(ResidualBlockVd(inputs, outputs, stride, norm_layer, sizes.bottleneck, not block))
                inputs = outputs
            stages.append(nn.Sequential(OrderedDict(layers=blocks)))
        self.model = nn.ModuleDict(
            {
                "embedder": nn.Sequential(OrderedDict(embedder=first, pooler=pool)),
                "encoder": nn.ModuleDict({"stages": stages}),
            }
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to the maps of the last three stages, at strides 8, 16 and 32."""
        maps = [self.model["embedder"](images)]
        for stage in cast(nn.Sequential, self.get_submodule("model.encoder.stages")):
            maps.append(stage(maps[-1]))
        return maps[-_LEVELS:]


class ResidualBlockVd(nn.Module):
    """A block of two convolutions, or of three with a quarter of the channels inside; what came in is added.

    What came in has a convolution of its own in the first block of a stage, after an average if there is a stride.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm_layer: NormLayer, is_bottleneck: bool, is_first: bool
    ) -> None:
        super().__init__()
        make = partial(_of_backbone, norm_layer=norm_layer)
        shortcut = make(inputs, outputs, 1) if is_first else nn.Identity()
        average = nn.AvgPool2d(2, 2, ceil_mode=True)
        self.shortcut = nn.Sequential(average, shortcut) if stride > 1 else shortcut
        if is_bottleneck:
            inside = outputs // 4
            layers = [make(inputs, inside, 1, 1, RELU), make(inside, inside, 3, stride, RELU), make(inside, outputs, 1)]
        else:
            layers = [make(inputs, outputs, 3, stride, RELU), make(outputs, outputs, 3)]
        self.layer = nn.Sequential(*layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        return F.relu(self.layer(hidden) + self.shortcut(hidden), inplace=True)


# Encoder --------------------------------------------------------------------------------------------------------------


class QuerySelfAttention(nn.Module):
    """Attention of all to all, where places are added to what is asked and to what is compared, not to the values."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, hidden: Tensor, places: Tensor, may_see: Tensor | None = None) -> Tensor:
        """Map (batch, n, size) to the same; `places` has that shape, `may_see` is bool (n, n), of the first axis."""

        def by_head(values: Tensor) -> Tensor:
            return values.view(*values.shape[:2], self._heads, -1).transpose(1, 2)

        placed = hidden + places
        queries, keys, values = self.q_proj(placed), self.k_proj(placed), self.v_proj(hidden)
        attended = F.scaled_dot_product_attention(by_head(queries), by_head(keys), by_head(values), attn_mask=may_see)
        mixed: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return mixed


class EncoderLayer(nn.Module):
    """Attention between the cells of one map, and feed-forward layers, each with a norm of the sum with its input."""

    def __init__(self, size: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.self_attn = QuerySelfAttention(size, heads)
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.fc1, self.fc2 = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Map (batch, cells, size) to the same; `places` is (cells, size)."""
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, places))
        normed: Tensor = self.final_layer_norm(hidden + self.fc2(F.gelu(self.fc1(hidden))))
        return normed


class RepVggBlock(nn.Module):
    """A convolution of 3x3 and one of 1x1 side by side, added up (Ding et al.: RepVGG, 2021)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _layer(channels, channels, 3), _layer(channels, channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same."""
        return F.silu(self.conv1(hidden) + self.conv2(hidden))


class CspRepLayer(nn.Module):
    """Fuses two maps that are joined along the channels to one: some blocks, and a way around them."""

    def __init__(self, channels: int, expansion: float) -> None:
        super().__init__()
        inside = int(channels * expansion)
        self.conv1, self.conv2 = (_layer(2 * channels, inside, 1, activation=nn.SiLU) for _ in range(2))
        self.bottlenecks = nn.Sequential(*(RepVggBlock(inside) for _ in range(_BLOCKS_OF_FUSION)))
        self.conv3 = nn.Identity() if inside == channels else _layer(inside, channels, 1, activation=nn.SiLU)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map two of (batch, channels, height, width) to one."""
        joined = torch.cat(list(maps), 1)
        fused: Tensor = self.conv3(self.bottlenecks(self.conv1(joined)) + self.conv2(joined))
        return fused


class HybridEncoder(nn.Module):
    """Attention on the coarsest map, then fusions of the maps from coarse to fine and back."""

    def __init__(self, sizes: RtDetrSizes) -> None:
        super().__init__()
        channels, fuse = sizes.channels, partial(CspRepLayer, sizes.channels, sizes.expansion)
        layer = EncoderLayer(channels, sizes.feed_forward, sizes.heads)
        self.encoder = nn.ModuleList([nn.ModuleDict({"layers": nn.ModuleList([layer])})])
        steps = range(_LEVELS - 1)
        self.lateral_convs = nn.ModuleList(_layer(channels, channels, 1, activation=nn.SiLU) for _ in steps)
        self.fpn_blocks = nn.ModuleList(fuse() for _ in steps)
        self.downsample_convs = nn.ModuleList(_layer(channels, channels, 3, 2, nn.SiLU) for _ in steps)
        self.pan_blocks = nn.ModuleList(fuse() for _ in steps)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Map feature maps, finest first, each with half the height and width of the one before, to as many."""
        *fine, coarsest = maps
        height, width = coarsest.shape[2:]
        places = places_of_cells((height, width), coarsest.shape[1], coarsest.device)
        attend = self.get_submodule("encoder.0.layers.0")
        # Not `flatten` and `transpose`: of one image alone, torch's batch norm then misreads its gradient on a CPU.
        cells = attend(by_anchor(coarsest, coarsest.shape[1]), places)
        found = [cells.transpose(1, 2).reshape(coarsest.shape)]
        for lateral, fuse, finer in zip(self.lateral_convs, self.fpn_blocks, reversed(fine), strict=True):
            found[0] = lateral(found[0])
            found.insert(0, fuse([F.interpolate(found[0], scale_factor=2.0, mode="nearest"), finer]))
        fused = [found[0]]
        for downsample, fuse, coarser in zip(self.downsample_convs, self.pan_blocks, found[1:], strict=True):
            fused.append(fuse([downsample(fused[-1]), coarser]))
        return fused


def places_of_cells(shape: Shape, size: int, device: torch.device) -> Tensor:
    """Compute sine and cosine of row and column, of several frequencies: (cells, size)."""
    height, width = shape
    frequencies = _TEMPERATURE ** (-torch.arange(size // 4, device=device, dtype=torch.float32) / (size // 4))
    rows, columns = (
        torch.arange(side, device=device, dtype=torch.float32)[:, None] * frequencies for side in (height, width)
    )
    down, across = rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)
    return torch.cat([down.sin(), down.cos(), across.sin(), across.cos()], -1).flatten(0, 1)


# Decoder --------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Linear layers with a ReLU between each two."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*each) for each in pairwise(sizes))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., first size) to (..., last size)."""
        *inner, last = self.layers
        for layer in inner:
            hidden = F.relu(layer(hidden), inplace=True)
        outputs: Tensor = last(hidden)
        return outputs


class DeformableAttention(nn.Module):
    """Each query looks at a few places around its box, on each level (Zhu et al.: Deformable DETR, 2020)."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.sampling_offsets = nn.Linear(size, heads * _LEVELS * _POINTS * 2)
        self.attention_weights = nn.Linear(size, heads * _LEVELS * _POINTS)
        self.value_proj, self.output_proj = nn.Linear(size, size), nn.Linear(size, size)

    def reset_offsets(self) -> None:
        """Let each head look into a direction of its own, one of its points farther than the other."""
        angles = torch.arange(self._heads) * (2 * math.pi / self._heads)
        directions = torch.stack([angles.cos(), angles.sin()], -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        points = directions[:, None, None] * torch.arange(1, _POINTS + 1)[:, None]
        nn.init.zeros_(self.sampling_offsets.weight)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(points.expand(-1, _LEVELS, -1, -1).flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)

    def forward(self, queries: Tensor, boxes: Tensor, memory: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Map queries (batch, n, size) to the same.

        Args:
            queries: with their places.
            boxes: (batch, n, 4), of each query.
            memory: (batch, cells, size): the cells of all levels.
            shapes: height and width of each level.
        """
        batch, number, _ = queries.shape
        offsets = self.sampling_offsets(queries).view(batch, number, self._heads, _LEVELS, _POINTS, 2)
        weights = self.attention_weights(queries).view(batch, number, self._heads, -1).float().softmax(-1)
        around = boxes[:, :, None, None, None]
        # From -1 at one edge to 1 at the other: twice as long as shares.
        grids = (2 * around[..., :2] - 1 + offsets * (around[..., 2:] / _POINTS)).float().transpose(1, 2).flatten(0, 1)
        levels = torch.split(self.value_proj(memory).float(), [height * width for height, width in shapes], 1)
        sampled = [
            F.grid_sample(
                level.transpose(1, 2).reshape(batch * self._heads, -1, *shape), grids[:, :, index], align_corners=False
            )
            for index, (level, shape) in enumerate(zip(levels, shapes, strict=True))
        ]
        by_head = weights.transpose(1, 2).reshape(batch * self._heads, 1, number, -1)
        summed = (torch.cat(sampled, -1) * by_head).sum(-1)
        outputs: Tensor = self.output_proj(summed.view(batch, -1, number).transpose(1, 2))
        return outputs


class DecoderLayer(nn.Module):
    """Attention between the queries, of the queries to the maps, and feed-forward layers."""

    def __init__(self, sizes: RtDetrSizes) -> None:
        super().__init__()
        size, hidden = sizes.queries, sizes.decoder_feed_forward
        self.self_attn = QuerySelfAttention(size, sizes.heads)
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.encoder_attn = DeformableAttention(size, sizes.heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(size)
        self.fc1, self.fc2 = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def forward(
        self,
        queries: Tensor,
        places: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: Sequence[Shape],
        may_see: Tensor | None,
    ) -> Tensor:
        """Map queries (batch, n, size) to the same; see `DeformableAttention` and `QuerySelfAttention`."""
        queries = self.self_attn_layer_norm(queries + self.self_attn(queries, places, may_see))
        seen = self.encoder_attn(queries + places, boxes, memory, shapes)
        queries = self.encoder_attn_layer_norm(queries + seen)
        normed: Tensor = self.final_layer_norm(queries + self.fc2(F.relu(self.fc1(queries), inplace=True)))
        return normed


class QueryDecoder(nn.Module):
    """Layers that each move the boxes of the queries, and tell their classes."""

    def __init__(self, sizes: RtDetrSizes, num_classes: int) -> None:
        super().__init__()
        size, layers = sizes.queries, range(sizes.decoder_layers)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in layers)
        self.query_pos_head = Mlp(4, 2 * size, size)
        self.class_embed = nn.ModuleList(nn.Linear(size, num_classes) for _ in layers)
        self.bbox_embed = nn.ModuleList(Mlp(size, size, size, 4) for _ in layers)

    def forward(
        self,
        queries: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: Sequence[Shape],
        may_see: Tensor | None,
        *,
        last: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits (batch, n, classes) and boxes (batch, n, 4) of each layer, or with `last` of the last one.

        Args:
            queries: (batch, n, size).
            boxes: (batch, n, 4), where they begin.
            memory: (batch, cells, size): the cells of all levels.
            shapes: height and width of each level.
            may_see: bool (n, n): which query may look at which other; None: each at all.
            last: compute nothing else.
        """
        logits, moved = list[Tensor](), list[Tensor]()
        parts = zip(self.layers, self.bbox_embed, self.class_embed, strict=True)
        for number, (layer, to_boxes, to_logits) in enumerate(parts, 1):
            queries = layer(queries, self.query_pos_head(boxes), boxes, memory, shapes, may_see)
            found = (to_boxes(queries).float() + logit(boxes)).sigmoid()
            boxes = found.detach()
            if not last or number == len(self.layers):
                logits.append(to_logits(queries))
                moved.append(found)
        return logits, moved


def logit(shares: Tensor) -> Tensor:
    """Compute the inverse of the sigmoid, of what is nearly 0 or 1 that of 1e-5 from it."""
    shares = shares.clamp(0, 1)
    return (shares.clamp(min=_LEAST_SHARE) / (1 - shares).clamp(min=_LEAST_SHARE)).log()
