"""Detectors beside torchvision's: a training step, its memory, making detections, and what metrics take of the time.

    python benchmarks/detection.py [--rounds 5] [--quick] [--only PART...] [--threads 2]

It needs an environment with torchvision. Both sides run in one process with the same torch, from the same weights on
the same 4 images, and take turns; without settings of the allocator, as a plain `python train.py` has none. Ours is the
step that a run makes, torchvision's that of its reference loop for detection (references/detection/engine.py). Parts
are "ssdlite", "ssd300", "faster_rcnn", whose images are smaller than COCO's here, "workers", SSDlite's step by two
workers of one thread and by one of two, "postprocessing" of 3,000 anchors and 80 classes, and "metrics". The peak of
the memory is of a process with one contender alone. The result is printed and appended to
benchmarks/results/detection.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from detection_steps import DETECTORS, contenders, images_and_boxes, our_detector, our_step
from detection_steps import NUM_CLASSES as CLASSES
from measuring import Line, compared, interleave, record, report, run_part, show, take_turns
from torch import Tensor

import lockstep as ls
from lockstep.detection.nms import NmsLimits
from lockstep.detection.ssd import per_class_detections
from lockstep.metrics import CocoMetric
from lockstep.ragged import Ragged
from lockstep.recipes.data import DetectionData
from lockstep.recipes.tasks import Detection
from lockstep.workers.environment import SETTINGS

NUM_ANCHORS, NUM_CLASSES, SHAPE = 3000, 80, (320, 320)
EVALUATED = 64  # images
STEPS_OF_MEMORY = 3
STEPS_OF_WORKERS = 8
STEPS_PER_ROUND = {"ssdlite": 4}
AIMS = {"ssdlite": 1.6, "ssd300": 1.25, "faster_rcnn": 0.95, "postprocessing": 2.0}
"""Of the time that torchvision takes over ours."""
PARTS = (*AIMS, "workers", "metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", nargs=2, metavar=("DETECTOR", "CONTENDER"), help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=["workers"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        time_step(arguments.rounds)
        return
    torch.set_num_threads(arguments.threads)
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # a RuntimeError where it was made for another torch
        sys.exit(f"torchvision cannot be imported here: {error}\nRun this where `pip install torch torchvision` was.")
    if arguments.memory_of:
        print(json.dumps(peak_of_memory(*arguments.memory_of)))
        return
    rounds = 1 if arguments.quick else arguments.rounds
    others: dict[str, Callable[[], list[Line]]] = {
        "workers": partial(workers, rounds),
        "postprocessing": partial(postprocessing, rounds),
        "metrics": metrics,
    }
    lines: list[Line] = []
    for part in arguments.only:
        lines += others[part]() if part in others else training(part, rounds, arguments.threads)
    if not arguments.quick:
        record(__file__, [{"torchvision": torchvision.__version__, **line} for line in lines], allocator={})


# A training step ----------------------------------------------------------------------------------------------------


def training(name: str, rounds: int, threads: int) -> list[Line]:
    steps = contenders(name)
    first = {contender: step() for contender, step in steps.items()}
    times = interleave(steps, rounds, per_round=STEPS_PER_ROUND.get(name, 1))
    last = {contender: step() for contender, step in steps.items()}
    lines: list[Line] = []
    for ours in ("ours", "ours, bf16"):
        line: Line = {"comparison": f"{name}: {ours}", **against(times[ours], times["theirs"])}
        losses = {"first_loss": first[ours], "last_loss": last[ours]}
        lines.append({**line, **losses, "their_first_loss": first["theirs"], "their_last_loss": last["theirs"]})
        show(lines[-1])
        print(f"    faster {1 / line['ratio']:.2f} times (aim in fp32: {AIMS[name]}); losses {losses}")
    memory = {contender: measured_apart(name, contender, threads) for contender in ("ours", "theirs")}
    ratio = memory["ours"] / memory["theirs"]
    print(f"    peak of the memory {memory['ours']:.0f} / {memory['theirs']:.0f} MiB = {ratio:.2f} (aim: 1.0 at most)")
    lines.append({"comparison": f"{name}: peak of the memory", "memory_mib": memory, "ratio": ratio})
    return lines


def against(ours: list[float], theirs: list[float]) -> Line:
    return compared({"ours": ours, "theirs": theirs})


def measured_apart(name: str, contender: str, threads: int) -> float:
    """MiB that a fresh process takes for some steps, beyond what it has before it makes the model."""
    command = [sys.executable, __file__, "--memory-of", name, contender, "--threads", str(threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def peak_of_memory(name: str, contender: str) -> float:
    before = memory_mib("VmRSS")
    step = contenders(name, only=contender)[contender]
    for _ in range(STEPS_OF_MEMORY):
        step()
    return memory_mib("VmHWM") - before


def memory_mib(field: str) -> float:
    """What /proc says of this process; getrusage would count the process that started it, too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def workers(rounds: int) -> list[Line]:
    """A step of SSDlite by two workers of one thread, beside one of two: processes as `lockstep run` starts them."""

    def milliseconds(name: str) -> float:
        number = 2 if name == "ours" else 1
        (line,) = run_part(
            __file__, "workers", STEPS_OF_WORKERS, threads=2 // number, num_workers=number, settings=SETTINGS
        )
        return float(line["step_ms"])

    times = take_turns(("ours", "theirs"), rounds, milliseconds, warm_up=0)
    line: Line = {"comparison": "ssdlite: two workers of one thread / one of two", **compared(times)}
    show(line)
    print("    (aim: 1.0 at most)")
    return [line]


