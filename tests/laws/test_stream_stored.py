"""The law of the stream over an object store: the same bits as from local files, for any loader processes and resume.

The store is real, S3's as moto plays it, and its proxy fails again and again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from object_server import Fault, FaultyProxy
from test_stream_files import BATCH_SIZE, NUM_IMAGES, folder, jpeg, records, stream, table, tar

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.errors import DataError, StoreError
from lockstep.images.decode import EncodedImage
from lockstep.ragged import Ragged
from lockstep.readers.image_folder import ImageList
from lockstep.readers.reader import Reader
from lockstep.records import record_index, tar_members
from lockstep.storage import cached_ranges, retries
from lockstep.storage.remote_path import RemotePath

NUM_BATCHES = 3
FAULTS = [
    Fault("status", 3, status=500, after=2),
    Fault("short", 3, after=3),
    Fault("cut", 3, after=4),
    Fault("status", 2, status=429, after=5),
]
AUGMENT = [ls.augmentations.DistortedCrop(8, resize="random"), ls.augmentations.HorizontalFlip()]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.fixture
def _uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read asks the store: small files are otherwise in the cache when their index is built."""
    monkeypatch.setattr(cached_ranges, "open_block_cache", lambda *_: None)


def coco(path: Path) -> Reader:
    images, annotations = [], []
    (path / "images").mkdir()
    for number in range(NUM_IMAGES):
        (path / "images" / f"{number}.jpg").write_bytes(jpeg(number))
        height, width = 9 + number % 4, 8 + number % 5
        images.append({"id": number, "file_name": f"{number}.jpg", "height": height, "width": width})
        annotations += [
            {"id": 10 * number + each, "image_id": number, "category_id": 1 + each, "bbox": [1, 1, 3 + each, 4]}
            for each in range(number % 3)
        ]
    categories = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (path / "annotations.json").write_text(json.dumps(document))
    return ls.data.open_source(path / "annotations.json")


def voc(path: Path) -> Reader:
    (path / "Annotations").mkdir()
    (path / "JPEGImages").mkdir()
    (path / "ImageSets" / "Main").mkdir(parents=True)
    for number in range(NUM_IMAGES):
        (path / "JPEGImages" / f"{number}.jpg").write_bytes(jpeg(number))
        size = f"<size><width>{8 + number % 5}</width><height>{9 + number % 4}</height></size>"
        box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>5</xmax><ymax>7</ymax></bndbox>"
        (path / "Annotations" / f"{number}.xml").write_text(
            f"<annotation><filename>{number}.jpg</filename>{size}<object><name>cat</name>{box}</object></annotation>"
        )
    (path / "ImageSets" / "Main" / "train.txt").write_text("\n".join(map(str, range(NUM_IMAGES))))
    return ls.data.open_source(path)


def boxes(path: Path) -> Reader:
    """Images with YOLO's texts, and a table of their boxes."""
    lines = ["filename,class,xmin,ymin,xmax,ymax"]
    for name in ("images", "labels"):
        (path / name).mkdir()
    for number in range(NUM_IMAGES):
        (path / "images" / f"{number}.jpg").write_bytes(jpeg(number))
        if number % 3:
            (path / "labels" / f"{number}.txt").write_text("0 0.5 0.5 0.25 0.5\n" * number)
        lines.append(f"{number}.jpg,cat,1,2,5,7")
    (path / "data.yaml").write_text("names: [cat]\ntrain: ../images\n")
    (path / "labels.csv").write_text("\n".join(lines))
    return ls.data.open_source(path)


def boxes_in_csv(path: Path) -> Reader:
    boxes(path)
    return ls.data.open_source(path / "labels.csv")


def images(path: Path) -> Reader:
    folder(path)
    return ImageList(path)


STREAMS: dict[str, tuple[Callable[[Path], Reader], Callable[[str], Reader]]] = {
    "folder": (folder, ls.data.open_source),
    "records": (records, lambda url: ls.data.open_source(f"{url}/train-*")),
    "tar": (tar, lambda url: ls.data.TarShards(f"{url}/a.tar", {"image": "jpg", "label": "cls"})),
    "table": (table, lambda url: ls.data.open_source(f"{url}/train-*.parquet")),
}
WHEN = {False: "faults", True: "cached, and the store is gone"}
QUICK = {("folder", False), ("table", False), ("tar", True)}  # of the others `test_batches_are_those` reads each
READERS = STREAMS | {
    "coco": (coco, lambda url: ls.data.open_source(f"{url}/annotations.json:{url}/images")),
    "coco, images beside": (coco, lambda url: ls.data.open_source(f"{url}/annotations.json", everything=True)),
    "voc": (voc, ls.data.open_source),
    "yolo": (boxes, ls.data.open_source),
    "boxes in csv": (boxes_in_csv, lambda url: ls.data.open_source(f"{url}/labels.csv")),
    "list": (images, ImageList),
    "records in braces": (records, lambda url: ls.data.open_source(f"{url}/train-{{00000..00001}}-of-00002")),
    "folder of records": (records, ls.data.open_source),
}


