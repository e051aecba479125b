"""Record RT-DETR by the code of `transformers`. Run by hand, never in the tests.

    python3.11 -m venv /tmp/transformers
    /tmp/transformers/bin/pip install "transformers==5.24.0" torch safetensors scipy
    /tmp/transformers/bin/python tests/golden/make_rt_detr_golden.py

It writes `rt_detr_golden.npz` beside itself: of two small nets logits, boxes, detections, the losses of each layer, and
the norm of each parameter's gradient; and of the published nets a checksum of the names and shapes in their files.
Batch norm has its moving statistics, also where the losses are computed.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import rt_detr_inputs as inputs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig
from transformers.models.rt_detr.image_processing_pil_rt_detr import RTDetrImageProcessorPil

FILE = "model.safetensors"


def main() -> None:
    torch.set_num_threads(1)
    recorded: dict[str, Any] = {}
    for name, sizes in inputs.SIZES.items():
        recorded |= {f"{name}/{key}": value for key, value in record(sizes | inputs.SHARED).items()}
    recorded["files"] = json.dumps({name: checksum(*config) for name, config in inputs.PUBLISHED.items()})
    for key, value in recorded.items():
        print(key, value if isinstance(value, str) else (value.shape, float(np.std(value))))
    np.savez_compressed(inputs.PATH, **recorded)


def record(sizes: dict[str, Any]) -> dict[str, Any]:
    stages = [sizes["stem"] * (4 if sizes["bottleneck"] else 1) << stage for stage in range(4)]
    model, names = with_weights(
        {
            "embedding_size": sizes["stem"],
            "hidden_sizes": stages,
            "depths": sizes["depths"],
            "layer_type": "bottleneck" if sizes["bottleneck"] else "basic",
        },
        {
            "encoder_in_channels": stages[1:],
            "encoder_hidden_dim": sizes["channels"],
            "encoder_ffn_dim": sizes["feed_forward"],
            "encoder_attention_heads": sizes["heads"],
            "hidden_expansion": sizes["expansion"],
            "d_model": sizes["queries"],
            "decoder_in_channels": [sizes["channels"]] * 3,
            "decoder_ffn_dim": sizes["decoder_feed_forward"],
            "decoder_layers": sizes["decoder_layers"],
            "decoder_attention_heads": sizes["heads"],
            "num_queries": inputs.NUM_QUERIES,
            "num_denoising": inputs.NUM_DENOISING,
            "num_labels": inputs.NUM_CLASSES,
        },
    )
    images = torch.from_numpy(inputs.images()) / 255
    model.eval()
    with torch.no_grad():
        found = model(images)
    detected = RTDetrImageProcessorPil.post_process_object_detection(None, found, 0.0, [inputs.SIDES] * 2)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with drawn():
        losses = model(images, labels=labels())
    losses.loss.backward()
    layers = sizes["decoder_layers"]
    order = [f"_aux_{each}" for each in (layers - 1, *range(layers - 1))] + [""]
    of_kind = {
        f"{prefix}{ours}": np.array([losses.loss_dict[f"loss_{theirs}{end}"].item() for end in ends], np.float32)
        for theirs, ours in inputs.LOSSES.items()
        for prefix, ends in {"": order, "denoising_": [f"_dn_{each}" for each in range(layers)]}.items()
    }
    norms = {names[name]: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None}
    return {
        "logits": found.logits.numpy(),
        "found_boxes": found.pred_boxes.numpy(),
        "detected_boxes": torch.stack([each["boxes"] for each in detected]).numpy(),
        "detected_scores": torch.stack([each["scores"] for each in detected]).numpy(),
        "detected_labels": torch.stack([each["labels"] for each in detected]).numpy(),
        **of_kind,
        "gradients": np.array([norms[name] for name in sorted(norms)], np.float32),
    }


def with_weights(of_backbone: dict[str, Any], others: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """A net with the weights that follow from the names in its file, and these names by its own."""
    backbone = RTDetrResNetConfig(out_indices=[2, 3, 4], **of_backbone)
    config = RTDetrConfig(backbone_config=backbone, freeze_backbone_batch_norms=False, **others)
    with tempfile.TemporaryDirectory() as folder:
        RTDetrForObjectDetection(config).save_pretrained(folder)
        file = Path(folder, FILE)
        values = load_file(file)
        for name, value in values.items():
            if value.is_floating_point():
                values[name] = torch.from_numpy(inputs.weights(name.removeprefix("model."), value.shape))
        save_file(values, file, {"format": "pt"})
        model = RTDetrForObjectDetection.from_pretrained(folder)
    return model, {name: of_file(own, values, name) for name, own in model.named_parameters()}


def of_file(own: Tensor, values: dict[str, Tensor], name: str) -> str:
    """The name that the file has for a parameter: that of the tensor with its values."""
    (found,) = [each for each, value in values.items() if value.shape == own.shape and torch.equal(value, own)]
    assert found.split(".")[-1] == name.split(".")[-1], (found, name)
    return found.removeprefix("model.")


def labels() -> list[dict[str, Tensor]]:
    found = []
    for boxes, classes in zip(*inputs.objects(), strict=True):
        top, left, bottom, right = torch.from_numpy(boxes).unbind(1)
        centred = torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], 1)
        found.append({"class_labels": torch.from_numpy(classes), "boxes": centred})
    return found


def drawn() -> Any:
    """Give the noise its draws, in place of torch's."""
    uniform = torch.from_numpy(inputs.draws())
    classes = (uniform[..., 1] * inputs.NUM_CLASSES).int()
    integers = iter([classes, (uniform[..., 2:6] >= 0.5).float()])
    shares = iter([uniform[..., 0], uniform[..., 6:].clone()])
    return patch.multiple(torch, randint_like=lambda *_, **__: next(integers), rand_like=lambda *_, **__: next(shares))


def checksum(of_backbone: dict[str, Any], others: dict[str, Any]) -> list[int]:
    """How many tensors a file of the published configuration has, and a CRC of their names and shapes."""
    backbone = RTDetrResNetConfig(out_indices=[2, 3, 4], **of_backbone)
    config = RTDetrConfig(backbone_config=backbone, num_labels=80, freeze_backbone_batch_norms=False, **others)
    with tempfile.TemporaryDirectory() as folder:
        RTDetrForObjectDetection(config).save_pretrained(folder)
        shapes = sorted((name, list(each.shape)) for name, each in load_file(Path(folder, FILE)).items())
    return [len(shapes), zlib.crc32(json.dumps(shapes).encode())]


if __name__ == "__main__":
    main()
