"""The configurations of detectors: plain values, checked, with the defaults of the reference's protos."""

from __future__ import annotations

import pytest

from lockstep.detection.blocks import (
    ArgmaxMatcher,
    FasterRcnnBoxCoder,
    GridAnchorGenerator,
    HardExampleMiner,
    PostProcessing,
    SsdAnchorGenerator,
    WeightedSoftmax,
)
from lockstep.detection.tf_configs import BatchNorm, FasterRcnn, FasterRcnnFeatureExtractor, Hyperparams
from lockstep.errors import InputError

DETECTOR = FasterRcnn(2, FasterRcnnFeatureExtractor("faster_rcnn_resnet50"), GridAnchorGenerator())


def test_defaults_are_those_of_the_protos() -> None:
    assert ArgmaxMatcher() == ArgmaxMatcher(0.5, 0.5, False, True, False)
    assert FasterRcnnBoxCoder() == FasterRcnnBoxCoder(10.0, 10.0, 5.0, 5.0)
    assert SsdAnchorGenerator() == SsdAnchorGenerator(6, 0.2, 0.95)
    assert BatchNorm() == BatchNorm(0.999, center=True, scale=False, epsilon=0.001, train=True)
    assert HardExampleMiner() == HardExampleMiner(64, 0.7, "both", 0, 0)
    assert (Hyperparams().op, Hyperparams().activation, Hyperparams().regularizer) == ("conv", "relu", None)
    assert (DETECTOR.first_stage_max_proposals, DETECTOR.second_stage_batch_size) == (300, 64)
    assert DETECTOR.second_stage_classification_loss == WeightedSoftmax()
    assert DETECTOR.second_stage_post_processing == PostProcessing()


@pytest.mark.parametrize("arguments", [{"iou_threshold": 1.5}, {"num_hard_examples": -1}, {"loss_type": "all"}])
def test_values_out_of_range_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(arguments))):
        HardExampleMiner(**arguments)  # type: ignore[arg-type]
