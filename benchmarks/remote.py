"""Shards in an object store beside the same shards on the disk: what the link gives in the first epoch, and after it.

    python benchmarks/remote.py [--minutes 10]

A server of our own, with the proxy of the tests, answers 50 ms late and sends 1 Gb/s at most, over all connections.
Two loader processes read records of 190 kB, shuffled and in blocks, as they are, or decoded and cropped. Where all is
new to the host, the index of the shards is made first: it reads all of them into the cache, and no epoch has to fetch
anything. Here epochs begin with the index alone, as after another run whose blocks were evicted: one with an empty
cache, and others.
With --minutes, records are read for so long through a cache of a third of the data: what grows?
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import md5
from http.client import HTTPConnection
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import simplejpeg
from measuring import ALLOCATOR, Line, record

import lockstep as ls
from lockstep.data.order import Order
from lockstep.records import serialize_example, write_records
from lockstep.records.index_cache import LimitedCache
from lockstep.records.record_files import RecordFiles
from lockstep.storage.remote_path import any_path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from object_server import Answer, FaultyProxy

BUCKET, NUM_SHARDS, BATCH_SIZE, NUM_PROCESSES = "bucket", 16, 64, 2
DELAY_SECONDS, CACHE_GB = 0.05, 4.0
AIM_IN_THE_FIRST, AIM_AFTER = 0.9, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--link", type=float, default=125.0, metavar="MB/S", help="1 Gb/s is 125")
    parser.add_argument("--minutes", type=int, help="read for so long in place of comparing")
    parser.add_argument("--quick", action="store_true", help="little data: does it run?")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if not ALLOCATOR.items() <= os.environ.items():  # read when the process begins
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    lines = []
    with tempfile.TemporaryDirectory(prefix="lockstep-remote-") as name:
        folder = Path(name)
        size_bytes = prepare(folder / BUCKET, 50 if arguments.quick else arguments.megabytes)
        with served(folder) as store:
            if arguments.minutes:
                lines += minutes_of(folder, store, size_bytes / 3e9, arguments.link * 1e6, arguments.minutes)
            for what, decodes, order in [] if arguments.minutes else CASES:
                store.ask(f"reset?{arguments.link * 1e6}")
                line = compared(folder, store, what, decodes, order, arguments.epochs)
                line |= shares(line, size_bytes, arguments.link * 1e6)
                show(line)
                lines.append(line)
    if not arguments.quick:
        record(__file__, lines)


# Data ---------------------------------------------------------------------------------------------------------------


def prepare(folder: Path, megabytes: int) -> int:
    """Write shards of JPEGs of about 110 kB; returns their size in bytes."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (8, 48, 64, 3))
    images = [np.kron(each, np.ones((8, 8, 1))) + draw.normal(0, 22, (384, 512, 3)) for each in coarse]
    jpegs = [simplejpeg.encode_jpeg(image.clip(0, 255).astype(np.uint8), quality=88) for image in images]
    num_images = megabytes * 1_000_000 // (sum(map(len, jpegs)) // len(jpegs))
    folder.mkdir()
    for shard in range(NUM_SHARDS):
        write_records(
            folder / f"train-{shard:05}-of-{NUM_SHARDS:05}",
            (
                serialize_example({"image/encoded": [jpegs[number % 8]], "image/class/label": np.array([1])})
                for number in range(shard, num_images, NUM_SHARDS)
            ),
        )
    return sum(path.stat().st_size for path in folder.iterdir())


class Payloads:
    """The records as they are: what reading costs without decoding."""

    cost = "decode"

    def __init__(self, paths: str, cache: Any) -> None:
        self._records = RecordFiles(paths, cache=cache)

    def __len__(self) -> int:
        return len(self._records)

    def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
        return {"size": [len(data) for data, _ in self._records.read_each(indices.tolist())]}

    def example_id(self, index: int) -> str:
        return self._records.example_id(index)


IN_BLOCKS = ls.data.BlockShuffled(32, window_blocks=16)
CASES: list[tuple[str, bool, Order | str]] = [
    ("records, shuffled", False, "shuffled"),
    ("records, in blocks", False, IN_BLOCKS),
    ("images, shuffled", True, "shuffled"),
    ("images, in blocks", True, IN_BLOCKS),
]


