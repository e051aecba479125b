"""Have torchvision compute the parts of its detectors: anchors, codes, matches, losses, pooling, suppression, masks.

    python3.11 -m venv /tmp/torchvision
    /tmp/torchvision/bin/pip install torch==2.13.0 torchvision==0.28.0
    PYTHONPATH=. /tmp/torchvision/bin/python tests/golden/make_torchvision_parts_golden.py

It is run by hand, never in the tests. It writes `torchvision_parts_golden.npz` beside itself: each array is named by
its part and by what it is there. Boxes are torchvision's: left, top, right and bottom; codes in its order too.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import ops
from torchvision.models.detection import _utils, anchor_utils, roi_heads
from torchvision.models.detection.fcos import FCOS, FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSD

PATH = Path(__file__).with_name("torchvision_parts_golden.npz")
SSD300_RATIOS = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
SSD300_SCALES = [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05]
SSD300_STEPS = [8, 16, 32, 64, 100, 300]
SSD300_MAPS = [(38, 38), (19, 19), (10, 10), (5, 5), (3, 3), (1, 1)]
EVERY = 53  # of the 8,732 default boxes of SSD300
SMALL_MAPS, SMALL_IMAGE = [(4, 5), (2, 3), (1, 2), (1, 1), (1, 1), (1, 1)], (64, 80)
PYRAMID, PYRAMID_IMAGE = [(8, 10), (4, 5), (2, 3), (1, 2), (1, 1)], (64, 80)


def main() -> None:
    torch.manual_seed(17)
    arrays: dict[str, Tensor] = {}
    geometry = (anchors, box_coders, overlaps, matchers)
    losses = (ssd_losses, fcos_losses, region_losses, focal_losses)
    for part in (*geometry, *losses, pooling, selection):
        name = part.__name__.replace("_", " ")
        arrays |= {f"{name} {key}": value for key, value in part().items()}
    np.savez_compressed(PATH, **{name: value.detach().numpy() for name, value in arrays.items()})
    print(f"{PATH.name}: {len(arrays)} arrays, {PATH.stat().st_size} bytes")


# Geometry -----------------------------------------------------------------------------------------------------------


def boxes(count: int, height: float = 60.0, width: float = 80.0) -> Tensor:
    """Random ones, all with an area, some beyond the image."""
    corners = torch.rand(count, 2) * torch.tensor([width, height]) - 4
    sides = 1 + torch.rand(count, 2) * torch.tensor([width, height]) * 0.6
    return torch.cat([corners, corners + sides], 1)


def near(objects: Tensor, count: int) -> Tensor:
    """Boxes that lie about these, in turn, the more so the earlier they come."""
    turns = torch.arange(count) % len(objects)
    return objects[turns] + torch.rand(count, 4) * torch.linspace(0, 12, count)[:, None]


def anchors() -> dict[str, Tensor]:
    def of(generator: Any, maps: list[tuple[int, int]], image: tuple[int, int]) -> Tensor:
        images = ImageList(torch.zeros(1, 3, *image), [image])
        return generator(images, [torch.zeros(1, 1, *sides) for sides in maps])[0]

    ssd300 = anchor_utils.DefaultBoxGenerator(SSD300_RATIOS, scales=SSD300_SCALES, steps=SSD300_STEPS)
    ssdlite = anchor_utils.DefaultBoxGenerator([[2, 3] for _ in range(6)], min_ratio=0.2, max_ratio=0.95)
    faster_rcnn = anchor_utils.AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    fcos = anchor_utils.AnchorGenerator(((8,), (16,), (32,), (64,), (128,)), ((1.0,),) * 5)
    return {
        "of SSD300, every 53rd": of(ssd300, SSD300_MAPS, (300, 300))[::EVERY],
        "of SSDlite, maps": torch.tensor(SMALL_MAPS),
        "of SSDlite, image": torch.tensor(SMALL_IMAGE),
        "of SSDlite": of(ssdlite, SMALL_MAPS, SMALL_IMAGE),
        "of a pyramid, maps": torch.tensor(PYRAMID),
        "of a pyramid, image": torch.tensor(PYRAMID_IMAGE),
        "of Faster R-CNN": of(faster_rcnn, PYRAMID, PYRAMID_IMAGE),
        "of FCOS": of(fcos, PYRAMID, PYRAMID_IMAGE),
    }


def box_coders() -> dict[str, Tensor]:
    objects, priors, codes = boxes(12), boxes(12), torch.randn(12, 4) * 3
    codes[:3, 2:] += 25  # beyond what sizes are clamped to
    found = {"objects": objects, "anchors": priors, "codes": codes}
    for name, weights in (("10 10 5 5", (10.0, 10.0, 5.0, 5.0)), ("1 1 1 1", (1.0,) * 4)):
        coder = _utils.BoxCoder(weights)
        found[f"encoded {name}"] = coder.encode_single(objects, priors)
        found[f"decoded {name}"] = coder.decode_single(codes, priors)
    linear = _utils.BoxLinearCoder(normalize_by_size=True)
    distances = codes.abs()
    # torchvision encodes with the anchors first, and decodes with them last.
    return found | {
        "linear codes": distances,
        "encoded linear": linear.encode(priors, objects),
        "decoded linear": linear.decode(distances, priors),
    }


def overlaps() -> dict[str, Tensor]:
    first, second = boxes(7), boxes(9)
    return {
        "first": first,
        "second": second,
        "area": ops.box_area(first),
        "iou": ops.box_iou(first, second),
        "giou": ops.generalized_box_iou(first, second),
        "giou loss of pairs": ops.generalized_box_iou_loss(first, second[:7], reduction="none"),
        "clipped to 40, 50": ops.clip_boxes_to_image(first, (40, 50)),
        "kept of 20 and more": ops.remove_small_boxes(first, 20.0),
    }


def matchers() -> dict[str, Tensor]:
    """Over similarities of 5 objects and 40 anchors, with ties between anchors and between objects."""
    objects = boxes(5)
    similarity = ops.box_iou(objects, near(objects, 40))
    similarity[3] = similarity[1]
    similarity[:, 7] = similarity[:, 8]
    similarity[2, 20:22] = similarity[2].max() + 0.01
    found = {"similarity": similarity}
    for low_quality in (False, True):
        for high, low in ((0.7, 0.3), (0.5, 0.5), (0.5, 0.4)):
            name = f"argmax {high} {low}" + " and low quality" * low_quality
            found[name] = _utils.Matcher(high, low, allow_low_quality_matches=low_quality)(similarity)
    return found | {"SSD 0.5": _utils.SSDMatcher(0.5)(similarity), "SSD 0.3": _utils.SSDMatcher(0.3)(similarity)}


# Losses -------------------------------------------------------------------------------------------------------------


def ssd_losses() -> dict[str, Tensor]:
    """Of three images with 3, no and 2 objects, 60 anchors, 4 classes and the background."""
    objects = boxes(5)
    priors = near(objects, 60)
    targets = [
        {"boxes": objects[:3], "labels": torch.tensor([2, 4, 1])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
        {"boxes": objects[3:], "labels": torch.tensor([3, 3])},
    ]
    matcher = _utils.SSDMatcher(0.5)
    matched = [
        matcher(ops.box_iou(each["boxes"], priors)) if len(each["boxes"]) else torch.full((60,), -1) for each in targets
    ]
    codes, logits = (torch.randn(3, 60, size) for size in (4, 5))
    codes, logits = codes.requires_grad_(), logits.requires_grad_()
    ssd: Any = SimpleNamespace(box_coder=_utils.BoxCoder((10.0, 10.0, 5.0, 5.0)), neg_to_pos_ratio=3.0)
    outputs = {"bbox_regression": codes, "cls_logits": logits}
    losses = SSD.compute_loss(ssd, targets, outputs, [priors] * 3, matched)
    of_codes, of_logits = torch.autograd.grad(sum(losses.values()), [codes, logits])
    return {
        "anchors": priors,
        "first objects": targets[0]["boxes"],
        "first labels": targets[0]["labels"],
        "third objects": targets[2]["boxes"],
        "third labels": targets[2]["labels"],
        "matched": torch.stack(matched),
        "codes": codes,
        "logits": logits,
        **losses,
        "gradient of codes": of_codes,
        "gradient of logits": of_logits,
    }


def fcos_losses() -> dict[str, Tensor]:
    """Of two images with 3 and no objects and 4 classes, on the anchors "of FCOS"."""
    generator = anchor_utils.AnchorGenerator(((8,), (16,), (32,), (64,), (128,)), ((1.0,),) * 5)
    maps = [torch.zeros(2, 1, *sides) for sides in PYRAMID]
    priors = generator(ImageList(torch.zeros(2, 3, *PYRAMID_IMAGE), [PYRAMID_IMAGE] * 2), maps)
    nested = torch.tensor([[10.0, 8, 62, 55], [20, 20, 44, 41], [50, 30, 79, 63]])
    targets = [
        {"boxes": nested, "labels": torch.tensor([1, 3, 2])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    count = len(priors[0])
    logits = torch.randn(2, count, 4)
    codes, centerness = torch.rand(2, count, 4) * 3, torch.randn(2, count, 1)
    outputs = {"cls_logits": logits, "bbox_regression": codes, "bbox_ctrness": centerness}
    for value in outputs.values():
        value.requires_grad_()
    head = _Recorder(FCOSHead(32, 1, 4))
    coder = _utils.BoxLinearCoder(normalize_by_size=True)
    fcos: Any = SimpleNamespace(head=head, box_coder=coder, center_sampling_radius=1.5)
    losses = FCOS.compute_loss(fcos, targets, outputs, priors, [h * w for h, w in PYRAMID])
    gradients = torch.autograd.grad(sum(losses.values()), list(outputs.values()))
    return {
        "objects": nested,
        "labels": targets[0]["labels"],
        "matched": torch.stack(head.matched),
        "logits": logits,
        "codes": codes,
        "centerness": centerness,
        **{f"{name} loss": value for name, value in losses.items()},
        **{f"gradient of {name}": value for name, value in zip(outputs, gradients, strict=True)},
    }


class _Recorder:
    """A head whose losses are computed, and the matches that they are computed from kept."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def compute_loss(self, targets: Any, outputs: Any, priors: Any, matched: list[Tensor]) -> dict[str, Tensor]:
        self.matched = matched
        return self.head.compute_loss(targets, outputs, priors, matched)


