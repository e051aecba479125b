"""Different optimizers for different parameters, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import BoundOptimizer, Optimizer
from lockstep.selection import assigned


@dataclass(frozen=True)
class ByName:
    """Each parameter is updated by the optimizer whose pattern matches its name: exactly one.

    A pattern is a regular expression that is searched for in the name, or the exact name.
    """

    optimizers: Mapping[str, Optimizer]

    def __post_init__(self) -> None:
        mend = 'write ByName({r"bias$": SGD(0.1), r"weight$": SGD(0.01)})'
        check_type("optimizers", self.optimizers, Mapping, expected="optimizers by pattern", mend=mend)
        for pattern, optimizer in self.optimizers.items():
            if isinstance(optimizer, type) or not hasattr(optimizer, "bind"):
                name = f"The optimizer of {pattern!r}"
                raise wrong_type(name, optimizer, expected="an optimizer, a value without parameters", mend=mend)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundByName:
        """The optimizers, each with its parameters.

        Raises:
            InputError: a parameter is matched by none of the patterns or by two, or a pattern matches none.
        """
        optimizer_of = assigned("optimizer", {pattern: pattern for pattern in self.optimizers}, parameters)
        forgotten = [name for name in parameters if name not in optimizer_of]
        if forgotten:
            raise InputError(
                "Some parameters would have no optimizer.",
                given=f"patterns {', '.join(map(repr, self.optimizers))}; not matched: {', '.join(forgotten)}",
                expected="one pattern for each parameter",
                mend="add a pattern for these, or freeze them",
            )
        return BoundByName(
            {
                pattern: (
                    [index for index, name in enumerate(parameters) if optimizer_of[name] == pattern],
                    optimizer.bind({n: p for n, p in parameters.items() if optimizer_of[n] == pattern}),
                )
                for pattern, optimizer in self.optimizers.items()
            }
        )


class BoundByName:
    """Several bound optimizers as one; see `BoundOptimizer` for what each method does."""

    def __init__(self, parts: Mapping[str, tuple[list[int], BoundOptimizer]]) -> None:
        self._parts = parts

    @property
    def kernels(self) -> str:
        """Those of the optimizers, each once."""
        return " and ".join(dict.fromkeys(optimizer.kernels for _, optimizer in self._parts.values()))

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps; says how, a line for each."""
        return [
            f"{pattern}: {line}"
            for pattern, (_, optimizer) in self._parts.items()
            for line in optimizer.resolve(epoch_size, batch_size)
        ]

    def learning_rates(self, step: int) -> dict[str, float]:
        """The rates of the update that follows `step` completed ones, by pattern."""
        return {
            pattern: rate
            for pattern, (_, optimizer) in self._parts.items()
            for rate in optimizer.learning_rates(step).values()
        }

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place."""
        for indices, optimizer in self._parts.values():
            optimizer.update(gradients.subset(indices), step)

    def slots(self) -> dict[str, Tensor]:
        """The tensors to save, by `slot/parameter`."""
        return {name: tensor for _, optimizer in self._parts.values() for name, tensor in optimizer.slots().items()}

    def values(self) -> dict[str, Any]:
        """What else has to be saved, by pattern."""
        return {pattern: optimizer.values() for pattern, (_, optimizer) in self._parts.items()}

    def expects(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What saved slots must be like."""
        return {name: tensor for _, part in self._parts.values() for name, tensor in part.expects(saved).items()}

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over slots that are as expected, and the values saved with them."""
        for pattern, (_, optimizer) in self._parts.items():
            optimizer.load(saved, values.get(pattern, {}))
