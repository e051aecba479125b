"""Faster and Mask R-CNNs of the Object Detection API: the published configs make nets that learn and detect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from regions_drawn import calm, images, published, targets

from lockstep.detection.blocks import HardExampleMiner
from lockstep.detection.boxes import clip
from lockstep.detection.tf_configs import BatchNorm, Hyperparams, MaskRcnnBoxPredictor
from lockstep.detection.tf_faster_rcnn import TfFasterRcnn
from lockstep.errors import InputError

CONFIGS = [
    "faster_rcnn_resnet101_atrous_coco",
    # As the one before, but for strides, the depth of the backbone and the number of proposals.
    pytest.param("faster_rcnn_resnet101_fgvc", marks=pytest.mark.slow),
    pytest.param("faster_rcnn_resnet101_voc07", marks=pytest.mark.slow),
    pytest.param("faster_rcnn_resnet50_coco", marks=pytest.mark.slow),
    pytest.param("mask_rcnn_resnet101_pets", marks=pytest.mark.slow),
    "mask_rcnn_resnet50_atrous_coco",
]
BOXES = [[10.0, 20, 60, 90], [30, 30, 50, 60]]
SHAPE = (96, 96)


@pytest.fixture(scope="module")
def net() -> TfFasterRcnn:
    torch.set_num_threads(1)
    built = published("mask_rcnn_resnet50_atrous_coco").build(0)
    assert isinstance(built, TfFasterRcnn)
    return calm(built)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_learn_and_detect(name: str) -> None:
    torch.set_num_threads(1)
    config = published(name)
    net = config.build(0)
    assert isinstance(net, TfFasterRcnn)
    calm(net).train()
    inputs, assigned = net.preprocess(images()), net.assign(targets(BOXES, BOXES[:1]))
    losses = net.losses(net(inputs, assigned), assigned)
    assert isinstance(config.second_stage_box_predictor, MaskRcnnBoxPredictor)
    has_masks = config.second_stage_box_predictor.predict_instance_masks
    assert {*losses} - {"regularization"} == {
        *("rpn_classification", "rpn_localization", "classification", "localization"),
        *(["mask"] if has_masks else []),
    }
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert all(torch.isfinite(each) for each in losses.values())
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in net.parameters())
    with torch.no_grad():
        found = net.eval().postprocess(net(inputs))
    for each in found:
        assert len(each.boxes) <= config.second_stage_post_processing.batch_non_max_suppression.max_total_detections
        assert torch.equal(each.boxes, clip(each.boxes, SHAPE))
        assert (each.masks is not None) == has_masks
        if each.masks is not None:
            size = config.second_stage_box_predictor.mask_height, config.second_stage_box_predictor.mask_width
            assert each.masks.shape == (len(each.boxes), *size)


@torch.no_grad()
def test_of_keras_layers_the_second_stage_has_a_stride_and_the_first_the_same_features() -> None:
    config = published("mask_rcnn_resnet50_atrous_coco")
    config = replace(
        config,
        feature_extractor=replace(
            config.feature_extractor, type="faster_rcnn_resnet50_keras", first_stage_features_stride=16
        ),
    )
    slim = replace(config, feature_extractor=replace(config.feature_extractor, type="faster_rcnn_resnet50")).build(0)
    keras = config.build(0)
    keras.load_state_dict(slim.state_dict())
    features = [each.eval().backbone(images() / 255)["0"] for each in (slim, keras)]
    torch.testing.assert_close(*features, rtol=1e-4, atol=1e-4)
    crops = torch.rand(2, 1024, 7, 7)
    assert [each.second_stage(crops).shape[2:] for each in (slim, keras)] == [(7, 7), (4, 4)]
    strided = replace(config.feature_extractor, first_stage_features_stride=8)
    with pytest.raises(InputError, match="first_stage_features_stride=8"):
        replace(config, feature_extractor=strided).build(0)


@pytest.mark.parametrize("objects", [([], []), (BOXES, [])])
def test_images_without_objects_train(net: TfFasterRcnn, objects: tuple[list[list[float]], list[list[float]]]) -> None:
    net.train().zero_grad()
    assigned = net.assign(targets(*objects))
    losses = net.losses(net(net.preprocess(images()), assigned), assigned)
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert all(torch.isfinite(each) for each in losses.values())
    assert all(each.grad is not None for each in net.parameters())


def test_masks_of_an_image_smaller_than_the_input_are_learned_where_they_are(net: TfFasterRcnn) -> None:
    padded = targets(BOXES, BOXES[:1])
    assert padded.masks is not None
    own = replace(padded, masks=[each[:, :61, :90] for each in padded.masks])
    torch.manual_seed(0)
    assigned = net.train().assign(padded)
    with torch.no_grad():
        predictions = net(net.preprocess(images()), assigned)
    rows = torch.linspace(10, -10, predictions["masks"].shape[2])[:, None]
    predictions["masks"] = rows.expand_as(predictions["masks"])
    expected, found = (net.losses(predictions, net.assign(each))["mask"] for each in (padded, own))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_anchors_out_of_the_image_are_left_out_in_training_and_clipped_else(net: TfFasterRcnn) -> None:
    matches = net.train().assign(targets(BOXES, [])).matches
    anchors = net.anchors(SHAPE, torch.device("cpu"))
    is_inside = (anchors == clip(anchors, SHAPE)).all(1)
    assert 0 < is_inside.sum() < len(anchors)
    assert (matches[:, ~is_inside] == -2).all()
    assert (matches[1, is_inside] == -1).all()
    clipped = net.eval().anchors(SHAPE, torch.device("cpu"))
    assert torch.equal(clipped, clip(anchors, SHAPE))


def test_a_miner_takes_the_hardest_of_all_proposals(net: TfFasterRcnn, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(miner: HardExampleMiner | None) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(net, "config", replace(net.config, hard_example_miner=miner))
        torch.manual_seed(0)
        assigned = net.train().assign(targets(BOXES, BOXES[:1]))
        with torch.no_grad():
            return dict(net.losses(net(net.preprocess(images()), assigned), assigned))

    every, hardest = losses(HardExampleMiner(0, 1.0)), losses(HardExampleMiner(2, 1.0))
    assert 0 < hardest["classification"] < every["classification"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"number_of_stages": 1, "second_stage_box_predictor": None}, "number_of_stages=1"),
        ({"initial_crop_size": None}, "initial_crop_size"),
        (
            {"first_stage_box_predictor_conv_hyperparams": Hyperparams(batch_norm=BatchNorm())},
            "first_stage_box_predictor_conv_hyperparams.batch_norm",
        ),
        (
            {"second_stage_box_predictor": MaskRcnnBoxPredictor(box_code_size=5)},
            "second_stage_box_predictor.box_code_size=5",
        ),
    ],
)
def test_what_is_not_there_is_refused(fields: dict[str, object], name: str) -> None:
    config = replace(published("faster_rcnn_resnet50_coco"), **fields)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Faster R-CNN is not trained") as refused:
        config.build(0)
    assert name in str(refused.value.given)
