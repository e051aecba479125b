"""The detector of a run as a file: one image in, the detections of an evaluation out."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from saved_runs import saved
from tiny_detector import tiny_recipe
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.cli.main import main
from lockstep.detection.blocks import (
    BatchNonMaxSuppression,
    L1LocalizationLoss,
    PenaltyReducedLogisticFocalLoss,
    PostProcessing,
)
from lockstep.detection.detector import Detections, paste_masks
from lockstep.detection.nms import NmsLimits, detections_of_all, postprocess
from lockstep.detection.tf_center_net_configs import (
    CenterNet,
    CenterNetFeatureExtractor,
    KeypointEstimation,
    KeypointLoss,
    ObjectCenterParams,
    ObjectDetection,
)
from lockstep.detection.tf_configs import Ssd
from lockstep.detection.values import (
    FasterRcnnFpn,
    Fcos,
    KeypointRcnnFpn,
    MaskRcnnFpn,
    RtDetr,
    SqueezeSsd,
    Ssd300,
    Ssdlite,
)
from lockstep.mask_runs import pixels_in, runs_text
from lockstep.recipes.pipeline_config import import_pipeline
from lockstep.recipes.shipped import find
from lockstep.runs.detector_graph import _size_in_graph
from lockstep.runs.export import IMAGE, ImagesOfGraph, encode_model
from lockstep.runs.trained import Trained, trained_model

ROOT = Path(__file__).parents[2]


def image(seed: int) -> Tensor:
    return torch.randint(0, 256, (3, 32, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def exported(trained: Trained, ending: str) -> bytes:
    return b"".join(bytes(part) for part in encode_model(trained, ending))


def found_by_run(trained: Trained, pixels: Tensor) -> Detections:
    task: Any = trained.recipe.chosen_task
    with torch.no_grad():
        (found,) = task.detect(trained.model, {"image": pixels[None]})
    return Detections(found.boxes.clamp(min=0).minimum(torch.tensor([32.0, 48, 32, 48])), *found[1:])


def check(outputs: Any, expected: Detections, most: int) -> None:
    boxes, scores, labels, number = outputs
    assert (len(boxes), len(scores), len(labels)) == (most,) * 3
    assert int(number) == len(expected.scores) > 0
    torch.testing.assert_close(boxes[: int(number)], expected.boxes)
    torch.testing.assert_close(scores[: int(number)], expected.scores)
    assert torch.equal(labels[: int(number)], expected.labels)
    assert not any(rows[int(number) :].any() for rows in (boxes, scores, labels))


def published(name: str, **suppression: Any) -> Any:
    """The model of a published config, thin, for three classes, with few steps of suppression."""
    path = ROOT / "tests/fixtures/odapi_configs" / f"{name}.config"
    model: Any = import_pipeline(path.read_text(), path.name, path.stem).recipe.model
    nms = BatchNonMaxSuppression(0.2, 0.5, **{"max_detections_per_class": 15, "max_total_detections": 30} | suppression)
    if isinstance(model, Ssd):
        thin = replace(model.feature_extractor, depth_multiplier=0.1)
        how = replace(model.post_processing, batch_non_max_suppression=nms)
        return replace(model, num_classes=3, feature_extractor=thin, post_processing=how)
    how = replace(model.second_stage_post_processing, batch_non_max_suppression=nms)
    return replace(model, num_classes=3, first_stage_max_proposals=40, second_stage_post_processing=how)


def efficientdet() -> Any:
    """An EfficientDet-D0 of the Object Detection API, with a thin pyramid, for three classes."""
    text = """model { ssd {
      num_classes: 3 add_background_class: false encode_background_as_zeros: true
      box_coder { faster_rcnn_box_coder { } } matcher { argmax_matcher { } }
      similarity_calculator { iou_similarity { } }
      anchor_generator { multiscale_anchor_generator { aspect_ratios: [1, 2, 0.5] scales_per_octave: 3 } }
      image_resizer { fixed_shape_resizer { height: 128 width: 128 } }
      box_predictor { weight_shared_convolutional_box_predictor {
        depth: 16 num_layers_before_predictor: 2 use_depthwise: true
        conv_hyperparams { activation: SWISH initializer { random_normal_initializer { } } batch_norm { } } } }
      feature_extractor { type: "ssd_efficientnet-b0_bifpn_keras"
        bifpn { min_level: 3 max_level: 7 num_iterations: 1 num_filters: 16 }
        conv_hyperparams { initializer { random_normal_initializer { } } } }
      loss { classification_loss { weighted_sigmoid_focal { } } localization_loss { weighted_smooth_l1 { } } }
      post_processing { score_converter: SIGMOID batch_non_max_suppression { max_total_detections: 20 } } } }
      train_config { optimizer { momentum_optimizer { learning_rate { constant_learning_rate { } } } } }"""
    return import_pipeline(text, "efficientdet.config", "efficientdet").recipe.model


FEW = {"rpn_pre_nms_top_n_test": 100, "rpn_post_nms_top_n_test": 40, "max_detections": 30}
BY_SIZE = KeepAspectRatioResizer(96, 200, "antialiased")
PADDED = KeepAspectRatioResizer(120, 160, pad_to_max_dimension=True, per_channel_pad_value=(9, 99, 199))
FOCAL = PenaltyReducedLogisticFocalLoss(2.0, 4.0)
FAMILIES = {
    "CenterNet": (
        CenterNet(
            3,
            CenterNetFeatureExtractor("mobilenet_v2_fpn"),
            ObjectDetection(L1LocalizationLoss()),
            ObjectCenterParams(FOCAL, max_box_predictions=20),
        ),
        FixedShapeResizer(128, 160),
        ["--raw-images", "480x640", "--batch"],
    ),
    "CenterNet of keypoints": (
        CenterNet(
            3,
            CenterNetFeatureExtractor("mobilenet_v2_fpn"),
            ObjectDetection(L1LocalizationLoss()),
            ObjectCenterParams(FOCAL, max_box_predictions=20),
            tuple(
                KeypointEstimation(
                    KeypointLoss(L1LocalizationLoss(), FOCAL),
                    f"of class {label}",
                    label=label,
                    keypoint_labels=("a", "b", "c"),
                    keypoint_ids=(3, 1, 0),
                    num_candidates_per_keypoint=20,
                    box_scale=99.0,
                    candidate_ranking_mode=mode,
                )
                for label, mode in ((1, "min_distance"), (3, "gaussian_weighted"))
            ),
        ),
        FixedShapeResizer(128, 160),
        ["--raw-images", "480x640", "--batch"],
    ),
    "SSD on SqueezeNet": (SqueezeSsd(3, max_detections=30), FixedShapeResizer(96, 128), ["--raw-images"]),
    "SSD": (Ssd300(3, max_detections=30), FixedShapeResizer(300, 300, "antialiased"), ["--raw-images", "--batch"]),
    "SSDlite": (Ssdlite(3, max_detections=30), PADDED, ["--raw-images", "--batch"]),
    "RT-DETR": (
        RtDetr(3, num_queries=40, max_detections=30),
        FixedShapeResizer(96, 128),
        ["--raw-images", "480x640", "--batch"],
    ),
    "FCOS": (Fcos(3, score_threshold=0.02, max_detections=30), PADDED, ["--raw-images"]),
    "Faster R-CNN": (FasterRcnnFpn(3, **FEW), BY_SIZE, ["--raw-images", "480x640", "--batch"]),
    "Mask R-CNN": (MaskRcnnFpn(3, **FEW), BY_SIZE, ["--raw-images", "480x640", "--batch"]),
    "Keypoint R-CNN": (KeypointRcnnFpn(3, **FEW, num_keypoints=5), BY_SIZE, ["--raw-images", "480x640", "--batch"]),
    "imported SSD": (published("ssd_mobilenet_v1_pets"), FixedShapeResizer(128, 160, "bicubic"), ["--raw-images"]),
    "imported SSD, Soft-NMS": (
        published("ssd_mobilenet_v2_coco", soft_nms_sigma=0.5),
        FixedShapeResizer(128, 160, "nearest"),
        ["--raw-images", "--batch"],
    ),
    "imported EfficientDet": (efficientdet(), FixedShapeResizer(160, 192), ["--raw-images", "480x640", "--batch"]),
    "imported Faster R-CNN": (
        published("faster_rcnn_resnet50_coco", use_class_agnostic_nms=True),
        FixedShapeResizer(96, 128, "area"),
        ["--raw-images", "480x640"],
    ),
    "imported Mask R-CNN": (
        published("mask_rcnn_resnet50_atrous_coco"),
        BY_SIZE,
        ["--raw-images", "480x640", "--batch"],
    ),
}
QUICK = "SSD on SqueezeNet"


@torch.no_grad()
def livened(model: nn.Module) -> None:
    """Scale each layer of first weights for outputs of deviation 1, so that scores and boxes differ."""
    detector: Any = model.eval()

    def of_deviation_one(layer: Any, _: Any, output: Tensor) -> Tensor:
        if layer.bias is not None:
            bias = layer.bias if isinstance(layer, nn.Linear) else layer.bias.view(-1, 1, 1)
            output = output - bias
            layer.bias.zero_()
        scale = output.std().clamp(min=1e-6)
        layer.weight.div_(scale)
        return output / scale

    layers = [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.ConvTranspose2d | nn.Linear)]
    hooks = [each.register_forward_hook(of_deviation_one) for each in layers]
    inputs = detector.preprocess(torch.rand(1, 3, 288, 320, generator=torch.Generator().manual_seed(0)) * 255)
    detector.postprocess(detector(inputs))
    for hook in hooks:
        hook.remove()


def predicted(family: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[Tensor], Any]:
    """Save the run of a family, and return two images of blood cells and what `lockstep predict` says of them."""
    model, resizer, _ = FAMILIES[family]
    bccd = find("bccd")
    data = replace(bccd.data, resizer=resizer)  # type: ignore[type-var]
    saved(folder / "run", replace(bccd, model=model, data=data, warm_start=None), change=livened, average=1.001)
    files = sorted((ROOT / "data/bccd/JPEGImages").iterdir())[:2]
    assert main(["predict", str(folder / "run"), *map(str, files), "--json", "--device", "cpu"]) == 0
    images = [torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) for file in files]
    return images, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each != QUICK)) for each in FAMILIES]
)
def test_what_is_exported_finds_what_the_run_predicts(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, given = predicted(family, tmp_path, capsys)
    flags = FAMILIES[family][2]
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "model.pt2"), *flags]) == 0
    assert f"{given['weights']} weights of step 7" in capsys.readouterr().out
    assert b"/test_export_detector.py" not in (tmp_path / "model.pt2").read_bytes()
    with warnings.catch_warnings(action="ignore"):  # of torch, about parts of its own
        program = torch.export.load(tmp_path / "model.pt2").module()
    if "--batch" in flags:
        outputs = list(zip(*program(torch.stack(images)), strict=True))
    else:
        outputs = [program(each) for each in images]
    for found, image, wanted in zip(outputs, images, given["predictions"], strict=True):
        assert not any(each.requires_grad for each in found)
        check_objects(found, wanted["objects"], (image.shape[1], image.shape[2]))


needs_onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None or find_spec("onnxscript") is None, reason="needs ONNX Runtime"
)


@needs_onnx
@pytest.mark.slow
def test_onnx_runtime_finds_what_an_rt_detr_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resizing and the sampling of a grid have the same meaning there."""
    import onnxruntime

    images, given = predicted("RT-DETR", tmp_path, capsys)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "model.onnx"), *FAMILIES["RT-DETR"][2]]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    outputs = session.run(None, {"images": torch.stack(images).numpy()})
    for place, (image, wanted) in enumerate(zip(images, given["predictions"], strict=True)):
        found = [torch.tensor(each[place]) for each in outputs]
        check_objects(found, wanted["objects"], (image.shape[1], image.shape[2]))


