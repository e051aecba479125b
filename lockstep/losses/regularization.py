"""Penalties on the parameters themselves, as values: weight decay in the form of a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from lockstep.checks import Checked, Hint, PositiveFloat
from lockstep.errors import InputError
from lockstep.listing import shorten
from lockstep.losses.weighted import widened
from lockstep.selection import Patterns, selected
from lockstep.tensors import norms_of, norms_on_device, reading_waits
from lockstep.types import NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Regularizer(Checked, ABC):
    """A penalty on parameters chosen by name: one of the losses, and so part of the objective.

    The update binds it to its parameters, and adds it once however many towers there are. A loss function calls it on a
    model: each tower adds it, and the mean over the towers holds it once.
    """

    weight: Annotated[PositiveFloat, Hint("give a weight such as 4e-5, or leave the regularisation out")]
    """Factor of this loss."""
    pattern: Patterns | None = None
    """What is penalised, by name; by default each trained parameter of two or more dimensions: no bias, no scale."""
    name: ClassVar[str]
    """The name of this loss among the losses."""
    order: ClassVar[int]
    """It is weight / order * sum(|w| ** order)."""

    def __call__(self, model: nn.Module) -> Tensor:
        """Compute the penalty on the trained parameters of a model, with its graph; a scalar."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return self.penalty(list(self.chosen(trained).values()))

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundRegularizer:
        """Bind the penalty to these trained parameters."""
        return BoundRegularizer(self, parameters)

    def chosen(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the parameters that the penalty is on, in their order.

        Raises:
            InputError: nothing is chosen, or a pattern matches no parameter.
        """
        kind = type(self).__name__
        if self.pattern is None:
            chosen = {name: parameter for name, parameter in parameters.items() if parameter.ndim >= 2}
        else:
            chosen = {name: parameters[name] for name in selected(kind, self.pattern, parameters)}
        if not chosen:
            raise InputError(
                f"{kind} has no parameter to penalise.",
                given=f"pattern={self.pattern!r}, parameters {shorten([*map(repr, parameters)], 8)}",
                expected="a trained parameter of two or more dimensions, or one that a pattern matches",
                hint=f"name what is meant, as in {kind}({self.weight}, r'weight$'), or leave it out",
            )
        return chosen

    def penalty(self, tensors: Sequence[Tensor]) -> Tensor:
        """Compute the penalty on these tensors; a scalar."""
        return self.weight / self.order * _sum_of_powers(tensors, self.order)

    @abstractmethod
    def slopes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the gradients for these tensors, before the factor `weight`."""


class L2(Regularizer):
    """weight * sum(w ** 2) / 2, whose gradient is weight * w (tf.contrib.layers.l2_regularizer).

    Weight decay as a loss: unlike an optimizer's, it is part of the total, and of the gradients that are clipped.
    """

    name, order = "l2", 2

    def slopes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors themselves."""
        return tensors


class L1(Regularizer):
    """weight * sum(|w|), whose gradient is weight * sign(w) and 0 at 0 (tf.contrib.layers.l1_regularizer)."""

    name, order = "l1", 1

    def slopes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the signs of the tensors."""
        return torch._foreach_sign(list(tensors))


class BoundRegularizer:
    """A penalty with the parameters that it is on."""

    def __init__(self, value: Regularizer, parameters: Mapping[str, Tensor]) -> None:
        chosen = value.chosen(parameters)
        self.name = value.name
        """The name of this loss among the losses."""
        self.parameter_names = tuple(chosen)
        """The names of the parameters."""
        self._value = value
        self._tensors = {i: chosen[name] for i, name in enumerate(parameters) if name in chosen}

    def loss(self) -> float | Tensor:
        """Compute the penalty on the parameters as they are now: a scalar (float64) on a device that is waited for."""
        order, tensors = self._value.order, [tensor.detach() for tensor in self._tensors.values()]
        factor = self._value.weight / order
        with torch.no_grad():
            if reading_waits(tensors[0].device):
                return factor * norms_on_device(tensors, order).pow(order).sum()
            return factor * sum(norm**order for norm in norms_of(tensors, order))

    def add_gradients(self, gradients: Sequence[Tensor | None], *, owned: bool = False) -> list[Tensor | None]:
        """Add the penalty's gradients to those given, in a new list; tensors are changed in place only if owned.

        They are dense, in the order of the parameters. Where one is None, the penalty's own takes its place, as in
        TensorFlow, where the penalty is part of the loss that is differentiated.
        """
        with torch.no_grad():
            added = list(gradients)
            slopes = dict(zip(self._tensors, self._value.slopes(list(self._tensors.values())), strict=True))
            for index in [i for i in slopes if added[i] is None]:
                added[index] = self._value.weight * slopes.pop(index)
            given = [g for i in slopes if (g := added[i]) is not None]
            if not given:  # torch refuses empty lists
                return added
            if owned:
                torch._foreach_add_(given, list(slopes.values()), alpha=self._value.weight)
                return added
            sums = torch._foreach_add(given, list(slopes.values()), alpha=self._value.weight)
            for index, gradient in zip(slopes, sums, strict=True):
                added[index] = gradient
            return added


class Penalties:
    """The penalties of one state, each with its parameters; empty where there are none."""

    def __init__(self, values: Sequence[Regularizer], parameters: Mapping[str, Tensor]) -> None:
        self._each = [value.bind(parameters) for value in values]
        self.parameter_names = [name for each in self._each for name in each.parameter_names]
        """The names of all parameters that one is on."""
        self._parameters = parameters

    def __len__(self) -> int:
        return len(self._each)

    def add_losses(self, losses: Mapping[str, float] | Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        """Add the penalties on the parameters as they are now to the losses, each under its name.

        Raises:
            InputError: a loss has the name of a penalty.
        """
        total: dict[str, float | Tensor] = dict(losses)
        for each in self._each:
            if each.name in losses:
                raise InputError(
                    f"A loss is called {each.name!r}, which is the name of a penalty.",
                    given=f"losses {tuple(losses)}, and regularization",
                    expected="another name",
                    hint="rename the loss, or leave the penalty to one of the two",
                )
            total[each.name] = total.get(each.name, 0.0) + each.loss()
        return total

    def add_gradients(self, gradients: Sequence[Tensor | None], *, owned: bool) -> Sequence[Tensor | None]:
        """Add the gradients of all penalties to those given; see `BoundRegularizer`."""
        for each in self._each:
            gradients = each.add_gradients(gradients, owned=owned)
        return gradients

    def nonfinite_error(self) -> NonFiniteError:
        """Make the error for penalties that are not finite by themselves."""
        penalised = {name: self._parameters[name] for name in self.parameter_names}
        return NonFiniteError(
            "The penalty on the parameters is not finite; nothing was changed.",
            given=", ".join(name for name, p in penalised.items() if not p.isfinite().all())
            or "parameters whose squares overflow",
            expected="finite parameters",
            hint="lower the learning rate; skipping a batch cannot help",
        )


def _sum_of_powers(tensors: Sequence[Tensor], power: int) -> Tensor:
    """Compute sum(|w| ** power) over all tensors, for a power of 1 or 2, in float32 at least."""
    tensors = [widened(tensor) for tensor in tensors]
    return (_by_norms if reading_waits(tensors[0].device) else _by_tensor)(tensors, power)


def _by_tensor(tensors: Sequence[Tensor], power: int) -> Tensor:
    # On a CPU torch's norm adds up one by one: of 4 million float32 numbers it is 1e-4 off, and no faster.
    return torch.stack([(t.square() if power == 2 else t.abs()).sum() for t in tensors]).sum()


def _by_norms(tensors: Sequence[Tensor], power: int) -> Tensor:
    # One call for all tensors: on an accelerator each call has a cost, and its sums are exact enough.
    return torch.stack(torch._foreach_norm(list(tensors), power)).pow(power).sum()