@dataclass(frozen=True)
class Both:
    """The same data on this machine and in the store, whose requests so far are those of opening it."""

    local: Reader
    stored: Reader


@pytest.fixture
def both(request: pytest.FixtureRequest, bucket: RemotePath, object_store: FaultyProxy, tmp_path: Path) -> Both:
    make, opened = READERS[request.param]
    data = tmp_path / "data"
    data.mkdir()
    local = make(data)
    for file in data.rglob("*"):
        if file.is_file():
            (bucket / file.relative_to(data).as_posix()).upload(file)
    object_store.reset()
    return Both(local, opened(str(bucket)))


def contents(value: Any) -> Any:
    """What is in a field, without the path that it comes from."""
    if isinstance(value, list):
        return [each.data if isinstance(each, EncodedImage) else contents(each) for each in value]
    if isinstance(value, Ragged):
        return [each.tolist() for each in (value.values, value.lengths)]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("both", [name for name in READERS if name != "table"], indirect=True)
@pytest.mark.usefixtures("_uncached")
def test_batches_are_those_of_local_files_in_one_wave(both: Both, object_store: FaultyProxy) -> None:
    assert object_store.num_requests(r"\d\.(jpg|xml)|train-0", "HEAD") == 0, "no file is asked for its size"
    assert len(both.stored) == len(both.local) == NUM_IMAGES
    if hasattr(both.local, "fingerprint"):
        told = {name: value for name, value in both.local.fingerprint().items() if not name.startswith("options of")}
        assert told.items() <= both.stored.fingerprint().items()  # type: ignore[attr-defined]
    indices = np.array([3, 12, 0, 7])
    assert [both.stored.example_id(index) for index in indices] == [both.local.example_id(i) for i in indices]
    object_store.requests.clear()
    there, here = both.stored.read_batch(indices), both.local.read_batch(indices)
    assert {name: contents(value) for name, value in there.items()} == {n: contents(v) for n, v in here.items()}
    assert len(object_store.requests) <= len(indices)
    assert {method for method, _, _ in object_store.requests} == {"GET"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("both", "is_cached"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK), id=f"{case[0]}, {WHEN[case[1]]}")
        for case in itertools.product(STREAMS, WHEN)
    ],
    indirect=["both"],
)
def test_the_stream_is_that_of_local_files(
    both: Both, is_cached: bool, object_store: FaultyProxy, request: pytest.FixtureRequest
) -> None:
    if not is_cached:
        request.getfixturevalue("_uncached")

    def loader(reader: Reader, num_processes: int) -> Loader:
        return Loader(reader, batch_size=BATCH_SIZE, seed=11, augment=AUGMENT, num_processes=num_processes)

    whole = stream(loader(both.local, 0), 1, NUM_BATCHES)
    if is_cached:
        both.stored.read_batch(np.arange(NUM_IMAGES))
    object_store.faults, object_store.refuses = [replace(fault) for fault in FAULTS], is_cached
    for step, num_processes in enumerate((0, 1, 2)):
        resumed = loader(both.stored, num_processes)
        resumed.load_state({**resumed.state(), "position": step * BATCH_SIZE})
        assert stream(resumed, 1 + step, NUM_BATCHES - step) == whole[step * BATCH_SIZE :]
    assert is_cached or all(fault.num_met > fault.after for fault in object_store.faults)


@pytest.mark.process
@pytest.mark.parametrize("both", ["folder"], indirect=True)
@pytest.mark.parametrize("num_processes", [0, 1])
def test_no_example_is_blamed_for_a_store_that_fails(both: Both, object_store: FaultyProxy, num_processes: int) -> None:
    loader = Loader(both.stored, batch_size=4, seed=1, num_processes=num_processes, bad_examples="skip")
    object_store.faults = [Fault("status", 10_000, status=500)]
    with pytest.raises(StoreError, match=r"\.jpg, bytes 0 to \d+ cannot be read"):
        next(iter(loader.batches(range(1), 1)))


@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("both", ["folder", "records", "tar"], indirect=True)
def test_an_object_that_changes_while_it_is_read_is_named(both: Both, bucket: RemotePath) -> None:
    indices = np.arange(len(both.stored))
    both.stored.read_batch(indices)
    for name in bucket.walk_files():
        (bucket / name).write_bytes((bucket / name).read_bytes() + b"more")
    with pytest.raises(DataError, match=rf"{bucket}/.* has changed since it was listed"):
        both.stored.read_batch(indices)


@pytest.mark.parametrize("both", ["records", "tar"], indirect=True)
def test_an_index_is_built_from_large_ranges_and_kept(
    both: Both, bucket: RemotePath, object_store: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (record_index, tar_members):
        monkeypatch.setattr(module, "_WORTH_KEEPING_BYTES", 0)
    opened = READERS["records" if isinstance(both.stored, ls.data.ImageRecords) else "tar"][1]
    opened(str(bucket))
    object_store.requests.clear()
    again = opened(str(bucket))
    assert again.fingerprint() == both.stored.fingerprint()  # type: ignore[attr-defined]
    plain = r"/train-00000|/a\.tar"  # a compressed file is read whole
    assert object_store.num_requests(plain) <= 1, "no more than the first record, to see what it is"
