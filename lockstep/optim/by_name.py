"""Different optimizers for different parameters, chosen by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.inline_toml import inline_toml
from lockstep.optim.gradients import Gradients
from lockstep.optim.rules import Optimizer, of_another
from lockstep.selection import pattern_of_each

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ByName:
    """Updates each parameter by the one optimizer whose pattern matches its name.

    A pattern is a regular expression that is searched for in the name, or the exact name.
    """

    optimizers: Mapping[str, Optimizer]

    def __post_init__(self) -> None:
        hint = 'write ByName({r"bias$": SGD(0.1), r"weight$": SGD(0.01)})'
        check_type("optimizers", self.optimizers, Mapping, expected="optimizers by pattern", hint=hint)
        if not self.optimizers:
            raise InputError(
                "There is no optimizer.", given="optimizers={}", expected="one by pattern, or more", hint=hint
            )
        for pattern, optimizer in self.optimizers.items():
            if isinstance(optimizer, type) or not hasattr(optimizer, "bind"):
                name = f"The optimizer of {pattern!r}"
                raise wrong_type(name, optimizer, expected="an optimizer, a value without parameters", hint=hint)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundByName:
        """Bind each optimizer to the parameters that its pattern matches."""
        optimizer_of = pattern_of_each("optimizer", self.optimizers, parameters)
        forgotten = [name for name in parameters if name not in optimizer_of]
        if forgotten:
            raise InputError(
                "Some parameters would have no optimizer.",
                given=f"patterns {', '.join(map(repr, self.optimizers))}; not matched: {', '.join(forgotten)}",
                expected="one pattern for each parameter",
                hint="add a pattern for these, or freeze them",
            )
        return BoundByName(
            [
                _Part(
                    pattern,
                    optimizer,
                    [index for index, name in enumerate(parameters) if optimizer_of[name] == pattern],
                    {name: p for name, p in parameters.items() if optimizer_of[name] == pattern},
                )
                for pattern, optimizer in self.optimizers.items()
            ]
        )


class _Part:
    """One of the optimizers, bound to its parameters; `indices` are their places among all."""

    def __init__(
        self, pattern: str, optimizer: Optimizer, indices: list[int], parameters: Mapping[str, Tensor]
    ) -> None:
        self.pattern = pattern
        self.label = f"optimizer {pattern!r} = {inline_toml(optimizer)}"
        self.indices = indices
        self.names = list(parameters)
        self.bound = optimizer.bind(parameters)


class BoundByName:
    """Several bound optimizers as one; see `BoundOptimizer` for what each method does."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    @property
    def kernels(self) -> str:
        """Name the implementations of all optimizers, each once."""
        return " and ".join(dict.fromkeys(part.bound.kernels for part in self._parts))

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps; return a line about each."""
        patterns_of: dict[str, list[str]] = {}
        for part in self._parts:
            for line in part.bound.resolve(epoch_size, batch_size):
                patterns_of.setdefault(line, []).append(part.pattern)
        alike = [part.pattern for part in self._parts]
        return [line if of == alike else f"{', '.join(of)}: {line}" for line, of in patterns_of.items()]

    def matched(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the pattern of each optimizer, then the patterns of its own."""
        for part in self._parts:
            yield part.label, part.names
            for label, names in part.bound.matched():
                yield f"optimizer {part.pattern!r}: {label}", names

    def check_rows(self, names: Collection[str]) -> None:
        """Refuse sparse gradients of these parameters where their optimizer cannot take them."""
        for part in self._parts:
            part.bound.check_rows(names)

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the rates of the update that follows `step` completed ones, by pattern."""
        return {part.pattern: rate for part in self._parts for rate in part.bound.learning_rates(step).values()}

    @property
    def takes_found_inf(self) -> bool:
        """True if all of the optimizers do."""
        return all(part.bound.takes_found_inf for part in self._parts)

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place."""
        if gradients.rows:
            self.check_rows([gradients.names[index] for index in gradients.rows])
        for part in self._parts:
            part.bound.update(gradients.subset(part.indices), step)

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors to save, by `slot/parameter`."""
        return {name: tensor for part in self._parts for name, tensor in part.bound.slots().items()}

    def values(self) -> dict[str, Any]:
        """Return the values of each optimizer that has some, beside the names of its parameters.

        The pattern is no key: with another spelling of it the values would be lost.
        """
        parts = [
            {"parameters": part.names, "values": values} for part in self._parts if (values := part.bound.values())
        ]
        return {"parts": parts} if parts else {}

    def expects(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the expected slots of all optimizers."""
        return {name: tensor for part in self._parts for name, tensor in part.bound.expects(saved).items()}

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse values that are not those of optimizers with the same parameters."""
        for part, own in zip(self._parts, self._divided(values), strict=True):
            part.bound.check_values(own)

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore slots that are as expected, and values."""
        self.check_values(values)
        for part, own in zip(self._parts, self._divided(values), strict=True):
            part.bound.load(saved, own)

    def _divided(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Split saved values into those of each part."""
        if values and "parts" not in values:
            raise of_another(", ".join(values), "those of optimizers by name")
        saved = {frozenset(entry["parameters"]): entry["values"] for entry in values.get("parts", [])}
        unknown = saved.keys() - {frozenset(part.names) for part in self._parts}
        if unknown:
            raise of_another(
                "; ".join(f"one optimizer of {', '.join(sorted(names))}" for names in unknown),
                "; ".join(f"one of {', '.join(part.names)}" for part in self._parts),
            )
        return [saved.get(frozenset(part.names), {}) for part in self._parts]


def optimizer_of(given: Any) -> Optimizer:
    """Return the optimizer that is given; several by pattern become one."""
    for each in given.values() if isinstance(given, Mapping) else [given]:
        if isinstance(each, type) or not hasattr(each, "bind"):
            raise wrong_type(
                "optimizer",
                each,
                expected="an optimizer of lockstep.optim, a value without parameters",
                hint="write ls.optim.SGD(lr=0.1, momentum=0.9); the state gives it the parameters",
            )
    optimizer: Optimizer = ByName(given) if isinstance(given, Mapping) else given
    return optimizer
