"""What follows from making an attempt again: whether a device is bad, or the data, the code, a copy of the weights.

Towers draw from seeded streams, so that an attempt gives the same bits whenever it is made, and on whichever worker. A
device that errs, once or always, does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lockstep.tensors import are_finite
from lockstep.training.replicas import bits_of
from lockstep.workers.group import unlike_most

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.types import Cause


_FINITE = "finite"


class TowerResult(NamedTuple):
    """What some towers have come to, as JSON."""

    values: Sequence[str]
    """Their losses and metrics, in hexadecimal digits."""
    is_finite: bool
    tensors: Sequence[int | None] | None
    """The bits of each gradient and statistic, summed up, None for one that is not finite; None if nobody has looked.
    """

    def agrees_with(self, other: TowerResult) -> bool:
        """Whether both are the same as far as is known of both."""
        is_known = self.tensors is not None and other.tensors is not None
        return self[:2] == other[:2] and (not is_known or self.tensors == other.tensors)

    def outline(self) -> TowerResult:
        """Say no more of each number and tensor than whether it is finite."""
        values = [_FINITE if value.lstrip("-").startswith("0x") else value.lstrip("-") for value in self.values]
        return TowerResult(
            values, self.is_finite, self.tensors and [None if bits is None else 0 for bits in self.tensors]
        )


NO_MEMORY = TowerResult(["no memory"], False, None)
"""What a worker has that lacks the memory to make an attempt again: it says nothing of its device."""


def result_of(values: Sequence[Sequence[float] | Tensor], tensors: Sequence[Tensor]) -> TowerResult:
    """Sum up the losses and metrics of some towers, and the tensors that they add to the update."""
    numbers = [[*map(float, each)] if isinstance(each, list) else each.tolist() for each in values]  # type: ignore[union-attr]
    words = [number.hex() for each in numbers for number in each]
    finite = are_finite(tensors)
    sums = torch.stack([bits_of(tensor).long() for tensor in tensors]).tolist() if tensors else []
    known = [bits if is_finite else None for bits, is_finite in zip(sums, finite, strict=True)]
    return TowerResult(words, all(finite) and not {"nan", "inf", "-inf"} & {*words}, known)


class Judgement(NamedTuple):
    """A cause, the workers whose devices may be bad, by rank, and a sentence about both."""

    cause: Cause
    workers: Sequence[int]
    words: str


def judge(
    original: TowerResult | None,
    suspects: Sequence[int],
    runs: Mapping[int, Sequence[TowerResult]],
    names: Sequence[str],
) -> Judgement:
    """Tell what an attempt is that was made again, and as often on each worker.

    `original` is what it gave the first time; None where that is not known, or was a comparison of the workers. One of
    the suspects has made it then. Suspects, runs and names are by rank.
    """
    unstable = [rank for rank, results in runs.items() if not all(map(results[0].agrees_with, results))]
    if unstable:
        return _of_unstable(unstable, [rank for rank in runs if rank not in unstable], names)
    ranks, first = [*runs], [results[0] for results in runs.values()]
    reference, odd = unlike_most(first)
    if odd:
        is_finite = {rank: result.is_finite for rank, result in zip(ranks, first, strict=True)}
        return _of_odd([ranks[place] for place in odd], is_finite, names)
    if original is not None and not original.agrees_with(first[reference]):
        return _of_one_time(suspects, ranks, names)
    words = f"made again, it gives the same on {_named(ranks, names)}: it is the data or the code"
    alone = ", or a device that errs alike each time, which one worker alone cannot tell" if len(ranks) == 1 else ""
    return Judgement("data", [], words + alone)


def _of_unstable(unstable: Sequence[int], stable: Sequence[int], names: Sequence[str]) -> Judgement:
    """Tell what it is where the same worker does not get the same each time."""
    who = _named(unstable, names)
    words = f"made again several times, it does not always give the same on {who}"
    if len(unstable) > 1:
        return Judgement("nondeterministic", [], f"{words}: an operator is not deterministic")
    if stable:
        return Judgement("device", unstable, f"{words}, but on {_named(stable, names)}: it is the device of {who}")
    words = f"{words}: it is its device, or an operator that is not deterministic"
    return Judgement("unclear", unstable, f"{words}, which one worker alone cannot tell")


def _of_odd(odd: Sequence[int], is_finite: Mapping[int, bool], names: Sequence[str]) -> Judgement:
    """Tell who is wrong where each worker gets the same each time, and not all the same."""
    words = "made again several times, it gives the same each time on each worker"
    if 2 * len(odd) >= len(is_finite):  # no majority
        odd = [rank for rank in is_finite if not is_finite[rank]]
        if not odd or len(odd) == len(is_finite):
            who = _named([*is_finite], names)
            words = f"{words}, and not the same on {who}: it is the device of one of them, and a third would tell which"
            return Judgement("device", [*is_finite], words)
    who = _named(odd, names)
    return Judgement("device", odd, f"{words}, but on {who} not what the others get: it is the device of {who}")


def _of_one_time(suspects: Sequence[int], ranks: Sequence[int], names: Sequence[str]) -> Judgement:
    """Tell of an attempt that never gave again what it gave at first."""
    words = (
        f"made again several times, it always gives the same on {_named(ranks, names)}, and not what it gave at first"
    )
    of_whom = " or ".join(names[rank] for rank in suspects)
    cause = f"a fault of the device of {of_whom} that has passed, or an operator that seldom gives other bits"
    return Judgement("device", suspects, f"{words}: {cause}")


def _named(ranks: Sequence[int], names: Sequence[str]) -> str:
    *others, last = [names[rank] for rank in ranks]
    return f"{', '.join(others)} and {last}" if others else last
