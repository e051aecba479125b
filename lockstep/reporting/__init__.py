"""What a run tells while it goes: the screen, `metrics.jsonl`, TensorBoard, and the log."""

from lockstep.reporting.console import Console
from lockstep.reporting.jsonl import MetricsFile
from lockstep.reporting.log import configure
from lockstep.reporting.summaries import Summaries

__all__ = ["Console", "MetricsFile", "Summaries", "configure"]
