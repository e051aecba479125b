"""Different optimizers, or rates, for different parameters, chosen by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.checks import Checked, Hint, Range, check_type, wrong_type
from lockstep.errors import InputError
from lockstep.inline_toml import inline_toml
from lockstep.optim.gradients import Gradients
from lockstep.optim.rules import Optimizer, of_another
from lockstep.optim.schedules import Scaled
from lockstep.selection import assigned, pattern_of_each

if TYPE_CHECKING:
    from torch import Tensor


_REST = "rest"


@dataclass(frozen=True)
class ByName:
    """Updates each parameter by the one optimizer whose pattern matches its name, or else by the rest.

    A pattern is a regular expression that is searched for in the name, or the exact name.
    """

    optimizers: Mapping[str, Optimizer]
    """Optimizers by the pattern of the names of their parameters."""
    rest: Optimizer | None = None
    """Updates the parameters that no pattern matches; None: each has to match one."""

    def __post_init__(self) -> None:
        hint = 'write ByName({r"bias$": SGD(0.1), r"weight$": SGD(0.01)})'
        check_type("optimizers", self.optimizers, Mapping, expected="optimizers by pattern", hint=hint)
        if not self.optimizers:
            raise InputError(
                "There is no optimizer.", given="optimizers={}", expected="one by pattern, or more", hint=hint
            )
        if self.rest is not None and _REST in self.optimizers:
            raise InputError(
                f"{_REST!r} is the name of the optimizer of the rest, and a pattern beside it.",
                given=f"patterns {', '.join(map(repr, self.optimizers))}, and rest",
                expected="patterns of other words",
                hint="write the pattern as 're[s]t'",
            )
        given = {f"The optimizer of {pattern!r}": optimizer for pattern, optimizer in self.optimizers.items()}
        for name, optimizer in given.items() if self.rest is None else {**given, _REST: self.rest}.items():
            if isinstance(optimizer, type) or not hasattr(optimizer, "bind"):
                raise wrong_type(name, optimizer, expected="an optimizer, a value without parameters", hint=hint)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundByName:
        """Bind each optimizer to the parameters that its pattern matches, and the rest to those that are left.

        Raises:
            InputError: no optimizer is left for a parameter, or no parameter for the rest.
        """
        optimizer_of = pattern_of_each("optimizer", self.optimizers, parameters)
        left = [name for name in parameters if name not in optimizer_of]
        if bool(left) == (self.rest is None):
            raise self._unfit(left)
        names_of = {pattern: [n for n in parameters if optimizer_of.get(n) == pattern] for pattern in self.optimizers}
        parts = [_Part(each, self.optimizers[each], names, parameters) for each, names in names_of.items()]
        return BoundByName(parts if self.rest is None else [*parts, _Part(_REST, self.rest, left, parameters)])

    def _unfit(self, left: Sequence[str]) -> InputError:
        patterns = f"patterns {', '.join(map(repr, self.optimizers))}"
        if left:
            return InputError(
                "Some parameters would have no optimizer.",
                given=f"{patterns}; not matched: {', '.join(left)}",
                expected="one pattern for each parameter",
                hint="add a pattern for these, give the optimizer of the rest, or freeze them",
            )
        return InputError(
            "The optimizer of the rest would update nothing.",
            given=f"{patterns}, which match every parameter, and rest={inline_toml(self.rest)}",
            expected="parameters that no pattern matches, or no rest",
            hint="leave rest out, or make a pattern narrower",
        )


@dataclass(frozen=True)
class LayerDecay(Checked):
    """One optimizer for all layers, with a rate for each: `decay` times that of the layer above, `lr` for the last.

    So the first layers, which are general, change least where a model is fine-tuned (Howard and Ruder: Universal
    Language Model Fine-tuning for Text Classification, 2018; with the rates of BEiT, MAE and timm). `layers` says what
    a layer is.
    """

    optimizer: Optimizer
    """With a learning rate `lr`."""
    decay: Annotated[float, Range(gt=0, le=1), Hint("give a factor such as 0.75; 1 is the same rate for all")] = 0.75
    """Factor from the rate of a layer to that of the one below."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.optimizer
        if isinstance(given, type) or not (is_dataclass(given) and hasattr(given, "lr")):
            hint = "write LayerDecay(AdamW(1e-3), decay=0.75)"
            raise wrong_type("optimizer", given, expected="an optimizer with a learning rate lr", hint=hint)

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundByName:
        """Bind the optimizer to the parameters of each layer, the last one first."""
        if isinstance(decays := getattr(self.optimizer, "weight_decay", 0.0), Mapping):
            decays = assigned("weight_decay", decays, parameters)
        last_first = [*layers(parameters).items()][::-1]
        return BoundByName(
            [
                _Part(layer, self._of(names, below, decays), names, parameters)
                for below, (layer, names) in enumerate(last_first)
            ]
        )

    def _of(self, names: Sequence[str], below: int, decays: float | Mapping[str, float]) -> Optimizer:
        """Return the optimizer of a layer that is so many below the last; it knows no other layer's parameters."""
        given: Any = self.optimizer
        rate, factor = given.lr, self.decay**below
        changed: dict[str, Any] = {"lr": Scaled(rate, factor) if callable(rate) else rate * factor}
        if isinstance(decays, Mapping):
            changed["weight_decay"] = {name: decays[name] for name in names if name in decays} or 0.0
        optimizer: Optimizer = replace(given, **changed)
        return optimizer


_BLOCK = re.compile(r"(?:(?!branch|head\.)[^.]+\.)*?(?:[^.]*(?:layer|block)_)?[0-9]+(?=\.)")
"""The start of a parameter's name up to its first numbered part: "blocks.3" of "blocks.3.attn.qkv.weight"."""


def layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of a model's parameters, in the model's order, by layer.

    A numbered block, such as "blocks.3" or "encoder_layer_3", is a layer, unless it is a part of a branch or a head.
    All that comes before the first block is one, and all that comes after the last; what stands between two blocks
    belongs to the first of them. In a model without numbered blocks, each child of the model is a layer. Layers without
    a trained parameter do not count.
    """
    names = list(names)
    blocks = [match[0] if (match := _BLOCK.match(name)) else None for name in names]
    num_before_the_end = max((place + 1 for place, block in enumerate(blocks) if block), default=0)
    found: dict[str, list[str]] = {}
    layer = "before the blocks"
    for place, (name, block) in enumerate(zip(names, blocks, strict=True)):
        layer = block or (layer if place < num_before_the_end else "after the blocks")
        found.setdefault(layer if num_before_the_end else name.partition(".")[0], []).append(name)
    return found


class _Part:
    """One of the optimizers, bound to its parameters: those of a pattern, or what else they are called in messages."""

    def __init__(
        self, pattern: str, optimizer: Optimizer, names: Sequence[str], parameters: Mapping[str, Tensor]
    ) -> None:
        self.pattern, self.names = pattern, list(names)
        self.label = f"optimizer {pattern!r} = {inline_toml(optimizer)}"
        places = {name: place for place, name in enumerate(parameters)}
        self.indices = [places[name] for name in names]
        self.bound = optimizer.bind({name: parameters[name] for name in names})


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
        return {
            f"{part.pattern}: {inner}" if inner else part.pattern: rate
            for part in self._parts
            for inner, rate in part.bound.learning_rates(step).items()
        }

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
