"""The reader of images in TFRecord files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checks import wrong_type
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.tracing import now_reading
from lockstep.readers.fingerprint import Fingerprint, named_parts
from lockstep.readers.reader import Cost, Int64s
from lockstep.readers.schema import ParsedExample, Schema, check_decoding
from lockstep.records.example import parse_example
from lockstep.records.tfrecord import RecordFiles

_logger = logging.getLogger("lockstep")


class ImageRecords:
    """Images in files of `tf.train.Example` records, with labels, boxes or whatever else a schema finds there.

    Args:
        paths: the files, whose records follow one another: a path, a pattern such as "train-*", or several of these.
        schema: which features become which fields: `ImageNetSchema`, `DetectionSchema`, `MnistSchema` or your own.
        verify: whether checksums of records are looked at.
        decoding: how the images are decoded once they are asked for.

    Raises:
        InputError: `schema` is none; or the images would be turned, and the boxes that it asks for would not.
        DataError: as `RecordFiles`: a file cannot be opened, is cut short, or holds something else than records.
    """

    cost: Cost = "decode"

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        schema: Schema,
        *,
        verify: bool = True,
        decoding: Decoding = AS_STORED,
    ) -> None:
        if isinstance(schema, type) or not (hasattr(schema, "features") and hasattr(schema, "fields")):
            raise wrong_type(
                "schema",
                schema,
                expected="a schema: it has features and fields",
                hint="give one such as ImageNetSchema(boxes=True)",
            )
        check_decoding(schema.features, decoding)
        self._records = RecordFiles(paths, verify=verify)
        self._schema, self._features, self._decoding = schema, schema.features, decoding
        files = [str(file.path) for file in self._records.files]
        others = [f"{len(files) - 1} more"] if len(files) > 1 else []
        # Looked up now: loader processes are forked from this one, and must find the decoder's library loaded.
        self.decoder = decoding.chosen
        """What decodes the images, with its version."""
        _logger.info("Images in %s are decoded by %s", " and ".join(files[:1] + others) or "no files", self.decoder)

    def __len__(self) -> int:
        return len(self._records)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The fields of these examples, as the schema says; images are not decoded unless it does.

        Raises:
            DataError: a record is damaged, is no example, or its features are not those of the schema.
        """
        return self._schema.fields([self._example(index) for index in indices.tolist()])

    def example_id(self, index: int) -> str:
        """Its file, and its number in there."""
        return self._records.example_id(index)

    def fingerprint(self) -> Fingerprint:
        """Of each file the number of records, the size, and the checksum of all records."""
        return named_parts((file.path.name, file.summary) for file in self._records.files)

    def _example(self, index: int) -> ParsedExample:
        source = self._records.place(index)
        now_reading(self.example_id(index))
        features = parse_example(self._records.read(index), source, self._features)
        return ParsedExample(features, source, self._decoding, partial(self._records.read, index))
