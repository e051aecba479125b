"""Have torchvision change a small image by its policies. Run by hand, never in the tests.

    python3.11 -m venv /tmp/torchvision
    /tmp/torchvision/bin/pip install "torchvision==0.28.*" numpy
    /tmp/torchvision/bin/python tests/golden/make_policies_golden.py

It writes `policies_golden.npz` beside itself: an image; the amounts of each operation of `RandAugment` and
`TrivialAugmentWide` by strength; the image changed by each operation, for some of these amounts of either sign; and the
same image in [0, 1] after each part of colour jitter, and after all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

Arrays = dict[str, npt.NDArray[np.generic]]

BINS = 31
STRENGTHS = (9, 30)
POLICIES: dict[str, Any] = {"RandAugment": v2.RandAugment, "TrivialAugmentWide": v2.TrivialAugmentWide}
FACTORS = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.6, 1.4), "hue": (-0.1, 0.3)}


def main() -> None:
    image = an_image()
    values = {"image": image.numpy()} | amounts(image) | changed(image) | jittered(image)
    np.savez_compressed(Path(__file__).parent / "policies_golden.npz", **values)  # type: ignore[arg-type]


def an_image() -> torch.Tensor:
    """Noise on slopes of other brightness in each channel; height 15, width 18."""
    noise = np.random.default_rng(0).integers(0, 60, (3, 15, 18))
    rows, columns = np.mgrid[:15, :18]
    slopes = np.stack([columns * 9, rows * 7 + 60, np.full_like(rows, 90)])
    return torch.from_numpy((slopes + noise).astype(np.uint8))


def amounts(image: torch.Tensor) -> Arrays:
    """By strength; zeros where there is nothing to choose."""
    values: Arrays = {}
    for name, policy in POLICIES.items():
        for operation, (magnitudes, _) in policy._AUGMENTATION_SPACE.items():
            found = magnitudes(BINS, *image.shape[1:])
            values[f"{name} {operation}"] = (torch.zeros(BINS) if found is None else found.float()).numpy()
    return values


def changed(image: torch.Tensor) -> Arrays:
    """The amounts, and the image changed by each, by operation."""
    values: Arrays = {}
    known = amounts(image)
    for operation, (_, signed) in v2.RandAugment._AUGMENTATION_SPACE.items():
        tried = sorted({float(known[f"{name} {operation}"][place]) for name in POLICIES for place in STRENGTHS})
        tried += [-amount for amount in tried if signed and amount]
        values[f"{operation} amounts"] = np.array(tried)
        values[operation] = np.stack([applied(image, operation, amount) for amount in tried])
    return values


def applied(image: torch.Tensor, operation: str, amount: float) -> npt.NDArray[np.generic]:
    result = v2.RandAugment()._apply_image_or_video_transform(
        image, operation, amount, interpolation=v2.InterpolationMode.NEAREST, fill={torch.Tensor: None}
    )
    return result.numpy()


def jittered(image: torch.Tensor) -> Arrays:
    values: Arrays = {}
    floats = image / 255
    for name, factors in FACTORS.items():
        for factor in factors:
            values[f"{name} {factor}"] = getattr(functional, f"adjust_{name}")(floats, factor).numpy()
    for name in ("hue", "contrast", "brightness", "saturation"):
        floats = getattr(functional, f"adjust_{name}")(floats, FACTORS[name][1])
    values["jitter"] = floats.numpy()
    values["grey"] = functional.rgb_to_grayscale(image / 255).numpy()
    return values


if __name__ == "__main__":
    main()