def time_step(rounds: int) -> None:
    """Report this worker's median step."""
    worker = ls.join()
    step = our_step("ssdlite", "fp32", num_workers=worker.num_workers, rank=worker.rank)
    times = interleave({"step": step}, rounds)["step"]
    if worker.is_chief:
        report("workers", {"step_ms": statistics.median(times)})


# Detections ---------------------------------------------------------------------------------------------------------


def postprocessing(rounds: int) -> list[Line]:
    """Of one image's boxes and logits, with the settings of torchvision's SSD300."""
    from torchvision.models.detection.ssd import SSD

    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(1, NUM_ANCHORS, 2, generator=generator) * 280
    boxes = torch.cat([corners, corners + 8 + 90 * torch.rand(1, NUM_ANCHORS, 2, generator=generator)], 2)
    logits = 1.5 * torch.randn(1, NUM_ANCHORS, NUM_CLASSES + 1, generator=generator)
    settings = {"score_thresh": 0.01, "nms_thresh": 0.45, "topk_candidates": 400, "detections_per_img": 200}

    class Decoded:
        """Torchvision's postprocessing decodes, ours is given boxes."""

        @staticmethod
        def decode_single(codes: Tensor, anchors: Tensor) -> Tensor:
            return codes

    theirs: Any = type("Settings", (), {**settings, "box_coder": Decoded})
    outputs = {"bbox_regression": boxes[..., [1, 0, 3, 2]], "cls_logits": logits}
    their_run = partial(SSD.postprocess_detections, theirs, outputs, [boxes[0]], [SHAPE])
    our_run = partial(per_class_detections, boxes, logits, SHAPE, limits=NmsLimits(0.01, 0.45, 200, 400))
    ours, (expected,) = our_run()[0], their_run()
    assert torch.equal(ours.labels, expected["labels"])
    torch.testing.assert_close(ours.scores, expected["scores"])
    torch.testing.assert_close(ours.boxes[:, [1, 0, 3, 2]], expected["boxes"])
    times = interleave({"ours": our_run, "theirs": their_run}, rounds, per_round=5)
    line = {"comparison": f"postprocessing: {NUM_ANCHORS} x {NUM_CLASSES}", **compared(times)}
    show(line)
    print(f"    faster {1 / line['ratio']:.2f} times (aim: {AIMS['postprocessing']}), the same detections")
    return [line]


def metrics() -> list[Line]:
    """The share of an evaluation that COCO's metrics take, of SSDlite with random weights, which finds 300 an image."""
    shape = DETECTORS["ssdlite"].shape
    model, task = our_detector("ssdlite").eval(), Detection(DetectionData(), CLASSES)
    images, boxes, labels = images_and_boxes(shape)
    corners = boxes * torch.tensor([*shape, *shape])
    truth = torch.cat([corners[..., [1, 0]], (corners[..., 2:] - corners[..., :2])[..., [1, 0]]], 2)
    metric = CocoMetric({label: str(label) for label in range(1, CLASSES + 1)})
    fields = {
        "image": images,
        "truth_boxes": Ragged.of(list(truth)),
        "truth_labels": Ragged.of(list(labels)),
        "truth_is_crowd": Ragged.of(list(torch.zeros_like(labels, dtype=torch.bool))),
        "truth_area": Ragged.of(list(truth[..., 2:].prod(2))),
        "original_size": torch.tensor([shape] * len(images)),
    }
    began, in_metrics = time.process_time(), 0.0
    for number in range(EVALUATED // len(images)):
        with torch.inference_mode():
            found = task.on_stored_images(task.detect(model, fields), fields)
        started = time.process_time()
        ids = [f"{number}, {place}" for place in range(len(images))]
        metric.update(*metric.prepare(*metric.columns({**fields, "source_id": ids}, found)))
        in_metrics += time.process_time() - started
    started = time.process_time()
    metric.compute()
    in_metrics += time.process_time() - started
    share = in_metrics / (time.process_time() - began)
    print(f"metrics take {share:.1%} of an evaluation of {EVALUATED} images (aim: 10 % at most)")
    return [{"comparison": "metrics: share of an evaluation", "images": EVALUATED, "share": share}]


if __name__ == "__main__":
    main()
