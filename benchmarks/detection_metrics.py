"""COCO's metrics against pycocotools, faster-coco-eval and hotcoco: from arrays of detections to the 12 numbers.

    python benchmarks/detection_metrics.py [--rounds 3] [--images 5000] [--only NAME...] [--python-of NAME=PYTHON...]

As many images, objects and detections as COCO's validation set has with a usual detector: 5,000, 35,000 and 177,000.
Each contender runs in a fresh process (detection_metrics_peers.py), in the Python that --python-of names for it, else
in this one; they take turns. All are told one thread. What the others have of the ground truth is loaded before the
time begins; ours takes it in micro-batches together with the detections, as it comes in an evaluation. The result is
printed and appended to benchmarks/results/detection_metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from detection_metrics_peers import CONTENDERS, Data
from measuring import Line, record

SCRIPT = Path(__file__).with_name("detection_metrics_peers.py")
OBJECTS, DETECTIONS = 7, 35.4  # on an image, on average
NUM_CATEGORIES = 80
MOST_OF_THE_TIME, MOST_OF_THE_MEMORY = 1 / 6, 1 / 2  # of pycocotools': the aims
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--python-of", nargs="+", default=[], metavar="NAME=PYTHON")
    options = parser.parse_args()
    python_of = dict(each.split("=", 1) for each in options.python_of)
    data = made_up(options.images)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        np.savez(path, **data)
        rounds = [
            {name: run(name, path, python_of) for name in options.only[:: 1 if number % 2 else -1]}
            for number in range(options.rounds)
        ]
    size = {"images": options.images, "objects": len(data["truth_labels"]), "detections": len(data["labels"])}
    lines = [{**size, **line} for line in compared(rounds, options.only)]
    for line in lines:
        show(line)
    record(__file__, lines)


def made_up(num_images: int) -> Data:
    """Objects of all sizes, most of few classes; detections near them, of other classes, and of nothing."""
    rng = np.random.default_rng(0)
    truth_image = np.repeat(np.arange(num_images), rng.poisson(OBJECTS, num_images))
    shares = 1 / np.arange(1, NUM_CATEGORIES + 1)
    truth_labels = 1 + rng.choice(NUM_CATEGORIES, len(truth_image), p=shares / shares.sum())
    sides = np.exp(rng.uniform(np.log(8), np.log(400), (len(truth_image), 2)))
    truth_boxes = np.concatenate([rng.uniform(0, 1, sides.shape) * ([640, 480] - sides).clip(0), sides], 1)

    places = np.repeat(np.arange(len(truth_image)), rng.poisson(DETECTIONS / OBJECTS, len(truth_image)))
    off = rng.choice([0.02, 0.1, 0.4], (len(places), 1)) * rng.normal(0, 1, (len(places), 4))
    boxes = truth_boxes[places] + off * np.tile(truth_boxes[places][:, 2:], 2)
    boxes[:, 2:] = np.abs(boxes[:, 2:])
    labels = np.where(
        rng.random(len(places)) < 0.3, rng.integers(1, NUM_CATEGORIES + 1, len(places)), truth_labels[places]
    )
    scores = (np.exp(-np.abs(off).sum(1)) * rng.uniform(0.2, 1, len(places))).round(4)
    return {
        "image_ids": np.sort(rng.choice(600_000, num_images, replace=False)),
        "categories": np.arange(1, NUM_CATEGORIES + 1),
        "image": truth_image[places],
        "boxes": boxes,
        "scores": scores,
        "labels": labels,
        "truth_image": truth_image,
        "truth_boxes": truth_boxes,
        "truth_labels": truth_labels,
        "truth_is_crowd": rng.random(len(truth_image)) < 0.01,
        "truth_area": sides.prod(1) * rng.uniform(0.5, 1, len(sides)),
    }


def run(name: str, path: Path, python_of: Mapping[str, str]) -> Line:
    command = [python_of.get(name, sys.executable), str(SCRIPT), name, str(path)]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=True)
    line: Line = json.loads(done.stdout)
    print(f"{name:18} {line['cpu_seconds']:7.2f} s {line['megabytes']:7.0f} MB", flush=True)
    return line


def compared(rounds: Sequence[Mapping[str, Line]], names: Sequence[str]) -> list[Line]:
    """Each contender beside pycocotools: medians of the ratios of each round."""
    lines = []
    for name in names:
        own = [each[name] for each in rounds]
        line: Line = {"contender": name, "made_of": own[0]["made_of"], "rounds": len(rounds)}
        for key in ("seconds", "cpu_seconds", "megabytes_before", "megabytes"):
            line[key] = statistics.median(each[key] for each in own)
        if "pycocotools" in names:
            theirs = [each["pycocotools"] for each in rounds]
            for key in ("cpu_seconds", "megabytes"):
                ratios = sorted(one[key] / other[key] for one, other in zip(own, theirs, strict=True))
                line |= {f"{key}_ratio": statistics.median(ratios), f"{key}_low": ratios[0], f"{key}_high": ratios[-1]}
            pairs = zip(own[0]["values"], theirs[0]["values"], strict=True)
            line["largest_difference"] = max(abs(one - other) for one, other in pairs)
        if name == "ours":
            line |= {"aim_cpu_seconds_ratio": MOST_OF_THE_TIME, "aim_megabytes_ratio": MOST_OF_THE_MEMORY}
        lines.append(line)
    return lines


def show(line: Line) -> None:
    text = f"{line['made_of']:26} {line['cpu_seconds']:7.2f} s of the processor {line['megabytes']:7.0f} MB"
    if "cpu_seconds_ratio" in line:
        text += f", of pycocotools' {line['cpu_seconds_ratio']:.3f} and {line['megabytes_ratio']:.2f}"
        text += f"; numbers differ by {line['largest_difference']:.1g}"
    print(text)


if __name__ == "__main__":
    main()
