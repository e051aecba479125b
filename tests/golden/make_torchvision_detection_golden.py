"""Have torchvision's detectors compute losses, gradients and detections from the weights of detection_inputs.py.

    python3.11 -m venv /tmp/torchvision
    /tmp/torchvision/bin/pip install torch==2.13.0 torchvision==0.28.0
    PYTHONPATH=tests/golden /tmp/torchvision/bin/python tests/golden/make_torchvision_detection_golden.py

It is run by hand, never in the tests. It writes `torchvision_detection_golden.npz` beside itself; with --only, the
detector of that name into the file that is there. Of each gradient, of each mask and of the keypoints of each object
there is the `summary`, not all values. All is computed in float64: in float32 some of SSDlite's gradients are
6e-5 off. With --check it says how far float32 is from it: a golden that hangs on a rounding would show there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detection_inputs import (
    CASES,
    NUM_CLASSES,
    NUM_KEYPOINTS,
    NUM_WITH_KEYPOINTS,
    SEED,
    Case,
    boxes_of,
    freeze_norms,
    images_of,
    keypoints_of,
    labels_of,
    masks_of,
    summary,
    weights_for,
)
from torchvision.models import detection

PATH = Path(__file__).with_name("torchvision_detection_golden.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compute in float32, too, and write nothing")
    parser.add_argument("--only", choices=CASES, metavar="DETECTOR", help="leave the others as they are recorded")
    arguments = parser.parse_args()
    arrays = dict(np.load(PATH)) if arguments.only else {}
    for name, case in CASES.items():
        if arguments.only not in (None, name):
            continue
        recorded = computed(name, case, torch.float64)
        arrays |= {f"{name} {key}": value for key, value in recorded.items()}
        print(name, {key: value.shape for key, value in recorded.items() if key.endswith("scores")}, flush=True)
        if arguments.check:
            rounded = computed(name, case, torch.float32)
            for key in recorded:
                print(f"    {key:40} {distance(rounded[key], recorded[key])}", flush=True)
    if not arguments.check:
        np.savez_compressed(PATH, **arrays)
        print(f"{PATH.stat().st_size} bytes")


def computed(name: str, case: Case, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """All that is recorded of a detector."""
    sizes = {} if name.startswith("ssd") else {"min_size": case.height, "max_size": case.width}
    sizes |= (
        {"num_keypoints": NUM_KEYPOINTS, "box_detections_per_img": NUM_WITH_KEYPOINTS}
        if name.startswith("keypoint")
        else {}
    )
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=NUM_CLASSES + 1, **sizes)
    # Images are as large as the input, and masks stay those of the boxes.
    model.transform.postprocess = lambda result, *sizes: result
    model.load_state_dict(weights_for(model.state_dict(), case.gains))
    model.to(dtype)
    images = list((images_of(case) / 255).to(dtype))
    targets = [
        {"boxes": boxes.to(dtype), "labels": labels, "masks": masks, "keypoints": points}
        for boxes, labels, masks, points in zip(
            boxes_of(case), labels_of(case), masks_of(case), keypoints_of(case), strict=True
        )
    ]
    model.train()
    freeze_norms(model)
    torch.manual_seed(SEED)
    losses = model(images, targets)
    torch.stack(list(losses.values())).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.eval()
    with torch.no_grad():
        detections = model(images)
    return {
        **{f"loss {name}": loss.detach().numpy() for name, loss in losses.items()},
        "parameters": np.array("\n".join(gradients)),
        "gradients": np.array([summary(each) for each in gradients.values()]),
        **{key: value for number, found in enumerate(detections) for key, value in described(number, found).items()},
    }


def described(number: int, found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The detections of one image."""
    parts = {"masks", "keypoints", "keypoints_scores"} & found.keys()
    summaries = {name: np.array([summary(each) for each in found[name]]) for name in parts}
    arrays = {name: found[name].numpy() for name in ("boxes", "scores", "labels")} | summaries
    return {f"image {number} {name}": _short(value) for name, value in arrays.items()}


def _short(value: np.ndarray) -> np.ndarray:
    """Floats in half the bytes."""
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def distance(rounded: np.ndarray, exact: np.ndarray) -> str:
    """The largest difference, over the largest value."""
    if exact.dtype.kind not in "fi":
        return "names"
    if rounded.shape != exact.shape:
        return f"exactly {exact.shape}"
    return f"{np.max(np.abs(rounded - exact), initial=0) / max(np.max(np.abs(exact), initial=0), 1e-9):.1e}"


if __name__ == "__main__":
    main()
