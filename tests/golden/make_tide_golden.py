"""Record what TIDE itself says of mistakes. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tide
    /tmp/tide/bin/pip install tidecv==1.0.1
    /tmp/tide/bin/python tests/golden/make_tide_golden.py

It writes `tide_golden.json` beside itself, by boxes and by masks: of each kind how many there are, and what it costs of
the mean average precision.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from pycocotools.mask import encode
from tide_inputs import OF_DETECTION, OF_OBJECT, images, mask
from tidecv import TIDE, Data

NAMES = {"Cls": "class", "Loc": "location", "Both": "both", "Dupe": "duplicate", "Bkg": "background", "Miss": "missed"}


def main() -> None:
    recorded = {}
    truth, found = Data("truth"), Data("found")
    for number, (detections, objects) in enumerate(images()):
        for data in (truth, found):
            data.add_image(number, str(number))
        for box, label, _ in objects:
            truth.add_ground_truth(number, label, box, encode(np.asfortranarray(mask(box, OF_OBJECT))))
        for box, label, score in detections:
            found.add_detection(number, label, score, box, encode(np.asfortranarray(mask(box, OF_DETECTION))))
    for measured, mode in (("boxes", TIDE.BOX), ("masks", TIDE.MASK)):
        run = TIDE(pos_threshold=0.5, background_threshold=0.1).evaluate(truth, found, mode=mode)
        counts, costs = run.count_errors(), run.fix_main_errors()
        recorded[measured] = {NAMES[kind.short_name]: [counts[kind], costs[kind] / 100] for kind in counts}
    (Path(__file__).parent / "tide_golden.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
