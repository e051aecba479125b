"""Our nets where the others have torchvision's: the parameters have the same names and first values."""

from __future__ import annotations

from turns import WORKLOADS

from lockstep.detection.values import Ssd300, Ssdlite
from lockstep.models import InceptionV3

NUM_CLASSES = WORKLOADS["ssd300"].num_classes
OWN_NETS = {
    "inception": lambda: InceptionV3(
        num_classes=1000,
        auxiliary=False,
        dropout=0.0,
        batch_norm_decay=0.9,
        batch_norm_scale=True,
        average_over_padding=True,
    ).build(seed=0),
    "ssdlite": lambda: Ssdlite(NUM_CLASSES).build(0),
    "ssd300": lambda: Ssd300(NUM_CLASSES).build(0),
}
