from __future__ import annotations

import gzip
import hashlib
import shutil
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.errors import DataError, InputError
from lockstep.images.normalisation import scale_image
from lockstep.readers.mnist import FILES, SPLITS, ensure_files, load_idx, mnist_folder, mnist_reader
from lockstep.storage.remote_path import RemotePath

ORIGINALS = Path(__file__).parents[2] / "data" / "mnist"
TEST_IMAGES, TEST_LABELS = FILES[2], FILES[3]


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    """A folder with the original files; they are links."""
    folder = tmp_path / "originals"
    folder.mkdir()
    for file in FILES:
        (folder / file.name).symlink_to(ORIGINALS / file.name)
    return folder


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """A web server of the tests' own, and the folder it serves."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "*")
    served = tmp_path / "served"
    served.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", served
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_table_is_that_of_the_files() -> None:
    for file in FILES:
        data = (ORIGINALS / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.num_bytes, file.sha256)
        assert f"| {file.name} | {file.num_bytes} | {file.sha256} |" in (ORIGINALS / "SOURCE.md").read_text()


@pytest.mark.parametrize(("split", "size"), [("train", 55_000), ("validation", 5_000), ("test", 10_000)])
def test_the_reader_gives_the_images_and_labels_of_its_split(split: str, size: int) -> None:
    reader = mnist_reader(split, str(ORIGINALS))
    assert len(reader) == size
    assert reader.cost == "memory"
    images, labels = (load_idx(ORIGINALS / file.name) for file in (SPLITS[split].images, SPLITS[split].labels))
    rows = {"train": slice(5_000, None), "validation": slice(5_000), "test": slice(None)}[split]
    batch = reader.read_batch(np.arange(size))
    assert (batch["image"].dtype, batch["label"].dtype) == (torch.uint8, torch.int64)
    assert batch["image"].shape == (size, 1, 28, 28)
    assert np.array_equal(batch["image"].numpy()[:, 0], images[rows])
    assert np.array_equal(batch["label"].numpy(), labels[rows])


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match=r"""no split 'valid'.\n.*\n.*"train" or "validation" or "test"\n"""):
        mnist_reader("valid")


def test_the_folder_is_the_one_here_or_else_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert mnist_folder() == tmp_path / "cache" / "lockstep" / "mnist"
    assert mnist_folder(cache="mine") == Path("mine/mnist")
    assert mnist_folder("data", cache="mine") == Path("data")
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    assert mnist_folder(cache="mine") == Path("data/mnist")


def test_an_original_that_cannot_be_read_is_named(originals: Path) -> None:
    path = originals / TEST_LABELS.name
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=rf"{path} cannot be read\.\n.*Is a directory"):
        mnist_reader("test", originals)
    assert len(mnist_reader("validation", originals)) == 5_000


def test_pixels_are_scaled_as_in_the_reference() -> None:
    scaled = scale_image(torch.arange(256, dtype=torch.uint8))
    assert scaled.dtype == torch.float32
    assert (scaled[0].item(), scaled[255].item()) == (-0.5, 0.5)
    expected = np.arange(256, dtype=np.float32) * np.float32(1.0 / 255) - np.float32(0.5)
    assert np.array_equal(scaled.numpy(), expected)


def test_a_damaged_original_is_named_and_left_alone(originals: Path) -> None:
    path = originals / TEST_LABELS.name
    path.unlink()
    path.write_bytes(b"something else")
    with pytest.raises(DataError) as caught:
        mnist_reader("test", originals)
    assert caught.value.what == f"{path} is not MNIST's original file."
    assert caught.value.given == f"sha256 {hashlib.sha256(b'something else').hexdigest()}, 14 bytes"
    assert caught.value.expected == f"sha256 {TEST_LABELS.sha256}, 4542 bytes"
    assert caught.value.hint == "move it away, and it will be fetched again"
    assert path.read_bytes() == b"something else"
    assert len(list(originals.iterdir())) == 4


def test_a_missing_file_is_fetched_from_the_first_mirror_that_has_it(originals: Path, mirror: tuple[str, Path]) -> None:
    address, served = mirror
    for name in ("empty", "wrong", "good"):
        (served / name).mkdir()
    (served / "wrong" / TEST_LABELS.name).write_bytes(bytes(5_000))
    shutil.copy(ORIGINALS / TEST_LABELS.name, served / "good")
    path = originals / TEST_LABELS.name
    path.unlink()
    mirrors = [f"{address}{name}/" for name in ("empty", "wrong", "good")]
    assert ensure_files(originals, mirrors=mirrors) == [originals / file.name for file in FILES]
    assert path.read_bytes() == (ORIGINALS / TEST_LABELS.name).read_bytes()
    assert len(list(originals.iterdir())) == 4


def test_originals_in_a_store_are_read_and_never_fetched(originals: Path) -> None:
    folder = RemotePath(f"memory://{uuid.uuid4().hex}")
    for file in FILES[1:]:
        (folder / file.name).upload(originals / file.name)
    stored = mnist_folder(str(folder))
    paths = ensure_files(stored, FILES[2:])
    assert (load_idx(paths[1]) == load_idx(originals / FILES[3].name)).all()
    with pytest.raises(DataError, match=rf"{FILES[0].name} of MNIST is not in {folder}[\s\S]*no mirrors"):
        ensure_files(stored)


def test_without_a_mirror_the_error_says_where_to_put_the_files(originals: Path, mirror: tuple[str, Path]) -> None:
    address, served = mirror
    (served / TEST_LABELS.name).write_bytes(b"wrong")
    (originals / TEST_LABELS.name).unlink()
    with pytest.raises(DataError) as caught:
        ensure_files(originals, mirrors=[f"{address}none/", address, "http://127.0.0.1:1/"])
    assert caught.value.what == f"{TEST_LABELS.name} of MNIST is not in {originals}, and cannot be fetched."
    wrong = hashlib.sha256(b"wrong").hexdigest()
    given_ = str(caught.value.given).split("; ")
    assert given_[0] == f"{address}none/: HTTP Error 404: File not found"
    assert given_[1] == f"{address}: another file, with sha256 {wrong}"
    assert given_[2].startswith("http://127.0.0.1:1/: <urlopen error")
    assert caught.value.expected == f"4542 bytes with sha256 {TEST_LABELS.sha256}"
    names = ", ".join(file.name for file in FILES)
    assert caught.value.hint == f"put the four files {names} into {originals}"
    assert len(list(originals.iterdir())) == 3


def test_idx_files_of_any_number_of_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "some.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x02\0\0\0\x02\0\0\0\x03abcdef"))
    assert load_idx(path).tolist() == [[97, 98, 99], [100, 101, 102]]
    assert load_idx(path, 1).tolist() == [[97, 98, 99]]
    assert load_idx(path, 3).tolist() == [[97, 98, 99], [100, 101, 102]]


HEAD = b"\0\0\x08\x01\0\0\0\x05"
DEFLATED = gzip.compress(HEAD + b"abcde", mtime=0)


@pytest.mark.parametrize(
    ("data", "given_"),
    [
        (gzip.compress(b"", mtime=0), r"the first bytes \(none\)"),
        (gzip.compress(b"\0\0\x0d\x01", mtime=0), "the first bytes 00 00 0d 01"),
        (gzip.compress(HEAD[:6], mtime=0), "a header of 6 bytes"),
        (gzip.compress(HEAD + b"abcd", mtime=0), "only 4 values, announced as 5"),
        (gzip.compress(HEAD + b"abcdef", mtime=0), "more than 5 values, announced as 5"),
        (gzip.compress(b"\0\0\x08\x02" + b"\xff" * 8, mtime=0), "a header that announces 18446744065119617025 values"),
        (DEFLATED[:-9], "EOFError: Compressed file ended"),
        (DEFLATED[:-8] + bytes(8), "BadGzipFile: CRC check failed"),
        (DEFLATED[:10] + b"\xff" * 10, "error: Error -3 while decompressing"),
        (HEAD + b"abcde", "BadGzipFile: Not a gzipped file"),
    ],
)
def test_what_is_no_idx_file_is_told(tmp_path: Path, data: bytes, given_: str) -> None:
    path = tmp_path / "some.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path} is not a whole idx file of bytes.\n  given: +{given_}"):
        load_idx(path)


def test_an_idx_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="FileNotFoundError"):
        load_idx(tmp_path / "none.gz")
