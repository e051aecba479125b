"""Metrics: scores of single examples, shape (batch,), and of all examples together; for `lockstep.evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.metrics.classification import ConfusionMatrix as ConfusionMatrix
    from lockstep.metrics.classification import in_top_k as in_top_k
    from lockstep.metrics.coco import CocoMetric as CocoMetric
    from lockstep.metrics.detection_report import DetectionReport as DetectionReport
    from lockstep.metrics.detection_sets import detection_metrics as detection_metrics
    from lockstep.metrics.pascal import PascalMetric as PascalMetric
    from lockstep.metrics.worst_mistakes import WorstMistakes as WorstMistakes
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
