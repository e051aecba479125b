"""The contenders of detection_metrics.py, each in a process of its own, from arrays of detections to COCO's 12 numbers.

    python benchmarks/detection_metrics_peers.py NAME DATA.npz

Prints a line of JSON: seconds of the processor and of the clock, the peak of the process's memory before the detections
were scored and after, in MB, the 12 numbers, and what it is made of. Nothing but the contender's own libraries is
imported, so that each may live in another environment.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

MICRO_BATCH = 32
Data = dict[str, np.ndarray]
"""Columns of the detections, those of an image together, and of the objects, whose names begin with truth_."""


def main() -> None:
    name, path = sys.argv[1:]
    with np.load(path) as file:
        data = dict(file)
    made_of, score = CONTENDERS[name](data)
    before = peak_megabytes()
    began, began_cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        values = score()
    line = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
        "megabytes_before": before,
        "megabytes": peak_megabytes(),
        "made_of": made_of,
        "values": [float(value) for value in values],
    }
    print(json.dumps(line))


def peak_megabytes() -> float:
    """Return the most that this process has held; getrusage would count the process that started it, too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def ours(data: Data) -> tuple[str, Callable[[], list[float]]]:
    import torch

    import lockstep as ls
    from lockstep.ragged import Ragged

    torch.set_num_threads(1)
    num_images = len(data["image_ids"])
    metric = ls.metrics.CocoMetric({label: str(label) for label in data["categories"].tolist()})
    columns: dict[str, Any] = {"source_id": [str(number) for number in data["image_ids"].tolist()]}
    for name in metric.fields[1:]:
        image = data["truth_image" if name.startswith("truth_") else "image"]
        lengths = torch.from_numpy(np.bincount(image, minlength=num_images))
        columns[name] = Ragged(torch.from_numpy(data[name]), lengths)

    def score() -> list[float]:
        for start in range(0, num_images, MICRO_BATCH):
            batch = [columns[name][start : start + MICRO_BATCH] for name in metric.fields]
            metric.update(*metric.prepare(*batch))
        return list(metric.compute().values())

    return f"lockstep {ls.__version__}", score


def pycocotools(data: Data) -> tuple[str, Callable[[], list[float]]]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return as_pycocotools(data, "pycocotools", COCO, COCOeval)


def faster_coco_eval(data: Data) -> tuple[str, Callable[[], list[float]]]:
    from faster_coco_eval import COCO, COCOeval_faster

    return as_pycocotools(data, "faster-coco-eval", COCO, COCOeval_faster)


def hotcoco(data: Data) -> tuple[str, Callable[[], list[float]]]:
    from hotcoco import COCO, COCOeval

    return as_pycocotools(data, "hotcoco", COCO, COCOeval)


def as_pycocotools(
    data: Data, package: str, load: Callable[..., Any], evaluation: Callable[..., Any]
) -> tuple[str, Callable[[], list[float]]]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = load(annotations(data)) if package != "pycocotools" else indexed(load(), annotations(data))
    columns = (data["image_ids"][data["image"]], *data["boxes"].T, data["scores"], data["labels"])
    rows = np.stack([column.astype(np.float64) for column in columns], axis=1)

    def score() -> list[float]:
        evaluated = evaluation(truth, truth.loadRes(rows), "bbox")
        evaluated.evaluate()
        evaluated.accumulate()
        evaluated.summarize()
        return list(evaluated.stats[:12])

    return f"{package} {version(package)}", score


def indexed(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def annotations(data: Data) -> dict[str, Any]:
    columns = (data[f"truth_{name}"].tolist() for name in ("image", "labels", "boxes", "area", "is_crowd"))
    ids = data["image_ids"].tolist()
    return {
        "images": [{"id": number, "width": 640, "height": 480, "file_name": f"{number}.jpg"} for number in ids],
        "categories": [{"id": number, "name": str(number)} for number in data["categories"].tolist()],
        "annotations": [
            {
                "id": place, "image_id": ids[image], "category_id": label,
                "bbox": box, "area": area, "iscrowd": int(is_crowd), "segmentation": [],
            }
            for place, (image, label, box, area, is_crowd) in enumerate(zip(*columns, strict=True), start=1)
        ],
    }  # fmt: skip


CONTENDERS: dict[str, Callable[[Data], tuple[str, Callable[[], list[float]]]]] = {
    "ours": ours,
    "pycocotools": pycocotools,
    "faster-coco-eval": faster_coco_eval,
    "hotcoco": hotcoco,
}


if __name__ == "__main__":
    main()
