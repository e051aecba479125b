"""Files and folders of an object store by their URL, with the methods of a pathlib.Path that Lockstep uses.

fsspec reaches the store: `s3://` through s3fs, `gs://` through gcsfs, `az://` through adlfs, `hf://` through
huggingface_hub. Credentials come from where the provider's own tools look for them.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

from lockstep.errors import DataError
from lockstep.storage.retries import with_retries

Result = TypeVar("Result")

EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "hf": "hf",
}
"""Schemes of URLs, and the extra of Lockstep that brings what reaches them."""
_LOCAL_SCHEMES = {"memory"}
"""Reached by fsspec alone: a store in this process, for tests."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)
_STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "blob_id",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)
"""What stores tell of the version of an object, the best first."""


class ObjectStat(NamedTuple):
    """What a store tells of an object."""

    st_size: int
    st_mtime_ns: int
    """A number for the version of the content (its etag, where the store has one): another one after a change."""


def is_url(path: object) -> bool:
    """Whether a path is a URL such as `s3://bucket/folder`."""
    return isinstance(path, RemotePath) or (isinstance(path, str) and _URL.match(path) is not None)


def any_path(path: str | AnyPath) -> AnyPath:
    """Return a path of this machine, or of an object store if it is a URL of one."""
    if isinstance(path, str) and is_url(path):
        return RemotePath(path)
    return path if isinstance(path, RemotePath) else Path(path)


