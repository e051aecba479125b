"""Maps from the names of timm's MobileNets and EfficientNets to those of the backbones here.

Timm names a block by its stage and its place there, and its layers by what they do; torchvision, whose names the
MobileNets have here, numbers blocks and layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lockstep.weights.names import NameMap, Rename

_FIRST = (("conv_dw", "bn1"), ("conv_pw", "bn2"))
_OTHER = (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3"))
"""Each convolution of a block with the norm behind it: the first blocks expand nothing."""


def _mobilenet(stages: Sequence[int], excited: Collection[int], kind: str) -> NameMap:
    """Return the map of a MobileNet.

    Args:
        stages: the number of blocks of each stage.
        excited: the blocks with squeeze and excitation, from 0 on.
        kind: what the module of a block calls its layers: "conv" of version 2, "block" of version 3.
    """
    places = [(stage, block) for stage, count in enumerate(stages) for block in range(count)]
    blocks = [
        rename
        for index, (stage, block) in enumerate(places)
        for rename in _block(
            rf"blocks\.{stage}\.{block}",
            f"{index + 1}.{kind}",
            _OTHER if stage else _FIRST,
            is_excited=index in excited,
            is_apart=kind == "conv",
        )
    ]
    last = rf"blocks\.{len(stages)}\.0\."
    conv, norm = (f"{last}conv", f"{last}bn1") if kind == "block" else ("conv_head", "bn2")
    end = len(places) + 1
    ends = Rename(rf"^{conv}\.", f"{end}.0."), Rename(rf"^{norm}\.", f"{end}.1.")
    return NameMap((*_stem("0"), *ends, *blocks), system="torch")


def _efficientnet() -> NameMap:
    blocks = [
        rename
        for stage in range(7)
        for rename in _block(
            rf"blocks\.{stage}\.(\d+)", rf"{stage + 1}_\1.block", _OTHER if stage else _FIRST, is_excited=True
        )
    ]
    return NameMap((*_stem("stem"), *blocks), system="torch")


def _stem(to: str) -> list[Rename]:
    return [Rename(r"^conv_stem\.", f"{to}.0."), Rename(r"^bn1\.", f"{to}.1.")]


def _block(
    start: str, to: str, layers: Sequence[tuple[str, str]], *, is_excited: bool, is_apart: bool = False
) -> list[Rename]:
    """Return the renames of a block; where it `is_apart`, the last norm is no part of the layer before it."""
    renames = []
    for number, (conv, norm) in enumerate(layers):
        is_last = number == len(layers) - 1
        place = number + (is_last and is_excited)
        ends = (f"{place}", f"{place + 1}") if is_last and is_apart else (f"{place}.0", f"{place}.1")
        names = zip((conv, norm), ends, strict=True)
        renames += [Rename(rf"^{start}\.{name}\.", f"{to}.{end}.") for name, end in names]
    excitation = f"{to}.{len(layers) - 1}"
    parts = {"conv_reduce": "fc1", "conv_expand": "fc2"} if is_excited else {}
    return renames + [Rename(rf"^{start}\.se\.{name}\.", f"{excitation}.{end}.") for name, end in parts.items()]


EXCITED_LARGE, EXCITED_SMALL = frozenset({3, 4, 5, 10, 11, 12, 13, 14}), frozenset({0, *range(3, 11)})
"""The blocks of MobileNetV3 that have squeeze and excitation."""
TIMM_NETS = {
    "timm_mobilenet_v2": _mobilenet((1, 2, 3, 4, 3, 3, 1), (), "conv"),
    "timm_mobilenet_v3_large": _mobilenet((1, 2, 3, 4, 2, 3), EXCITED_LARGE, "block"),
    "timm_mobilenet_v3_small": _mobilenet((1, 2, 3, 2, 3), EXCITED_SMALL, "block"),
    "timm_efficientnet": _efficientnet(),
}
"""The maps to the features of the backbones."""
