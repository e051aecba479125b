"""What readers cost beside the decoding: records of images, their index, rows of tables, items of a torch dataset.

    python benchmarks/readers.py [--rounds 15] [--quick]

One process, one thread, its time of the processor. Records have the 14 features of inception's ImageNet, and random
bytes in place of the JPEG. Theirs is, for records, to read the same bytes by hand, compute the checksum and copy the
image out, without parsing; for an index, to read the same heads by hand; for rows of Parquet and Arrow (extra
[parquet]) and for files of a folder, a record with the same image and label; for items, torch's DataLoader without
processes. Ratios of neighbouring rounds count. The result is printed and appended to benchmarks/results/readers.jsonl.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from measuring import Line, compared, interleave, record, report, run_part
from torch.utils.data import DataLoader, Dataset

import lockstep as ls
from lockstep.records import serialize_example, write_records
from lockstep.records.record_index import build_index

NUM_RECORDS, RECORDS_A_BATCH, ITEMS_A_BATCH, NUM_BATCHES = 512, 32, 64, 16
SIZES = {"10 kB": 10_000, "110 kB": 110_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three rounds: does it run?")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    if arguments.part:
        PARTS[arguments.part](rounds)
        return
    lines = [line for part in PARTS for line in run_part(__file__, part, rounds, threads=1)]
    for line in lines:
        low, high = line["ratio_low"], line["ratio_high"]
        print(f"{line['comparison']:45} {line['ours_us']:8.2f} us, beside it {line['theirs_us']:8.2f} us; ", end="")
        print(f"ratio {line['ratio']:.2f} (rounds {low:.2f} to {high:.2f})")
    if not arguments.quick:
        record(__file__, lines)


def measure(comparison: str, rounds: int, units: int, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    """Report what both take a unit, in microseconds."""
    times = interleave({"ours": ours, "theirs": theirs}, rounds, clock=time.process_time)
    line: Line = compared(times)
    each = {f"{name}_us": line[f"{name}_ms"] * 1000 / units for name in ("ours", "theirs")}
    report(comparison, {**line, **each, "units": units})


# Records ------------------------------------------------------------------------------------------------------------


def measure_records(rounds: int) -> None:
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train-00000-of-00001"
            write_records(path, records(size))
            _measure_reading(name, path, rounds)
            _measure_index(name, path, rounds)


def _measure_reading(name: str, path: Path, rounds: int) -> None:
    index = build_index(path)
    places = list(zip(index.offsets.tolist(), index.lengths.tolist(), strict=True))
    draws = np.random.default_rng(1)
    batches = [draws.integers(0, NUM_RECORDS, RECORDS_A_BATCH) for _ in range(NUM_BATCHES)]

    def by_hand(indices: list[int]) -> list[bytes]:
        images = []
        for number in indices:
            offset, length = places[number]
            payload = os.pread(file.fileno(), length, offset)
            google_crc32c.value(payload)
            images.append(payload[200:-200])
        return images

    with path.open("rb") as file:
        for fields, boxes in (("image and label", False), ("with a box", True)):
            reader = ls.data.ImageRecords(path, ls.data.ImageNetSchema(boxes=boxes))
            measure(
                f"a record of {name}, {fields}",
                rounds,
                NUM_BATCHES * RECORDS_A_BATCH,
                lambda reader=reader: [reader.read_batch(indices) for indices in batches],
                lambda: [by_hand(indices.tolist()) for indices in batches],
            )


def _measure_index(name: str, path: Path, rounds: int) -> None:
    offsets = build_index(path).offsets.tolist()

    def by_hand() -> None:
        with path.open("rb") as file:
            for offset in offsets:
                os.pread(file.fileno(), 12, offset - 12)

    measure(f"an entry of an index, records of {name}", rounds, NUM_RECORDS, lambda: build_index(path), by_hand)


def measure_tables(rounds: int) -> None:
    """Rows of 110 kB in groups of 100, as Hugging Face's datasets write them, and files, in a random order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draws = np.random.default_rng(0)
    images = [draws.bytes(SIZES["110 kB"]) for _ in range(NUM_RECORDS)]
    labels = [number % 10 for number in range(NUM_RECORDS)]
    table = pa.table({"image": [{"bytes": image, "path": None} for image in images], "label": labels})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        features = (
            {"image/encoded": [i], "image/class/label": np.array([n])} for i, n in zip(images, labels, strict=True)
        )
        write_records(folder / "train-00000-of-00001", map(serialize_example, features))
        for number, image in enumerate(images):
            path = folder / "images" / str(labels[number]) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
        readers: dict[str, Any] = {"a file of a folder": ls.data.ImageFolder(folder / "images")}
        for compression in ("none", "snappy", "zstd"):
            pq.write_table(table, folder / f"{compression}.parquet", row_group_size=100, compression=compression)
            readers[f"a row of Parquet, {compression}"] = ls.data.ImageTable(folder / f"{compression}.parquet")
        with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=100)
        readers["a row of Arrow"] = ls.data.ImageTable(folder / "a.arrow")
        record = ls.data.ImageRecords(folder / "train-00000-of-00001", ls.data.ImageNetSchema())
        batches = [draws.integers(0, NUM_RECORDS, RECORDS_A_BATCH) for _ in range(NUM_BATCHES)]
        for what, reader in readers.items():
            measure(
                f"{what}, beside a record",
                rounds,
                NUM_BATCHES * RECORDS_A_BATCH,
                lambda reader=reader: [reader.read_batch(indices) for indices in batches],
                lambda: [record.read_batch(indices) for indices in batches],
            )


