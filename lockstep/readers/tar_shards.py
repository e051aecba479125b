"""Reads WebDataset's shards: tar archives in which the files of one sample follow one another."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch

from lockstep.checks import wrong_type
from lockstep.errors import DataError, InputError
from lockstep.images.decode import AS_STORED, Decoding, EncodedImage
from lockstep.readers.fingerprint import Fingerprint, checksum, named_parts, tells_options
from lockstep.readers.image_files import load_decoder
from lockstep.readers.reader import NO_DECODER, Cost, Int64s
from lockstep.readers.split_folders import ENDINGS
from lockstep.records.index_cache import Cache, ranges_through
from lockstep.records.open_files import FilePart, OpenFiles, read_stored
from lockstep.records.shards import Paths, expand_braces, find_shards, list_of_paths
from lockstep.records.tar_members import BLOCK_BYTES, header_crc, key_and_ending, readable_name, tar_index_of
from lockstep.storage.remote_path import AnyPath, RemotePath
from lockstep.tracing import now_reading

Kind = Literal["image", "label", "json", "text", "bytes"]

_IMAGE_ENDINGS = tuple(ending.removeprefix(".") for ending in ENDINGS)
_KINDS: dict[str, Kind] = {**dict.fromkeys(_IMAGE_ENDINGS, "image"), "cls": "label", "json": "json", "txt": "text"}
_DEFAULT_NAMES = {**dict.fromkeys(_IMAGE_ENDINGS, "image"), "cls": "label"}

_LARGEST_TEXT_BYTES = 1 << 24
_INT64 = range(-(1 << 63), 1 << 63)
_THREADS = 8


@tells_options
class TarShards:
    """The samples of plain tar archives, in any order: each the members that follow one another with one key.

    The key is a member's name up to the first dot after the last slash; its ending is the rest after that dot, in lower
    case. The last part of the ending tells the content:

        jpg, jpeg, png and others of images     an `EncodedImage`
        cls                                     a whole number; the field is int64 of shape (batch,)
        json                                    the value of the JSON
        txt                                     a string
        any other                               bytes

    Every field but that of cls is a list. The headers of an archive are walked once, and its index is kept like that of
    a file of records.

    Args:
        paths: a path, a pattern such as "train-*.tar", a range such as "train-{000000..000999}.tar", or several.
        fields: the endings of each field, by its name; of several, "jpg;png", the first that a sample has counts.
            By default those of the first sample: image endings are "image", cls is "label", others have their own
            name. Members of other endings are not read.
        decoding: how images are decoded when they are asked for.
        cache: the folder where the archives' indices are kept; by default in the user's cache.
    """

    cost: Cost = "decode"

    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, str] | None = None,
        *,
        decoding: Decoding = AS_STORED,
        cache: Cache = None,
    ) -> None:
        chosen = None if fields is None else _chosen_fields(fields)
        files = find_shards([expanded for path in list_of_paths(paths) for expanded in expand_braces(path)])
        self._ranges = ranges_through(cache)
        with ThreadPoolExecutor(_THREADS) as pool:
            self._shards = list(pool.map(partial(_Shard, OpenFiles(ranges=self._ranges), cache), files))
        self._ranges.expect(sum(shard.stored_bytes for shard in self._shards))
        self._starts = [0, *accumulate(map(len, self._shards))]
        self._decoding = decoding
        self._fields = chosen or (_default_fields(self._sample(0)) if len(self) else ())
        has_images = any(field.kind == "image" for field in self._fields)
        self.decoder = load_decoder(decoding) if has_images else NO_DECODER

    def __len__(self) -> int:
        return self._starts[-1]

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the fields of these samples, images not decoded."""
        samples = [self._sample(index) for index in indices.tolist()]
        members = [(sample.shard, sample.member_of(field)) for field in self._fields for sample in samples]
        stored = iter(
            read_stored(self._ranges, [place for shard, member in members for place in shard.stored_places(member)])
        )
        return {field.name: self._column(field, samples, stored) for field in self._fields}

    def example_id(self, index: int) -> str:
        """Return the name of its archive, and its key: "train-000.tar: 0001"."""
        sample = self._sample(index)
        return f"{sample.shard.path.name}: {sample.key}"

    def fingerprint(self) -> Fingerprint:
        """Return the number of samples, size and checksum of all headers, by archive; contents have no checksum."""
        return named_parts((shard.path.name, shard.summary) for shard in self._shards)

    def _sample(self, index: int) -> _Sample:
        number = bisect_right(self._starts, index) - 1
        return self._shards[number].sample(index - self._starts[number])

    def _column(self, field: _Field, samples: Iterable[_Sample], stored: Iterator[bytes]) -> Any:
        values = [self._value(field.kind, sample.shard, sample.member_of(field), stored) for sample in samples]
        return torch.tensor(values, dtype=torch.int64) if field.kind == "label" else values

    def _value(self, kind: Kind, shard: _Shard, member: int, stored: Iterator[bytes]) -> Any:
        source = f"{shard.path}: {readable_name(shard.index.name(member))}"
        now_reading(source)
        size_bytes = int(shard.index.sizes[member])
        if kind in ("label", "json", "text") and size_bytes > _LARGEST_TEXT_BYTES:
            raise _unusable(source, f"{size_bytes} bytes", f"at most {_LARGEST_TEXT_BYTES} bytes")
        data = shard.read(member, stored)
        if kind == "bytes":
            return data
        return EncodedImage(data, source, self._decoding) if kind == "image" else _parsed(kind, data, source)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    endings: tuple[str, ...]
    kind: Kind

    @classmethod
    def of(cls, name: str, endings: Sequence[str]) -> _Field:
        """Make a field of endings that hold the same kind of content."""
        kinds = {_KINDS.get(ending.rpartition(".")[2], "bytes") for ending in endings}
        if len(kinds) > 1:
            raise InputError(
                f"The endings of the field {name!r} hold different things.",
                given=f"{';'.join(endings)}: {', '.join(sorted(kinds))}",
                expected="endings of one kind, such as jpg;png",
                hint="make a field of each",
            )
        return cls(name, tuple(endings), kinds.pop())