def loader_of(paths: str, cache: Any, decodes: bool, order: Order | str) -> ls.data.Loader:
    if decodes:
        reader: Any = ls.data.ImageRecords(paths, ls.data.ImageNetSchema(), cache=cache)
    else:
        reader = Payloads(paths, cache)
    augment = [ls.augmentations.RandomResizedCrop(224), ls.augmentations.HorizontalFlip()] if decodes else None
    return ls.data.Loader(reader, batch_size=BATCH_SIZE, order=order, augment=augment, num_processes=NUM_PROCESSES)


def epochs(paths: str, cache: Any, decodes: bool, order: Order | str, count: int) -> Iterator[float]:
    """Yield the images in a second of each epoch."""
    loader = loader_of(paths, cache, decodes, order)
    batches = loader.batches(range(1), 1)
    per_epoch = loader.epoch_size // BATCH_SIZE
    for _ in range(count):
        began = time.perf_counter()
        for _ in range(per_epoch):
            next(batches)
        yield per_epoch * BATCH_SIZE / (time.perf_counter() - began)


def compared(folder: Path, store: Store, what: str, decodes: bool, order: Order | str, count: int) -> Line:
    """Measure one case: the index through an empty cache, then epochs with the index in another one."""
    name = what.replace(" ", "-").replace(",", "")
    remote = f"s3://{BUCKET}/train-*"
    assert [*any_path(f"s3://{BUCKET}").iterdir()]  # what reaches the store has been imported
    began = time.perf_counter()
    num_images = len(loader_of(remote, LimitedCache(folder / f"{name}-index", CACHE_GB), decodes, order).reader)
    index_seconds = time.perf_counter() - began
    shutil.copytree(folder / f"{name}-index", folder / name, ignore=shutil.ignore_patterns("remote-blocks*"))
    shutil.rmtree(folder / f"{name}-index")
    measure = partial(epochs, decodes=decodes, order=order)
    before, stats = store.ask("stats"), []
    of_store = measure(remote, LimitedCache(folder / name, CACHE_GB), count=count)
    of_disk = measure(f"{folder / BUCKET}/train-*", folder / "local", count=count)
    first, _ = next(of_store), next(of_disk)
    stats.append(store.ask("stats"))
    later = [*zip(of_store, of_disk, strict=True)]  # in turn, for others are at work on the machine, too
    stats.append(store.ask("stats"))
    return {
        "comparison": what,
        "images": num_images,
        "index_seconds": index_seconds,
        "first_per_second": first,
        "later_per_second": median(ours for ours, _ in later),
        "local_per_second": median(theirs for _, theirs in later),
        "later_of_local": median(ours / theirs for ours, theirs in later),
        "first_bytes": stats[0]["num_bytes"] - before["num_bytes"],
        "later_bytes": stats[1]["num_bytes"] - stats[0]["num_bytes"],
        "first_requests": stats[0]["num_requests"] - before["num_requests"],
        "most_open": stats[1]["most_open"],
        "most_memory_mb": getrusage(RUSAGE_CHILDREN).ru_maxrss / 1e3,
        "load": os.getloadavg()[0],
    }


def minutes_of(folder: Path, store: Store, cache_gb: float, link: float, count: int) -> Iterator[Line]:
    """Read records for minutes, and yield what each of them took."""
    paths, name = f"s3://{BUCKET}/train-*", folder / "minutes"
    len(loader_of(paths, LimitedCache(name, 0), False, "shuffled").reader)  # makes the index
    batches = loader_of(paths, LimitedCache(name, cache_gb), False, "shuffled").batches(range(1), 1)
    for minute in range(1, count + 1):
        store.ask(f"reset?{link}")
        began, read = time.perf_counter(), 0
        while time.perf_counter() - began < 60:
            next(batches)
            read += BATCH_SIZE
        told = store.ask("stats")
        memory = max(private_bytes(each.pid) for each in multiprocessing.active_children() if each.pid)
        line = {"comparison": f"minute {minute}", "records": read, "private_mb": memory / 1e6, **told}
        print(
            "{comparison:9} {records:6} records, {num_bytes:.3g} bytes by {num_requests} requests; at most {most_open} "
            "connections at once; {private_mb:.0f} MB of its own has a process".format(**line),
            flush=True,
        )
        yield line
    batches.close()