class RemotePath:
    """A file or folder of an object store. Hashable, ordered by its URL; it may be pickled and forked.

    Methods raise OSError as those of pathlib.Path do, once the store has refused often enough.

    Raises:
        DataError: no URL of a store that is known.
    """

    __slots__ = ("_path", "_scheme")

    def __init__(self, url: str) -> None:
        found = _URL.fullmatch(url)
        scheme = found[1].lower() if found else ""
        if not found or scheme not in EXTRAS | dict.fromkeys(_LOCAL_SCHEMES):
            raise DataError(
                f"{url} is in no store that is known.",
                given=f"an address that begins with {scheme}:" if found else "no URL",
                expected="a path in the file system, or a URL that begins with s3://, gs://, az:// or hf://",
                hint="mount it, or copy it, and give the path of the folder",
            )
        if re.match(r"[^/@]*:[^/@]*@", found[2]):
            raise DataError(
                f"{scheme}://... holds a password.",
                given="a URL with a user and a password",
                expected="the bucket and the path alone: recipes, logs and checkpoints keep the URL",
                hint="give credentials the way the provider's own tools take them, by environment or profile",
            )
        self._scheme, self._path = scheme, _normal(found[2])

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __reduce__(self) -> tuple[type[RemotePath], tuple[str]]:
        return RemotePath, (str(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, part: str) -> RemotePath:
        return RemotePath(f"{self}/{part}")

    # Names ------------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._pure.name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self._pure.stem

    @property
    def suffix(self) -> str:
        """The end of the name from the last dot on; "" if it has none."""
        return self._pure.suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the path, the bucket first."""
        return self._pure.parts

    @property
    def parent(self) -> RemotePath:
        """The folder; a bucket is its own."""
        above = self._path.rpartition("/")[0]
        return RemotePath(f"{self._scheme}://{above or self._path}")

    def with_name(self, name: str) -> RemotePath:
        """Return the path with another last part."""
        return self.parent / name

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """Return the path within a folder above it; ValueError if it is not."""
        return self._pure.relative_to(folder._pure)

    def is_absolute(self) -> bool:
        """Whether it is whole, as every URL is."""
        return True

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self._path)

    # What is there ----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is an object, or a folder with objects, of that name."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether there is an object of that name."""
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self) -> ObjectStat:
        """Return size and version of the object; FileNotFoundError if there is none."""
        info = self._info()
        if info is None or info["type"] != "file":
            raise FileNotFoundError(2, "No such object", str(self))
        return stat_of(info)

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is in the folder; FileNotFoundError if there is no object below it."""
        found = self._call(lambda fs: fs.ls(self._path, detail=True))
        for info in found:
            if (path := _normal(info["name"])) != self._path:  # some stores have an object for the folder itself
                yield RemotePath(f"{self._scheme}://{path}")

    def walk_files(self) -> dict[str, ObjectStat]:
        """List all objects in the folder and below it, by their path within it, in order, by few requests."""
        found = self._call(lambda fs: fs.find(self._path, detail=True))
        inside = {_normal(path).removeprefix(f"{self._path}/"): stat_of(info) for path, info in found.items()}
        return dict(sorted(inside.items()))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield what is named like a pattern of the shell, of one part, in the folder, in order."""
        yield from sorted(path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def _info(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._call(lambda fs: fs.info(self._path))
        except FileNotFoundError:
            return None
        return found

    # Contents ---------------------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """Read a whole object."""
        data: bytes = self._call(lambda fs: fs.cat_file(self._path))
        return data

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read a whole object as text."""
        return self.read_bytes().decode(encoding)

    def read_range(self, size: int, offset: int) -> bytes:
        """Read a part of an object; fewer bytes at its end."""
        data: bytes = self._call(lambda fs: fs.cat_file(self._path, start=offset, end=offset + size))
        return data

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return the whole object as a file in memory, to be read."""
        if mode != "rb":
            raise io.UnsupportedOperation(f"{self}: mode {mode!r}")
        return io.BytesIO(self.read_bytes())

    def write_bytes(self, data: bytes) -> None:
        """Write an object; it is there as a whole or not at all."""
        self._call(lambda fs: fs.pipe_file(self._path, data))

    def upload(self, file: Path) -> None:
        """Write an object with the content of a file of this machine."""
        self._call(lambda fs: fs.put_file(os.fspath(file), self._path))

    def download(self, file: Path) -> None:
        """Write the content of the object into a file of this machine."""
        self._call(lambda fs: fs.get_file(self._path, os.fspath(file)))

    def unlink(self) -> None:
        """Delete the object, if it is there."""
        try:
            self._call(lambda fs: fs.rm_file(self._path))
        except FileNotFoundError:
            return

    def invalidate(self) -> None:
        """Forget what was listed: another process may have written here."""
        self._call(lambda fs: fs.invalidate_cache())

    def _call(self, request: Callable[[Any], Result]) -> Result:
        """Make a request of the store, again and again where it may help."""
        return with_retries(lambda: request(filesystem(self._scheme)), str(self))


AnyPath: TypeAlias = "Path | RemotePath"


def stat_of(info: dict[str, Any]) -> ObjectStat:
    """Return size and version of an object from what a store lists of it."""
    name, stamp = next(((name, info[name]) for name in _STAMPS if info.get(name) is not None), ("", ""))
    told = f"{name}={stamp.timestamp() if isinstance(stamp, datetime) else stamp}".encode()
    version = int.from_bytes(blake2b(told, digest_size=8).digest(), "little") >> 1
    return ObjectStat(int(info["size"] or 0), version)


def filesystem(scheme: str) -> Any:
    """Return fsspec's file system for a scheme, one for each process.

    Raises:
        DataError: what reaches it is not installed.
    """
    return _filesystem(scheme, os.getpid())


@lru_cache(32)
def _filesystem(scheme: str, _: int) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise DataError(
            f"{scheme}:// cannot be reached: a package is missing.",
            given=str(error),
            expected=f"lockstep-train with the extra [{EXTRAS.get(scheme, scheme)}]",
            hint=f'pip install "lockstep-train[{EXTRAS.get(scheme, scheme)}]"',
        ) from error


def _normal(path: str) -> str:
    """A path without empty parts, and without dots, which no store has."""
    return "/".join(part for part in path.split("/") if part not in ("", "."))