def check_objects(found: Any, wanted: Any, size: tuple[int, int]) -> None:
    """Compare the outputs of a program with objects of predictions.json, of which there are several."""
    boxes, scores, labels, number, *more = found
    number = int(number)
    assert number == len(wanted) > 3
    corners = torch.cat([boxes[:, [1, 0]], boxes[:, [3, 2]] - boxes[:, [1, 0]]], 1)[:number]
    given = torch.tensor([[*each["bbox"], each["score"]] for each in wanted])
    assert len(given[:, 4].unique()) > 3
    # Scores that are almost equal may come in another order.
    other_labels = labels[:number, None] != torch.tensor([each["label"] for each in wanted])
    here = torch.cat([corners, scores[:number, None]], 1)
    apart = ((here[:, None] - given) * torch.tensor([1, 1, 1, 1, 1000])).abs().amax(2)
    away, order = apart.masked_fill(other_labels, torch.inf).min(0)
    assert len(order.unique()) == number
    assert away.max() < 0.02, away
    assert not any(rows[number:].any() for rows in (boxes, scores, labels))
    if more and "keypoints" in wanted[0]:
        places = torch.tensor([each["keypoints"] for each in wanted]).view(number, -1, 3)
        assert places.shape[1] > 1
        assert len(places[..., :2].unique()) > 20
        assert (more[0][order][..., [1, 0, 2]] - places).abs().max() < 0.05
        assert not more[0][number:].any()
    elif more:
        drawn = paste_masks(more[0][order], boxes[order].double(), size)
        own = [pixels_in(each["segmentation"]["counts"], *size) for each in wanted]
        ours = [pixels_in(runs_text(flips, size[0] * size[1]), *size) for flips in drawn.flips()]
        differing = sum(int((one != other).sum()) for one, other in zip(ours, own, strict=True))
        assert differing <= 1e-3 * sum(int(each.sum()) for each in own)


