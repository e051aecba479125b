"""Detectors: what one is, and the values by which a recipe names those that are here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.detection.detector import DetectionModel as DetectionModel
    from lockstep.detection.detector import Detections as Detections
    from lockstep.detection.detector import Targets as Targets
    from lockstep.detection.values import FasterRcnnFpn as FasterRcnnFpn
    from lockstep.detection.values import Fcos as Fcos
    from lockstep.detection.values import MaskRcnnFpn as MaskRcnnFpn
    from lockstep.detection.values import RtDetr as RtDetr
    from lockstep.detection.values import SqueezeSsd as SqueezeSsd
    from lockstep.detection.values import Ssd300 as Ssd300
    from lockstep.detection.values import Ssdlite as Ssdlite
    from lockstep.detection.values import TorchvisionDetector as TorchvisionDetector
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
