"""Replicas: the copies of one state on all workers, which are to have the same bits; a checksum now and then says so.

The workers compute the same update from the same sum, each on its own copy. Where one copy comes to differ, nothing
fails: each worker trains a model of its own, and the chief saves one of them. So every `compare_steps` updates each
worker adds a checksum of its copy, and the square of it, to the numbers that travel with the losses. The checksums are
equal exactly where the number of workers times the sum of the squares is the square of the sum (Cauchy and Schwarz), so
no worker waits for another to know. Where training ends, no attempt follows that could bear them: they are gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.training.state import TrainState
from lockstep.types import FaultError, ReplayVerdict
from lockstep.workers.group import unlike_most
from lockstep.workers.rank import Worker

_BITS = 20  # the sum of the squares of 8,192 workers is below 2 ** 53, and so exact in float64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2 ** 64 over the golden ratio, as a signed number: it spreads each bit
_PARTS = 64  # of a tensor, of which the one is found that differs: four rounds for sixteen million elements
_SECTIONS = {"parameters": "parameter", "buffers": "buffer", "slots": "slot", "average": "average"}


class Replicas:
    """The copies of a state that the workers of a run have; all workers compare them after the same steps."""

    def __init__(self, state: TrainState, worker: Worker) -> None:
        self._state, self._worker = state, worker

    def is_due(self, step: int) -> bool:
        """Whether the copies are compared after so many completed updates."""
        every = self._state.compare_steps
        return every > 0 and step > 0 and step % every == 0

    def checksum(self, step: int) -> Tensor:
        """Sum up this worker's copy in a whole number below 2 ** 20, on its device (int64, without dimensions)."""
        sections = self._state.sections().values()
        return checksum_of(
            [t for tensors in sections for t in tensors.values() if t.device == self._worker.device], step
        )

    def check(self, total: float, total_of_squares: float) -> None:
        """Check that the checksums of all workers are the same, from their sum and that of their squares.

        Raises:
            FaultError: they are not; it names the workers that differ from most, and the first tensor.
        """
        if int(total) ** 2 != self._worker.num_workers * int(total_of_squares):
            raise self.error()

    def compare(self) -> None:
        """Compare all copies as they are now, at the end of a series of steps; all workers call it together.

        Raises:
            FaultError: they differ; as in `check`.
        """
        step = self._state.step
        if not self._state.compare_steps or not step:
            return
        if len({*self._worker.group.gather(int(self.checksum(step)))}) > 1:
            raise self.error()

    def error(self) -> FaultError:
        """Make the error for copies that differ; all workers come here together."""
        group, sections, step = self._worker.group, self._state.sections(), self._state.step
        named = [(f"{_SECTIONS[s]} {name!r}", tensor) for s in sections for name, tensor in sections[s].items()]
        of_all = group.gather([[name, digest(tensor)] for name, tensor in named])
        reference, odd = unlike_most(of_all)
        found = [f"{group.names[rank]}: {_first_difference(of_all[rank], of_all[reference])}" for rank in odd]
        names = ", ".join(group.names[rank] for rank in odd) or "a worker"
        where = self._element(dict(named), of_all, reference, odd[0]) if odd else ""
        suspects = [group.names[rank] for rank in (odd if 2 * len(odd) < len(of_all) else range(len(of_all)))]
        said = (
            f"the copy of {' or '.join(suspects)} is not what the updates have made it"
            if odd
            else "no copy differs now"
        )
        return FaultError(
            f"The workers no longer have the same model: {names} differ{'' if len(odd) > 1 else 's'}.",
            given=f"at step {step}, " + ("; ".join(found) or "and no tensor differs any more"),
            expected=f"the bits of {group.names[reference]} on every worker, after each update",
            hint="look for what changes the model on some workers alone, such as a loop body under `if "
            "worker.is_chief`, and for hosts with other processors, threads or versions; then go on from the last "
            "checkpoint",
            verdict=ReplayVerdict("weights", said + where, tuple(suspects), step),
        )

    def _element(self, named: Mapping[str, Tensor], of_all: Sequence[Any], reference: int, odd: int) -> str:
        """Describe the element of the first tensor that differs, if it is one alone; all workers come here together."""
        pairs = zip(of_all[odd], of_all[reference], strict=False)
        name = next((name for (name, found), (_, wanted) in pairs if found != wanted), None)
        if name is None or len(of_all[odd]) != len(of_all[reference]):
            return ""
        elements, gather = _elements(named[name]), self._worker.group.gather
        first, count = 0, len(elements)
        while count > 1:
            parts = torch.split(elements[first : first + count], -(-count // _PARTS))
            found = gather([digest(part) for part in parts])
            unlike = [i for i, (a, b) in enumerate(zip(found[odd], found[reference], strict=True)) if a != b]
            if len(unlike) != 1:
                return f", in several elements of {name}"
            first, count = first + unlike[0] * len(parts[0]), len(parts[unlike[0]])
        values = gather([[repr(elements[first].item()), int(_integers(elements)[first])]])
        (value, bits), (expected, wanted) = values[odd][0], values[reference][0]
        is_bit = ((bits ^ wanted) & ((1 << 8 * elements.itemsize) - 1)).bit_count() == 1
        names = self._worker.group.names
        return (
            f", in element {first} alone of the {elements.numel()} of {name}: {value} on {names[odd]}, {expected} on "
            f"{names[reference]}{': one bit has flipped' if is_bit else ''}"
        )


def _first_difference(given: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> str:
    """The first tensor whose digest is another one, and how many there are."""
    names = [name for (name, found), (_, wanted) in zip(given, expected, strict=False) if found != wanted]
    if not names:
        return f"{len(given)} tensors instead of {len(expected)}"
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def checksum_of(tensors: Sequence[Tensor], seed: int) -> Tensor:
    """Sum up the bits of tensors of one device, in their order, in a whole number below 2 ** 20.

    It changes with each bit that changes alone. Of other changes it misses about one in a million, and those that leave
    the sums of the tensors as they are: two last bits in opposite directions, an even number of signs, another order of
    the elements. Copies that drift apart do not stay so. It is a scalar (int64) on the device: nobody waits for it.
    """
    sums = torch.stack([bits_of(tensor).long() for tensor in tensors])
    places = torch.arange(seed, seed + len(tensors), device=sums.device)
    mixed = (sums ^ (places * _ODD)) * (2 * places + 1)
    total = mixed.sum() * _ODD
    return (total >> (64 - _BITS)) & ((1 << _BITS) - 1)


def bits_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements, taken as whole numbers of their bits, modulo 2 to the number of bits."""
    integers = _integers(tensor)
    return integers.sum(dtype=integers.dtype)  # in another dtype it would take thirty times as long


def _integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor's elements as whole numbers."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(_INTEGERS[plain.itemsize])


def _elements(tensor: Tensor) -> Tensor:
    """The real numbers in a tensor, in their order, on the CPU; shape (numbers,)."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().cpu().contiguous().flatten()


def digest(tensor: Tensor) -> str:
    """The first 16 hex digits of the SHA-256 of a tensor's elements."""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()[:16]
