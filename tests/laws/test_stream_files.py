"""The law of the stream over files: the same pixels after any resume, for any loader processes, threads and workers."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from test_stream import rows_of_workers

import lockstep as ls
from lockstep.augmentations.on_device import OnDevice
from lockstep.data.each_example import ExampleDraws
from lockstep.data.loader import Loader
from lockstep.readers.reader import Reader

NUM_IMAGES, BATCH_SIZE, NUM_BATCHES = 13, 12, 4


def jpeg(number: int) -> bytes:
    """A picture of its own, of a size of its own."""
    pixels = np.random.default_rng(number).integers(0, 255, (9 + number % 4, 8 + number % 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def folder(path: Path) -> Reader:
    for number in range(NUM_IMAGES):
        (path / "ab"[number % 2]).mkdir(exist_ok=True)
        (path / "ab"[number % 2] / f"{number}.jpg").write_bytes(jpeg(number))
    return ls.data.ImageFolder(path)


def records(path: Path) -> Reader:
    for shard in range(2):
        examples = (
            ls.records.serialize_example({"image/encoded": [jpeg(n)], "image/class/label": np.array([n % 3])})
            for n in range(shard, NUM_IMAGES, 2)
        )
        ls.records.write_records(path / f"train-{shard:05d}-of-00002", examples, "gzip" if shard else None)
    return ls.data.ImageRecords(path / "train-*", ls.data.ImageNetSchema())


def tar(path: Path) -> Reader:
    with tarfile.open(path / "a.tar", "w") as archive:
        for number in range(NUM_IMAGES):
            for ending, content in (("jpg", jpeg(number)), ("cls", str(number % 3).encode())):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return ls.data.TarShards(path / "a.tar", {"image": "jpg", "label": "cls"})


def table(path: Path) -> Reader:
    for shard in range(2):
        rows = range(shard, NUM_IMAGES, 2)
        columns = pa.table({"image": [jpeg(n) for n in rows], "label": [n % 3 for n in rows]})
        compression = "snappy" if shard else "lz4"  # read by pages, and by row groups
        pq.write_table(columns, path / f"train-{shard}.parquet", row_group_size=3, compression=compression)
    return ls.data.ImageTable(path / "train-*")


def several(path: Path) -> Reader:
    (path / "folder").mkdir()
    (path / "records").mkdir()
    return ls.data.Concatenated({"folder": folder(path / "folder"), "records": records(path / "records")})


def brightened(example: dict[str, Any], draws: ExampleDraws) -> dict[str, Any]:
    return {**example, "image": example["image"] // 2 + draws.integer("brightness", 0, 100)}


AUGMENT = [
    ls.augmentations.DistortedCrop(8, resize="random"),
    ls.augmentations.HorizontalFlip(),
    ls.augmentations.RandAugment(1),
    ls.data.EachExample(brightened),
    ls.augmentations.RandomErasing(),
    ls.augmentations.ColourDraws(),
    ls.augmentations.MixDraws(),
]
ON_DEVICE = [
    OnDevice.of(
        [
            ls.augmentations.DistortedCrop(8, resize="random"),
            ls.augmentations.HorizontalFlip(),
            ls.augmentations.ColourDraws(),
            ls.augmentations.MixDraws(),
        ]
    )
]


def hashes(batch: dict[str, Any]) -> Iterator[str]:
    """Of each row: every bit of its fields."""
    for row in range(len(batch["label"])):
        digest = hashlib.sha256()
        for name in sorted(batch):
            digest.update(batch[name][row].numpy().tobytes())
        yield digest.hexdigest()


def stream(loader: Loader, num_workers: int, num_batches: int) -> list[str]:
    """The rows of so many batches, put together from the workers; 12 towers are dealt to them."""
    bounds = [worker * BATCH_SIZE // num_workers for worker in range(num_workers + 1)]
    return rows_of_workers(loader, num_batches, [range(*each) for each in pairwise(bounds)], hashes)


@pytest.fixture(
    scope="module",
    params=[
        (folder, AUGMENT),
        (records, AUGMENT),
        (tar, AUGMENT),
        (table, AUGMENT),
        (several, AUGMENT),
        (folder, ON_DEVICE),
    ],
    ids=["folder", "records", "tar", "table", "several", "finished on the device"],
)
def make_loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loader]:
    torch.set_num_threads(1)
    open_files, augment = request.param
    reader = open_files(tmp_path_factory.mktemp("files"))

    def make(**crew: int) -> Loader:
        return Loader(reader, batch_size=BATCH_SIZE, seed=11, augment=augment, **crew)

    return make


@pytest.mark.process
@pytest.mark.parametrize("by_each", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "each"])
def test_resumed_at_every_step_by_any_crew(make_loader: Callable[..., Loader], by_each: bool) -> None:
    """At every step by a crew of its own, or by each of them."""
    whole = stream(make_loader(num_processes=0), 1, NUM_BATCHES)
    assert len(set(whole)) == len(whole), "each place of the stream has draws of its own"
    crews = [{"num_processes": 0}, {"num_processes": 1}, {"num_processes": 3}, {"num_threads": 2}]
    for step in range(NUM_BATCHES):
        for place in range(len(crews)) if by_each else [step]:
            resumed = make_loader(**crews[place])
            resumed.load_state({**resumed.state(), "position": step * BATCH_SIZE})
            num_workers = (step + place) % len(crews) + 1
            assert stream(resumed, num_workers, NUM_BATCHES - step) == whole[step * BATCH_SIZE :]


def test_each_file_once_an_epoch(make_loader: Callable[..., Loader]) -> None:
    loader = make_loader(num_processes=0)
    size = len(loader.reader)
    for epoch in range(3):
        names = Counter(loader.example_ids(epoch * size, size))
        assert len(names) == size
        assert set(names.values()) == {1}
