"""Files and folders of an object store by their URL, with the methods of a pathlib.Path that Lockstep uses.

fsspec reaches the store: `s3://` through s3fs, `gs://` through gcsfs, `az://` through adlfs, `hf://` through
huggingface_hub. Credentials come from where the provider's own tools look for them.
"""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from glob import escape
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias, TypeVar

from lockstep.errors import DataError, LockstepError, StoreError, StoreRefusedError
from lockstep.screen import log
from lockstep.storage.retries import NUM_TRIES, has_expired, is_refused, says_forbidden, told, with_retries

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
_SIGNED = re.compile(r"[?&](sig|signature|(x-(amz|goog)-)?(signature|credential|security-token)|token)=", re.IGNORECASE)
"""Queries by which whoever has the URL may read; "?" alone stands in patterns."""
MOST_CONNECTIONS = 32
"""Connections to a store, of each process."""
CONNECT_SECONDS, READ_SECONDS = 10, 30
"""After these a request fails: without a connection, and without a byte."""
_LONG_LISTING_SECONDS = 20.0
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


class Entry(NamedTuple):
    """What is at a path, as a listing has it."""

    is_folder: bool
    stat: ObjectStat


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

    Methods raise OSError as those of pathlib.Path do, once the store has refused often enough. A path that comes from a
    listing knows what that told: whether it is a file, its size and its version then cost no request.

    Raises:
        DataError: no URL of a store that is known.
    """

    __slots__ = ("_listed", "_path", "_scheme")

    def __init__(self, url: str, listed: Entry | None = None) -> None:
        found = _URL.fullmatch(url)
        scheme = found[1].lower() if found else ""
        if not found or scheme not in EXTRAS | dict.fromkeys(_LOCAL_SCHEMES):
            raise DataError(
                f"{told(ValueError(url))} is in no store that is known.",
                given=f"an address that begins with {scheme}:" if found else "no URL",
                expected="a path in the file system, or a URL that begins with s3://, gs://, az:// or hf://",
                hint="mount it, or copy it, and give the path of the folder",
            )
        if re.match(r"[^/@]*:[^/@]*@", found[2]) or _SIGNED.search(found[2]):
            raise DataError(
                f"{scheme}://... holds a password, or is signed.",
                given="a URL with a user and a password, or with a signature",
                expected="the bucket and the path alone: recipes, logs and checkpoints keep the URL",
                hint="give credentials the way the provider's own tools take them, by environment or profile",
            )
        self._scheme, self._path, self._listed = scheme, _normal(found[2]), listed

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[str, Entry | None]]:
        return type(self), (str(self), self._listed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, part: str) -> Self:
        return type(self)(f"{self}/{part}")

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
    def parent(self) -> Self:
        """The folder; a bucket is its own."""
        above = self._path.rpartition("/")[0]
        return type(self)(f"{self._scheme}://{above or self._path}")

    @property
    def scheme(self) -> str:
        """What the URL begins with: "s3"."""
        return self._scheme

    @property
    def key(self) -> str:
        """The path as the store's file system takes it, the bucket first."""
        return self._path

    @property
    def bucket(self) -> Self:
        """The bucket that it is in."""
        return type(self)(f"{self._scheme}://{self._path.partition('/')[0]}")

    def with_name(self, name: str) -> Self:
        """Return the path with another last part."""
        return self.parent / name

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """Return the path within a folder above it; ValueError if it is not."""
        return self._pure.relative_to(folder._pure)

    def is_absolute(self) -> bool:
        """Whether it is whole, as every URL is."""
        return True

    def absolute(self) -> Self:
        """Return the path itself."""
        return self

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self._path)

    # What is there ----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is an object, or a folder with objects, of that name."""
        return self._entry() is not None

    def is_file(self) -> bool:
        """Whether there is an object of that name."""
        entry = self._entry()
        return entry is not None and not entry.is_folder

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        entry = self._entry()
        return entry is not None and entry.is_folder

    def is_symlink(self) -> bool:
        """Whether it is a link, of which a store has none."""
        return False

    def looked_up(self) -> Self:
        """Return the path as it is listed now, if there is something."""
        return type(self)(str(self), self._entry())

    def stat(self) -> ObjectStat:
        """Return size and version of the object; FileNotFoundError if there is none."""
        entry = self._entry()
        if entry is None or entry.is_folder:
            raise FileNotFoundError(2, "No such object", str(self))
        return entry.stat

    def iterdir(self) -> Iterator[Self]:
        """Yield what is in the folder; FileNotFoundError if there is no object below it."""
        found = self._call(lambda fs: fs.ls(self._path, detail=True))
        for info in found:
            if _normal(info["name"]) != self._path:  # some stores have an object for the folder itself
                yield self._of(info)

    def walk_files(self) -> dict[str, ObjectStat]:
        """List all objects in the folder and below it, by their path within it, in order, by few requests."""
        found = self._listing(lambda fs: fs.find(self._path, detail=True))
        inside = {
            path.lstrip("/").removeprefix(f"{self._path}/"): stat_of(info)  # as it is: "a//b" is another than "a/b"
            for path, info in found.items()
            if not path.endswith("/")  # an object that stands for a folder
        }
        return dict(sorted(inside.items()))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield what is named like a pattern of the shell, of one part or several, in the folder, in order."""
        whole = f"{escape(self._path)}/{pattern}"
        found = self._listing(lambda fs: fs.glob(whole, detail=True))
        yield from sorted(self._of(info) for info in found.values())

    def _of(self, info: dict[str, Any]) -> Self:
        """Make the path of what a store has listed."""
        return type(self)(f"{self._scheme}://{info['name']}", _entry_of(info))

    def _entry(self) -> Entry | None:
        """What is there, as the listing said that this path comes from, else as the store says."""
        if self._listed is None:
            try:
                return _entry_of(self._call(lambda fs: fs.info(self._path)))
            except FileNotFoundError:
                return None
        return self._listed

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

    def write_bytes(self, data: bytes, *, before_repeat: Callable[[], None] | None = None) -> None:
        """Write an object; it is there as a whole or not at all. `before_repeat` is as in `with_retries`."""
        self._call(lambda fs: fs.pipe_file(self._path, data), before_repeat)

    def write_new(self, data: bytes) -> bool:
        """Write an object unless there is one of that name; returns whether this call, and no other, has written it.

        Only as far as the store has conditional writes: S3, Google Cloud and Azure have.
        """
        return self._call(lambda fs: _created(fs, self._path, data))

    def changed_unix_seconds(self) -> float:
        """Return when the object was last written, by the clock of the store; FileNotFoundError if there is none."""
        self.invalidate()
        changed: datetime = self._call(lambda fs: fs.modified(self._path))
        return changed.timestamp()

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

    def _listing(self, request: Callable[[Any], Result]) -> Result:
        """List objects, and say so where it takes long: a store tells a thousand names in an answer."""
        said = (
            "%s is listed for %.0f s already, a thousand objects at a time; millions take minutes, at each start. "
            "Wait, or end it (Ctrl-C); name a folder with less in it, or put examples into shards: lockstep convert"
        )
        timer = threading.Timer(_LONG_LISTING_SECONDS, log.warning, (said, self, _LONG_LISTING_SECONDS))
        timer.daemon = True
        timer.start()
        try:
            return self._call(request)
        finally:
            timer.cancel()

    def _call(self, request: Callable[[Any], Result], before_repeat: Callable[[], None] | None = None) -> Result:
        """Make a request of the store, again and again where it may help."""
        return with_retries(
            lambda: _asked(self._scheme, request),
            str(self),
            before_repeat=before_repeat,
            probe=lambda: _asked(self._scheme, lambda fs: fs.exists(self._path)),
        )


class DataPath(RemotePath):
    """A path of data, of which whatever fails is told to people; what is not there is still a FileNotFoundError.

    Raises:
        StoreError: the store does not answer.
        StoreRefusedError: it may not be read.
    """

    __slots__ = ()

    def _call(self, request: Callable[[Any], Result], before_repeat: Callable[[], None] | None = None) -> Result:
        try:
            return super()._call(request, before_repeat)
        except (LockstepError, FileNotFoundError):
            raise
        except Exception as error:
            raise store_error(str(self), error) from error


AnyPath: TypeAlias = "Path | RemotePath"


def store_error(what: str, error: Exception) -> StoreError:
    """Make the error for what cannot be read, a file or a part of one."""
    if is_refused(error) or "Credentials" in type(error).__name__:
        return StoreRefusedError(
            f"{what} may not be read.",
            given=told(error),
            expected="credentials that may list the folder and read what is in it",
            hint="give some the way the provider's own tools take them, by environment, profile or role; of a public "
            "bucket of S3 set FSSPEC_S3_ANON=true",
        )
    return StoreError(
        f"{what} cannot be read.",
        given=told(error),
        expected=f"an answer of the store, the {NUM_TRIES}th time at the latest",
        hint="check the address and the network, and start again: a run goes on from its last checkpoint",
    )


def _asked(scheme: str, request: Callable[[Any], Result]) -> Result:
    """Make a request once; where credentials have expired, the next one reads them anew.

    A refusal is a PermissionError, whatever the store's package makes of it.
    """
    try:
        return request(filesystem(scheme))
    except Exception as error:
        if has_expired(error):
            forget_credentials()
        elif says_forbidden(error):
            raise PermissionError(errno.EACCES, told(error)) from error
        raise


def forget_credentials() -> None:
    """Have the next request read the credentials again, from where the provider's tools look for them."""
    # What was made before a fork is kept: closing it here would close the connections of the parent.
    _made[:] = [(pid, made) for pid, made in _made if pid != os.getpid()]
    _filesystem.cache_clear()


