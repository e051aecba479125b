"""MNIST in records that somebody else wrote: with raw pixels, or as slim has them, with PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.readers.records import Records
from lockstep.readers.schema import ParsedExample
from lockstep.records.template import Field, Integer, Pixels

SIZE = 28

_FIELDS: dict[str, Field] = {"image": Pixels("image_raw", (1, SIZE, SIZE)), "label": Integer("label")}
_IMAGE, _LABEL = "image/encoded", "image/class/label"


def mnist_records(paths: str | Path | Sequence[str | Path], *, verify: bool = True) -> Records:
    """A reader of records with raw pixels, 784 bytes in `image_raw`, and an integer in `label`; both are required.

    Its batches are {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}.

    Raises:
        DataError: as `Records`.
    """
    return Records(paths, _FIELDS, verify=verify)


@dataclass(frozen=True)
class MnistSchema:
    """A schema of `ImageRecords` for slim's records of MNIST, whose images are grey PNGs of 28 x 28 pixels.

    The images are decoded at once: a batch is {"image": uint8 (batch, 1, 28, 28), "label": int64 (batch,)}, as of the
    records with raw pixels. Both are required: slim takes a record without a label for a zero.
    """

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that are read."""
        return frozenset({_IMAGE, _LABEL})

    def fields(self, examples: Sequence[ParsedExample]) -> dict[str, Any]:
        """The fields of a batch of records.

        Raises:
            DataError: a record has no label, or no grey image of this size.
        """
        labels = torch.tensor([example.integer(_LABEL) for example in examples], dtype=torch.int64)
        return {"image": torch.stack([_pixels_of(example) for example in examples]), "label": labels}


def _pixels_of(example: ParsedExample) -> Tensor:
    """Shape (1, 28, 28)."""
    image = example.image(_IMAGE)
    if image.size != (SIZE, SIZE):
        width, height = image.size
        raise example.unusable(_IMAGE, f"an image of {SIZE} x {SIZE} pixels", given=f"one of {width} x {height}")
    colours = image.decode()
    if not torch.equal(colours, colours[:1].expand_as(colours)):
        raise example.unusable(_IMAGE, "a grey image", given="one in colour")
    return colours[:1]