class _Shard:
    def __init__(self, open_files: OpenFiles, cache: Cache, path: AnyPath) -> None:
        self.path = path
        self.index = tar_index_of(path, cache)
        self._open_files = open_files

    def __len__(self) -> int:
        return len(self.index.starts) - 1

    @property
    def summary(self) -> str:
        """The number of samples, the size, and the checksum of names and places of the members."""
        index = self.index
        numbers = (index.offsets, index.sizes, index.header_crcs, index.starts)
        return f"{len(self)} samples, {index.version.size_bytes} bytes, {checksum(*numbers, index.names)}"

    @property
    def stored_bytes(self) -> int:
        """The size of an archive in an object store; 0 for one of this machine."""
        return self.index.version.size_bytes if isinstance(self.path, RemotePath) else 0

    def sample(self, number: int) -> _Sample:
        """Return a sample by its number; its members are not read."""
        members = self.index.members(number)
        parts = [key_and_ending(self.index.name(member)) for member in members]
        endings = [readable_name(ending) for _, ending in parts]
        return _Sample(self, readable_name(parts[0][0]), dict(zip(endings, members, strict=True)))

    def stored_places(self, member: int) -> tuple[FilePart, ...]:
        """Return where the header and the content of a member are, in an archive of an object store; else nothing."""
        return self._places(member) if isinstance(self.path, RemotePath) else ()

    def _places(self, member: int) -> tuple[FilePart, FilePart]:
        version, offset = self.index.version, int(self.index.offsets[member])
        header = FilePart(self.path, version, BLOCK_BYTES, offset - BLOCK_BYTES)
        return header, FilePart(self.path, version, int(self.index.sizes[member]), offset)

    def read(self, member: int, stored: Iterator[bytes]) -> bytes:
        """Read the content of a member; `stored` gives what was read of its stored places."""
        index, places = self.index, self._places(member)
        parts = stored if isinstance(self.path, RemotePath) else (self._open_files.read(*place) for place in places)
        # Contents have no checksums in tar. The header tells another archive of the same size and time of change.
        header, offset = next(parts), places[1].offset
        if header_crc(header) != index.header_crcs[member]:
            raise DataError(
                f"{self.path} is another archive than the one that its index was made of.",
                given=f"another header before the content of {readable_name(index.name(member))!r}, at byte {offset}",
                expected="the archive that was there, or another time of change",
                hint="leave archives alone while they are read; if it was replaced before, touch it and start again",
            )
        return next(parts)


class _Sample(NamedTuple):
    shard: _Shard
    key: str
    members: Mapping[str, int]
    """The numbers of its members in the archive, by their endings."""

    def member_of(self, field: _Field) -> int:
        for ending in field.endings:
            if ending in self.members:
                return self.members[ending]
        raise DataError(
            f"The sample {self.key!r} of {self.shard.path} has no {field.name!r}.",
            given=f"members that end in {', '.join(self.members)}",
            expected=f"one that ends in {' or '.join(field.endings)}",
            hint="choose other fields, or pack it anew: files of a sample follow one another (tar --sort=name)",
        )


def _chosen_fields(fields: Mapping[str, str]) -> tuple[_Field, ...]:
    hint = 'write {"image": "jpg;png", "label": "cls"}'
    if not isinstance(fields, Mapping):
        raise wrong_type("fields", fields, expected="the endings of each field, by its name", hint=hint)
    if not fields or not all(isinstance(text, str) and all(text.split(";")) for text in fields.values()):
        raise InputError(
            "The fields of a sample are chosen by the endings of its members.",
            given=f"fields={dict(fields)}",
            expected="one field or more, each with its endings, and a semicolon between these",
            hint=hint,
        )
    return tuple(_Field.of(name, text.lower().split(";")) for name, text in fields.items())


def _default_fields(sample: _Sample) -> tuple[_Field, ...]:
    """Return the fields of the first sample, when none are chosen; images of other samples may have another format."""
    endings: dict[str, str] = {}
    for ending in sample.members:
        name = _DEFAULT_NAMES.get(ending, ending)
        if name in endings:
            raise DataError(
                f"Two members of the sample {sample.key!r} of {sample.shard.path} would be the field {name!r}.",
                given=f"the endings {endings[name]} and {ending}",
                expected="one of them, or each with a name of its own",
                hint=f'choose the fields: fields={{"{name}": "{endings[name]}", ...}}',
            )
        endings[name] = ending
    return tuple(
        _Field.of(name, _IMAGE_ENDINGS if ending in _IMAGE_ENDINGS else [ending]) for name, ending in endings.items()
    )


def _parsed(kind: Kind, data: bytes, source: str) -> Any:
    try:
        if kind == "json":
            return json.loads(data)
        text = data.decode()
        if kind == "text":
            return text
        if "_" in text:  # Python's own way to write a thousand
            raise ValueError(f"the label {text!r:.40}")
        if (label := int(text)) not in _INT64:
            raise ValueError(f"{label} does not fit into 64 bits")
        return label
    except (ValueError, RecursionError) as error:
        expected = {"json": "JSON", "text": "text in UTF-8", "label": "a whole number"}[kind]
        raise _unusable(source, str(error), expected) from error


def _unusable(source: str, given: str, expected: str) -> DataError:
    return DataError(
        f"{source} cannot be used.", given=given, expected=expected, hint="repair it, or choose other fields"
    )
