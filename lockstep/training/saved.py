"""Whether what was saved fits what is there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.listing import shorten


def check_fits(wanted: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse sections that have other tensors than are wanted.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape or dtype.
    """
    problems = [line for name, tensors in wanted.items() for line in _compare(name, tensors, saved.get(name, {}))]
    if problems:
        raise CheckpointError(
            "The checkpoint does not fit this model and optimizer.",
            given=shorten(problems, 10, separator="; "),
            expected="the same names, shapes and dtypes",
            hint="resume with the model, optimizer and average of the run, or train in another workdir",
        )


def _compare(section: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    lines = [f"{section}: {name!r} is missing" for name in own.keys() - saved.keys()]
    lines += [f"{section}: {name!r} is not in the model" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        wanted, found = own[name], saved[name]
        if wanted.shape != found.shape or wanted.dtype != found.dtype:
            lines.append(
                f"{section}: {name!r} is {tuple(found.shape)} {found.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
            )
    return sorted(lines)