def private_bytes(pid: int) -> int:
    """Tell the memory of a process that no other one shares and no file is behind."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def shares(line: Line, size_bytes: int, link: float) -> Line:
    """What of the link was used, and of what the link and the decoder of this machine would give together."""
    of_link = link / (size_bytes / line["images"])
    return {
        "link_bytes_per_second": link,
        "index_of_link": size_bytes / line["index_seconds"] / link,
        "first_of_link": line["first_per_second"] / of_link,
        "first_of_possible": line["first_per_second"] / min(of_link, line["local_per_second"]),
        "times_read": line["first_bytes"] / size_bytes,
        "later_times_read": line["later_bytes"] / size_bytes,
    }


def show(line: Line) -> None:
    print(
        "{comparison:18} local {local_per_second:6.0f}/s, link {link_bytes_per_second:.3g} B/s\n"
        "    index with all data {index_of_link:.2f} of the link (aim {aim_in_the_first}); epoch with an empty cache "
        "{first_per_second:6.0f}/s = {first_of_link:.2f} of it, {first_of_possible:.2f} of link and disk\n"
        "    later {later_per_second:6.0f}/s = {later_of_local:.2f} of local (aim {aim_after})\n"
        "    read {times_read:.2f} times, then {later_times_read:.2f}; {first_requests} requests, "
        "{most_open} connections, {most_memory_mb:.0f} MB a process at most; load {load:.1f}".format(
            **line, aim_in_the_first=AIM_IN_THE_FIRST, aim_after=AIM_AFTER
        ),
        flush=True,
    )


# The store ------------------------------------------------------------------------------------------------------------


class FolderStore(FaultyProxy):
    """Answers what s3fs asks to read the files of a folder, whose folders are buckets: moto's server is too slow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(store_port=0)

    def answer(self, store: HTTPConnection, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        url = urlsplit(path)
        query = parse_qs(url.query)
        if url.path == "/-/stats":
            told = {"num_bytes": self.num_bytes, "num_requests": len(self.requests), "most_open": self.most_open}
            return Answer(200, [], json.dumps(told).encode())
        if url.path == "/-/reset":
            self.reset()
            self.delay_seconds, self.bytes_per_second = DELAY_SECONDS, float(url.query)
            return Answer(200, [], b"{}")
        place = self.folder / unquote(url.path).strip("/")
        if "list-type" in query:
            return Answer(200, [("Content-Type", "application/xml")], self._listing(place, query))
        if not place.is_file():
            return Answer(404, [], b"<Error><Code>NoSuchKey</Code></Error>")
        size = place.stat().st_size
        told_of = [("ETag", etag_of(place)), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")]
        if method == "HEAD":
            return Answer(200, [*told_of, ("Content-Length", str(size))], b"")
        first, _, last = next((v for k, v in headers.items() if k.lower() == "range"), "bytes=0-")[6:].partition("-")
        start, stop = int(first), min(int(last or size), size - 1) + 1
        with place.open("rb") as file:
            content = os.pread(file.fileno(), stop - start, start)
        return Answer(206, [*told_of, ("Content-Range", f"bytes {start}-{stop - 1}/{size}")], content)

    def _listing(self, bucket: Path, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        found = [path for path in sorted(bucket.iterdir()) if path.name.startswith(prefix)]
        contents = "".join(
            f"<Contents><Key>{path.name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{etag_of(path).replace(chr(34), '&quot;')}</ETag><Size>{path.stat().st_size}</Size></Contents>"
            for path in found
        )
        return (
            f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket.name}'
            f"</Name><Prefix>{prefix}</Prefix><KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
            f"{contents}</ListBucketResult>"
        ).encode()


def etag_of(path: Path) -> str:
    return f'"{md5(f"{path.name} {path.stat().st_size}".encode()).hexdigest()}"'


def serve(folder: Path) -> None:
    with FolderStore(folder) as store:
        print(json.dumps(store.environment), flush=True)
        sys.stdin.read()


class Store:
    """The server in its process, as this one asks it."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, what: str) -> dict[str, Any]:
        """Ask for its counts ("stats"), or have it count anew, with a link of so many bytes a second ("reset?1e6")."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", f"/-/{what}")
        told: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return told


@contextmanager
def served(folder: Path) -> Iterator[Store]:
    """Serve a folder by another process, and let s3:// mean it."""
    command = [sys.executable, __file__, "--serve", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        environment = json.loads(server.stdout.readline())
        os.environ |= environment
        try:
            yield Store(urlsplit(environment["AWS_ENDPOINT_URL"]).port or 0)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
