"""Towers: the logical copies of the computation over which the global batch is split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.checks import check_one_of
from lockstep.errors import InputError


@dataclass(frozen=True)
class InTurn:
    """One worker runs its towers one after the other, through one module."""


@dataclass(frozen=True)
class Towers:
    """How many towers there are and how each computes: a property of the experiment, not of the machine."""

    count: int = 1
    batch_norm: Literal["mean", "first", "last"] = "mean"
    """Which new batch-norm statistics are committed: the towers' mean, or those of the first or the last tower.

    Integer buffers always come from the first tower.
    """
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes losses under autocast; parameters, gradients and the update keep their own dtype."""
    channels_last: bool = False
    """Keep image tensors and convolution weights in the channels_last memory format."""
    hosting: InTurn = field(default_factory=InTurn)

    def __post_init__(self) -> None:
        check_one_of("batch_norm", self.batch_norm, ("mean", "first", "last"))
        check_one_of("precision", self.precision, ("fp32", "bf16"))
        if self.count < 1:
            raise InputError(
                "There is no tower to train on.",
                given=f"count={self.count}",
                expected="1 tower or more",
                mend="give the number of slices that the batch is split into",
            )

    def check(self, batch_size: int, num_workers: int) -> None:
        """Refuse a batch that cannot be split evenly, and workers that would have no tower.

        Raises:
            InputError: batch_size is not a multiple of the towers, or there are fewer towers than workers.
        """
        if batch_size % self.count:
            below = batch_size - batch_size % self.count
            raise InputError(
                "The batch cannot be split evenly over the towers.",
                given=f"batch_size={batch_size} over {self.count} towers",
                expected=f"a batch size that {self.count} divides",
                mend=f"set batch_size to {f'{below} or ' if below else ''}{below + self.count}, or change the towers",
            )
        if num_workers > self.count:
            raise InputError(
                "Some workers would have no tower to run.",
                given=f"{num_workers} workers, {self.count} towers",
                expected="at least as many towers as workers",
                mend=f"start {self.count} workers or fewer, or split the batch over more towers",
            )
