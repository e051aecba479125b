"""CenterNets of the Object Detection API: what is drawn, what is a peak, what learns; numbers are in tests/golden."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from device_calls import accelerator, counted
from torch import Generator

from lockstep.detection.boxes import iou
from lockstep.detection.detector import Targets
from lockstep.detection.tf_center_net import TfCenterNet
from lockstep.detection.tf_center_net_configs import CenterNetFeatureExtractor, PredictionHeadParams
from lockstep.detection.tf_center_net_heat_maps import heat_maps, is_peak, spread_of
from lockstep.errors import InputError
from lockstep.recipes.pipeline_config import import_pipeline

CONFIG = """model {{ center_net {{ num_classes: 3 feature_extractor {{ type: "{extractor}" {of_extractor} }}
  image_resizer {{ fixed_shape_resizer {{ height: 64 width: 64 }} }}
  object_detection_task {{ localization_loss {{ {loss} {{ }} }} }}
  object_center_params {{ classification_loss {{ penalty_reduced_logistic_focal_loss {{ alpha: 2 beta: 4 }} }} }}
  {more} }} }}
train_config {{ optimizer {{ adam_optimizer {{ learning_rate {{ constant_learning_rate {{ }} }} }} }} }}"""


def imported(extractor: str = "mobilenet_v2_fpn", loss: str = "l1_localization_loss", **more: str) -> Any:
    given = {"of_extractor": "", "more": "", **more}
    return import_pipeline(CONFIG.format(extractor=extractor, loss=loss, **given), "pipeline.config", "a")


def test_heat_maps_are_the_highest_gaussian_of_each_class() -> None:
    cells = torch.tensor([[1, 2], [3, 2], [1, 0], [4, 3]])
    spreads, shape, image_of = torch.tensor([0.5, 1.5, 0.8, 1.0]), (2, 5, 4), torch.tensor([0, 0, 0, 1])
    classes = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 0.0], [0.0, 1.0]])  # the third one's weight is 0
    drawn = heat_maps(cells, spreads, classes, image_of, shape).reshape(*shape, 2)
    for image, row, column, label in itertools.product(*map(range, (*shape, 2))):
        heights = [
            float(classes[n, label])
            * math.exp(-((row - cells[n, 0]) ** 2 + (column - cells[n, 1]) ** 2) / (2 * float(spreads[n]) ** 2))
            for n in range(4)
            if image_of[n] == image
        ]
        assert float(drawn[image, row, column, label]) == pytest.approx(max(heights), abs=1e-6)
    assert not heat_maps(cells[:0], spreads[:0], classes[:0], image_of[:0], shape).any()


def test_the_spread_is_that_of_corners_that_may_move() -> None:
    # Of a square of 10 cells the roots are 19.1, 36.7 and (-28 + sqrt(28 ** 2 + 4 * 2.8 * 30)) / 2 = 2.7 cells.
    assert spread_of(torch.tensor([[10.0, 10.0], [0.1, 0.1]]), 0.7).tolist() == pytest.approx([5 / 6, 1 / 6])


def test_of_neighbours_the_largest_score_is_a_peak() -> None:
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.3], [0.4, 0.5, 0.1, 0.1]])[None, :, :, None]
    assert is_peak(scores, 3)[0, :, :, 0].tolist() == [[False, True, False, True], [False, True, False, False]]
    assert is_peak(scores, 1).all()


def test_a_center_net_learns_its_objects_and_detects_them() -> None:
    model: TfCenterNet = imported().recipe.model.build(0)
    boxes = [torch.tensor([[8.0, 8.0, 40.0, 24.0], [30.0, 30.0, 60.0, 62.0]]), torch.zeros(0, 4)]
    classes = [torch.eye(3)[[0, 2]], torch.zeros(0, 3)]
    given = Targets(
        boxes=boxes,
        labels=[torch.tensor([1, 3]), torch.zeros(0, dtype=torch.int64)],
        classes=classes,
        weights=[torch.ones(2), torch.zeros(0)],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in boxes],
        shape=(64, 64),
    )
    inputs = model.preprocess(torch.rand(2, 3, 64, 64, generator=Generator().manual_seed(0)) * 255)
    with accelerator(), counted() as calls:
        assigned = model.assign(given)
        model.losses(model(inputs, assigned), assigned)
    assert len(calls.waits) == 1, "how many places of the heat maps are drawn"
    counts = model.counts(assigned)
    assert {name: int(count) for name, count in counts.items()} == {"classification": 2, "scale": 2, "offset": 2}
    optimizer, sums = torch.optim.Adam(model.parameters(), lr=0.003), list[float]()
    for _ in range(60):
        losses = model.losses(model(inputs, assigned), assigned)
        total = torch.stack([losses[name] / counts[name] for name in counts]).sum()
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sums.append(total.item())
    assert sums[-1] < 0.1 * sums[0]
    with torch.no_grad():
        found = model.postprocess(model(inputs))
    assert {*found[0].labels[:2].tolist()} == {1, 3}
    for box, label in zip(boxes[0], (1, 3), strict=True):
        best = found[0].boxes[:2][found[0].labels[:2] == label]
        assert float(iou(best, box[None])) > 0.6
    assert float(found[1].scores.max()) < float(found[0].scores[1])


@pytest.mark.parametrize("task", ["mask_estimation_task", "deepmac_mask_estimation", "track_estimation_task"])
def test_what_a_center_net_has_beside_boxes_is_refused_by_name(task: str) -> None:
    got = imported(more=f"{task} {{ }}")
    assert got.recipe.model.untrained_parts == (task,)
    assert isinstance(got.refusal, InputError)
    assert "boxes and keypoints" in got.refusal.what


def test_other_extractors_and_losses_are_refused() -> None:
    refusal = imported("resnet_v1_18_fpn").refusal
    assert isinstance(refusal, InputError)
    assert "resnet_v1_50_fpn" in refusal.expected
    with pytest.raises(InputError, match="localization_loss"):
        imported(loss="weighted_iou")
    with pytest.raises(InputError, match="odd kernel"):
        PredictionHeadParams((16, 16), (3,))
    with pytest.raises(InputError, match="three channels"):
        CenterNetFeatureExtractor("resnet_v2_50", channel_means=(1.0,))
