"""Load the checkpoints that `make_zoo_checkpoints_golden.py` leaves in a folder, and compare what detectors predict.

    python tests/golden/check_zoo_checkpoints.py FOLDER [NAME ...]

It is run by hand: the files have some 800 MB. For each detector it prints the greatest difference from the API's own
predictions, beside the greatest value.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo_checkpoints_inputs as inputs

import lockstep as ls
from lockstep.recipes.pipeline_config import import_pipeline

TRAIN = "train_config { optimizer { momentum_optimizer { learning_rate { constant_learning_rate { } } } } }"


@torch.no_grad()
def main() -> None:
    folder, recorded = Path(sys.argv[1]), inputs.read()
    for name in sys.argv[2:] or inputs.CONFIGS:
        model: Any = import_pipeline(f"model {{ {inputs.CONFIGS[name]} }} {TRAIN}", name, "a").recipe.model.build(0)
        path = folder / name.replace(" ", "_") / "ckpt-0"
        report = ls.warm_start(ls.TrainState(model, ls.optim.SGD(lr=0.1)), path, takes="detector")
        images = torch.from_numpy(inputs.images(name)).permute(0, 3, 1, 2)
        predicted = model.eval()(model.preprocess(images))
        print(f"{name}: {100 * report.share:g} % loaded")
        for key in recorded[name].keys() - {"variables"}:
            ours = predicted[key][-1] if isinstance(predicted[key], list) else predicted[key]
            expected = np.array(recorded[name][key])
            difference = np.abs(inputs.sample(ours.float().numpy()) - expected).max()
            print(f"  {key}: {difference:.2g} of {np.abs(expected).max():.3g}", flush=True)


if __name__ == "__main__":
    main()