def region_losses() -> dict[str, Tensor]:
    """Of the heads of Faster and Mask R-CNN, for 10 regions, 4 classes and the background; of masks of 40 by 50."""
    logits, codes = torch.randn(10, 5), torch.randn(10, 20)
    labels, targets = torch.tensor([0, 3, 1, 0, 0, 4, 2, 2, 0, 1]), torch.randn(10, 4)
    classification, localization = roi_heads.fastrcnn_loss(logits, codes, [labels], [targets])
    masks = torch.zeros(3, 40, 50, dtype=torch.uint8)
    masks[0, 5:30, 10:35], masks[1, 20:38, 2:20], masks[2, ::2, 20:] = 1, 1, 1
    regions, matched = boxes(6, 36, 46), torch.tensor([0, 2, 1, 1, 0, 2])
    mask_logits, mask_labels = torch.randn(6, 5, 14, 14), torch.tensor([3, 1, 4])
    return {
        "logits": logits,
        "codes": codes,
        "labels": labels,
        "targets": targets,
        "classification": classification,
        "localization": localization,
        "masks": masks,
        "regions": regions,
        "matched": matched,
        "mask logits": mask_logits,
        "mask labels": mask_labels,
        "mask targets": roi_heads.project_masks_on_boxes(masks, regions, matched, 14),
        "mask loss": roi_heads.maskrcnn_loss(mask_logits, [regions], [masks], [mask_labels], [matched]),
    }