@needs_onnx
def test_onnx_runtime_finds_what_the_run_finds(tmp_path: Path) -> None:
    import onnxruntime

    saved(tmp_path / "run", tiny_recipe(Path("gone")))
    trained = trained_model(str(tmp_path / "run"))
    session = onnxruntime.InferenceSession(exported(trained, ".onnx"))
    assert [each.name for each in session.get_outputs()] == ["boxes", "scores", "labels", "num_detections"]
    outputs = session.run(None, {IMAGE: image(3).numpy()})
    check([torch.from_numpy(each) if each.ndim else each for each in outputs], found_by_run(trained, image(3)), 10)


def test_tensors_are_exported_as_of_any_model(tmp_path: Path) -> None:
    saved(tmp_path / "run", tiny_recipe(Path("gone")))
    assert exported(trained_model(str(tmp_path / "run")), ".safetensors")


def test_what_cannot_be_traced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "run", tiny_recipe(Path("gone")))
    trained = trained_model(str(tmp_path / "run"))

    def of_first(predictions: Any) -> Any:
        scores = predictions["logits"][0, :, 0]
        found = scores.new_zeros(int((scores > 0).sum()), 4)
        found = found if len(found) > 3 else found[:0]
        return [Detections(found, found[:, 0], found[:, 0])]

    monkeypatch.setattr(trained.model, "postprocess", of_first)
    with pytest.raises(ls.InputError, match=r"(?s)its shapes depend on the image.*safetensors"):
        exported(trained, ".pt2")


