"""Images with objects on them, from files to batches for SSD: beside torchvision's preset, and what the objects cost.

    python benchmarks/detection_input.py --data PATH... [--rounds 7] [--quick] [--python-of NAME=PYTHON...]

Each path is data with boxes as `lockstep show` takes it: a file of COCO's annotations, a folder of VOC. Decode, the
random crop of SSD, flip, photometric distortion and resizing to 300 pixels, boxes moved; the same with 20 masks an
image, of those that have some; and a loader's batches with objects and without, laid into shared memory. Each pipeline
runs in a process of its own with one thread (detection_input_peers.py), in the Python that --python-of names for it.
They take turns, and are compared by the time of the processor that neighbouring turns took. The result is printed and
appended to benchmarks/results/detection_input.jsonl. torchvision's masks need pycocotools.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from detection_input_peers import PEERS
from measuring import Line, Pipeline, ratio_of_turns, record, started, take_turns

from lockstep.readers.open import open_source

SCRIPT = Path(__file__).with_name("detection_input_peers.py")
BATCH_SIZE, NUM_MASKS = 32, 20
TIMES_AS_MANY_PACKED = 10  # batches in a turn: they are quick, and what is looked for is small
INSTALL = "for torchvision: --python-of torchvision=.../bin/python"
AIMS = [
    ("ours", "torchvision, the same steps", 1.5),
    ("ours", "torchvision, Pillow, the same steps", 1.5),
    ("ours, and zoom out", "torchvision, the preset", 1.5),
    ("ours, and zoom out", "torchvision, Pillow, the preset", 1.5),
    ("ours, masks", "torchvision, masks", 3.0),
    ("ours, packed", "ours, packed, images alone", 1 / 1.05),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=6, help=f"of {BATCH_SIZE} images, in a turn")
    parser.add_argument("--quick", action="store_true", help="one round of one batch: does it run?")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--python-of", nargs="+", default=[], metavar="NAME=PYTHON", help="of those that begin so")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = arguments.batches = 1
    pythons = dict(each.split("=", 1) for each in arguments.python_of)
    with tempfile.TemporaryDirectory(prefix="lockstep-detection-") as folder:
        print(prepare(Path(folder), arguments.data))
        contenders = started(arguments.only, pythons, partial(Contender, folder=Path(folder)), lambda name: INSTALL)
        try:
            turns = take_turns(contenders, arguments.rounds, lambda name: contenders[name].turn(arguments.batches))
        finally:
            for contender in contenders.values():
                contender.end()
    lines = [*pipelines(contenders, turns), *ratios(turns)]
    if not arguments.quick:
        record(__file__, lines)


# Data ---------------------------------------------------------------------------------------------------------------


def prepare(folder: Path, sources: Sequence[str]) -> str:
    """Write the objects of all sources as one file of COCO's annotations, and again with so many masks an image."""
    images: list[Line] = []
    boxes: list[list[Line]] = []
    masks: list[list[Line]] = []
    for source in sources:
        segmentations = segmentations_in(source)
        reader: Any = open_source(source, truth=True)
        for index in range(len(reader)):
            fields = reader.read_batch(np.array([index]))
            width, height = fields["image"][0].size
            name = str(Path(fields["image"][0].source).resolve().relative_to("/"))
            images.append({"id": len(images) + 1, "file_name": name, "width": width, "height": height})
            places = zip(fields["truth_boxes"][0].tolist(), fields["truth_labels"][0].tolist(), strict=True)
            boxes.append([{"bbox": box, "category_id": label} for box, label in places])
            masks.append(segmentations.get(fields["source_id"][0], []))
    categories = {each["category_id"] for own in (*boxes, *masks) for each in own}
    rest = {"categories": [{"id": number, "name": str(number)} for number in sorted(categories)]}
    (folder / "boxes").mkdir()
    write(folder / "boxes" / "annotations.json", images, boxes, rest)
    with_masks = [(image, list(islice(cycle(own), NUM_MASKS))) for image, own in zip(images, masks, strict=True) if own]
    (folder / "masks").mkdir()
    write(folder / "masks" / "annotations.json", *zip(*with_masks, strict=True) if with_masks else ([], []), rest)
    return f"{len(images)} images of {sum(map(len, boxes))} objects; {len(with_masks)} with {NUM_MASKS} masks each"


def segmentations_in(source: str) -> dict[str, list[Line]]:
    """The objects of COCO's annotations that have masks, by the id of their image; none of other data."""
    path = Path(source.rpartition(".json")[0] + ".json")
    objects: dict[str, list[Line]] = {}
    for each in json.loads(path.read_text())["annotations"] if path.is_file() else []:
        if isinstance(each["segmentation"], list):
            kept = {name: each[name] for name in ("bbox", "category_id", "segmentation")}
            objects.setdefault(str(each["image_id"]), []).append(kept)
    return objects


def write(path: Path, images: Sequence[Line], objects: Sequence[Sequence[Line]], rest: Line) -> None:
    annotations = [
        {"image_id": image["id"], "iscrowd": 0, **each}
        for image, own in zip(images, objects, strict=True)
        for each in own
    ]
    numbered = [{"id": number, **each} for number, each in enumerate(annotations, 1)]
    path.write_text(json.dumps({"images": list(images), "annotations": numbered, **rest}))


# Pipelines ----------------------------------------------------------------------------------------------------------


class Contender(Pipeline):
    """A pipeline with one thread, which answers by the seconds of the processor's time that it took."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        data = folder / ("masks" if "masks" in name else "boxes")
        super().__init__([python, str(SCRIPT), name, str(data), str(BATCH_SIZE)], folder / f"{name}.log")
        self._times = TIMES_AS_MANY_PACKED if "packed" in name else 1

    def turn(self, num_batches: int) -> float:
        """Read so many batches; the images for each second of the processor's time."""
        num_batches *= self._times
        return num_batches * BATCH_SIZE / float(self.read(num_batches))


# Results ------------------------------------------------------------------------------------------------------------


def pipelines(contenders: Mapping[str, Contender], turns: Mapping[str, list[float]]) -> Iterator[Line]:
    for name, values in turns.items():
        per_cpu_second, about = statistics.median(values), contenders[name].about
        print(f"{name:36} {per_cpu_second:6.0f} images / CPU-second    {about['made_of']}")
        yield {"pipeline": name, "per_cpu_second": per_cpu_second, "rounds": len(values), **about}


def ratios(turns: Mapping[str, list[float]]) -> Iterator[Line]:
    """Of neighbouring turns: medians, and what lies between a quarter and three quarters of the rounds."""
    for ours, theirs, aim in AIMS:
        if ours in turns and theirs in turns:
            middle, low, high = ratio_of_turns(turns[ours], turns[theirs])
            aimed = f", aim {aim:.2f}" if aim else ""
            print(f"{f'{ours} / {theirs}':64} {middle:.2f} ({low:.2f} to {high:.2f}){aimed}")
            yield {"comparison": f"{ours} / {theirs}", "aim": aim, "per_cpu_second": middle, "low": low, "high": high}


if __name__ == "__main__":
    main()