def _entry_of(info: dict[str, Any]) -> Entry:
    return Entry(info["type"] == "directory", stat_of(info))


def _created(fs: Any, path: str, data: bytes) -> bool:
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        # What some stores answer in place of that.
        if error.errno != errno.EINVAL or "precondition" not in str(error).lower():
            raise
        return False
    return True


def stat_of(info: dict[str, Any]) -> ObjectStat:
    """Return size and version of an object from what a store lists of it."""
    name, stamp = next(((name, info[name]) for name in _STAMPS if info.get(name) is not None), ("", ""))
    if name == "etag":
        stamp = str(stamp).strip('"')  # adlfs leaves the quotes in what it tells of one object, and out of a listing
    told = f"{name}={stamp.timestamp() if isinstance(stamp, datetime) else stamp}".encode()
    version = int.from_bytes(blake2b(told, digest_size=8).digest(), "little") >> 1
    return ObjectStat(int(info["size"] or 0), version)


def filesystem(scheme: str) -> Any:
    """Return fsspec's file system for a scheme, one for each process.

    Raises:
        DataError: what reaches it is not installed.
    """
    return _filesystem(scheme, os.getpid())


_made: list[tuple[int, Any]] = []
"""The file systems there are, each with the process that has made it."""


@lru_cache(32)
def _filesystem(scheme: str, pid: int) -> Any:
    import fsspec

    try:
        made = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **_options_of(scheme))
        made.retries = 1
    except ImportError as error:
        raise DataError(
            f"{scheme}:// cannot be reached: a package is missing.",
            given=str(error),
            expected=f"lockstep-train with the extra [{EXTRAS.get(scheme, scheme)}]",
            hint=f'pip install "lockstep-train[{EXTRAS.get(scheme, scheme)}]"',
        ) from error
    _made.append((pid, made))
    return made


def _options_of(scheme: str) -> dict[str, Any]:
    """How the package that reaches a store takes our limits: by itself that of Google waits for ever."""
    if EXTRAS.get(scheme) == "s3":
        config = {
            "max_pool_connections": MOST_CONNECTIONS,
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},  # `with_retries` makes requests again, and says so
        }
        return {"config_kwargs": config}
    if EXTRAS.get(scheme) == "gcs":
        from aiohttp import ClientTimeout

        return {"requests_timeout": ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)}
    return {}


def _normal(path: str) -> str:
    """A path without empty parts, and without dots, which no store has."""
    return "/".join(part for part in path.split("/") if part not in ("", "."))