def records(size: int) -> Iterator[bytes]:
    """Records with the features that inception's converter of ImageNet writes."""
    draws = np.random.default_rng(0)
    edge = np.array([0.25], np.float32)
    for number in range(NUM_RECORDS):
        yield serialize_example(
            {
                "image/encoded": [draws.bytes(size)],
                **{f"image/{name}": np.array([value]) for name, value in (("height", 375), ("width", 500))},
                "image/colorspace": [b"RGB"],
                "image/channels": np.array([3]),
                "image/class/label": np.array([number % 1000 + 1]),
                "image/class/synset": [b"n01440764"],
                "image/class/text": [b"tench, Tinca tinca"],
                **{f"image/object/bbox/{name}": edge for name in ("xmin", "ymin")},
                **{f"image/object/bbox/{name}": 2 * edge for name in ("xmax", "ymax")},
                "image/object/bbox/label": np.array([number % 1000 + 1]),
                "image/format": [b"JPEG"],
                "image/filename": [b"n01440764_%d.JPEG" % number],
            }
        )


# Items --------------------------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """Pairs of eight numbers and a label, from memory."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw, self.values = draw, torch.randn(4096, 8)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        self.draw()
        return self.values[index], index


def measure_items(rounds: int) -> None:
    for name, draw in (
        ("that draw nothing", lambda: None),
        ("that draw from torch", lambda: torch.rand(())),
        ("that draw from numpy", np.random.random),
    ):
        dataset = Items(draw)
        loader = ls.data.Loader(ls.data.TorchDataset(dataset), batch_size=ITEMS_A_BATCH, num_processes=0)
        ours = loader.batches(range(1), 1)
        theirs = endless(DataLoader(dataset, batch_size=ITEMS_A_BATCH, shuffle=True, num_workers=0))
        measure(
            f"a batch of {ITEMS_A_BATCH} items {name}",
            rounds,
            NUM_BATCHES,
            lambda ours=ours: [next(ours) for _ in range(NUM_BATCHES)],
            lambda theirs=theirs: [next(theirs) for _ in range(NUM_BATCHES)],
        )
        ours.close()


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


PARTS = {"records": measure_records, "tables": measure_tables, "items": measure_items}

if __name__ == "__main__":
    main()