@pytest.mark.parametrize("size", [(240, 241), (837, 496), (1, 4000), (480, 640)])
def test_a_graph_rounds_sizes_as_the_resizer_does(size: tuple[int, int]) -> None:
    resizer = KeepAspectRatioResizer(600, 1024)
    assert _size_in_graph(resizer, *size) == resizer.size_of(*size)


def test_images_of_any_size_are_not_resized_by_their_area(tmp_path: Path) -> None:
    given = tiny_recipe(Path("gone"))
    data = replace(given.data, resizer=FixedShapeResizer(16, 24, "area"))  # type: ignore[type-var]
    saved(tmp_path / "run", replace(given, data=data))
    with pytest.raises(ls.InputError, match=r"(?s)all methods but area.*--raw-images 480x640"):
        encode_model(trained_model(str(tmp_path / "run")), ".pt2", ImagesOfGraph(raw=True))


def drawn(seed: int, num_boxes: int = 60, classes: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(num_boxes, 1 if seed % 2 else classes, 2, generator=draw) * 60 - 10
    sides = torch.rand(num_boxes, corners.shape[1], 2, generator=draw) * 30
    return torch.cat([corners, corners + sides], 2), torch.rand(num_boxes, classes, generator=draw)


class Fixed(nn.Module):
    """Suppression as graphs have it: a block of all images."""

    def __init__(self, config: PostProcessing | NmsLimits) -> None:
        super().__init__()
        self.config = config

    def forward(self, boxes: Tensor, scores: Tensor) -> Any:
        if isinstance(self.config, NmsLimits):
            found = detections_of_all(boxes, scores, self.config)
        else:
            found = postprocess(self.config, boxes, scores, (40, 40), has_background=False)
        return [each[:3] for each in found]


@pytest.mark.parametrize(
    "config",
    [
        NmsLimits(0.3, 0.4, max_detections=52, candidates_per_class=20),
        PostProcessing(BatchNonMaxSuppression(0.3, 0.4, 7, 15)),
        PostProcessing(BatchNonMaxSuppression(0.3, 0.4, 9, 20, soft_nms_sigma=0.3)),
        PostProcessing(BatchNonMaxSuppression(0.3, 0.4, 9, 20, use_class_agnostic_nms=True)),
    ],
    ids=["torchvision's", "the API's", "Soft-NMS", "of all classes"],
)
def test_fixed_steps_choose_as_the_loop_does(config: Any) -> None:
    images = [drawn(0), drawn(2)]
    boxes, scores = (torch.stack(each) for each in zip(*images, strict=True))
    with warnings.catch_warnings(action="ignore"):
        (block,) = torch.export.export(Fixed(config), (boxes, scores)).module()(boxes, scores)
    for image, theirs in enumerate(Fixed(config)(boxes, scores)):
        number = len(theirs[1])
        assert int((block[2][image] > 0).sum()) == number > 0
        assert all(torch.equal(ours[image][:number], each) for ours, each in zip(block, theirs, strict=True))
        assert not any(ours[image][number:].any() for ours in block)