def focal_losses() -> dict[str, Tensor]:
    logits, targets = torch.randn(6, 4), torch.rand(6, 4).round()
    return {"logits": logits, "targets": targets, "of each": ops.sigmoid_focal_loss(logits, targets)}


# Regions ------------------------------------------------------------------------------------------------------------


def pooling() -> dict[str, Tensor]:
    """Of two maps of 3 channels, 12 by 15, over images of 48 by 60; and of a pyramid over images of 256 by 320."""
    features = torch.randn(2, 3, 12, 15, requires_grad=True)
    regions = boxes(9, 48, 60)
    regions[7:] = torch.tensor([[10.0, 10, 10.5, 10.2], [-40, -40, -20, -10]])
    rows = torch.cat([torch.tensor([0.0, 1, 0, 0, 1, 1, 0, 1, 0])[:, None], regions], 1)
    found: dict[str, Tensor] = {"features": features, "regions": rows}
    for aligned in (False, True):
        for ratio in (2, -1):
            pooled = ops.roi_align(features, rows, (3, 4), 0.25, ratio, aligned)
            weights = torch.linspace(-1, 1, pooled.numel()).view_as(pooled)
            (gradient,) = torch.autograd.grad((pooled * weights).sum(), features)
            name = f"3 by 4, sampling ratio {ratio}" + ", aligned" * aligned
            found |= {name: pooled, f"{name}, gradient": gradient}
    pyramid = OrderedDict((str(level), torch.randn(2, 1, 32 >> level, 40 >> level)) for level in range(4))
    sides = torch.tensor([12.0, 40, 100, 111, 113, 200, 224, 230, 250])[:, None]
    corners = torch.rand(9, 2) * 60
    spread = torch.cat([corners, corners + sides * torch.tensor([1.1, 0.9])], 1)
    per_image = [spread[:5], spread[5:]]
    pooler = ops.MultiScaleRoIAlign(["0", "1", "2", "3"], 3, 2)
    return {
        **found,
        **{f"pyramid {level}": value for level, value in pyramid.items()},
        "pyramid regions of the first image": per_image[0],
        "pyramid regions of the second image": per_image[1],
        "pyramid 3 by 3": pooler(pyramid, per_image, [(256, 320)] * 2),
    }


def selection() -> dict[str, Tensor]:
    """What suppression keeps, and where the masks of detections are pasted."""
    candidates, scores, labels = near(boxes(8), 80), torch.rand(80), torch.randint(0, 4, (80,))
    probabilities = torch.rand(4, 1, 14, 14)
    places = boxes(4, 40, 50)
    found = {"boxes": candidates, "scores": scores, "labels": labels}
    for threshold in (0.3, 0.5, 0.7):
        found[f"kept {threshold}"] = ops.nms(candidates, scores, threshold)
        found[f"kept {threshold} of each label"] = ops.batched_nms(candidates, scores, labels, threshold)
    pasted = roi_heads.paste_masks_in_image(probabilities, places, (40, 50))
    return found | {"masks": probabilities, "mask boxes": places, "pasted in 40 by 50": pasted}


if __name__ == "__main__":
    main()
