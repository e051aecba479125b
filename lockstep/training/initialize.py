"""Giving the parameters of a model their first values, by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lockstep.checks import NonNegativeInt, check_type, check_value, wrong_type
from lockstep.selection import assigned
from lockstep.weights.initializers import Initializer, fill

_HINT = r'write {r"weight$": Xavier(), r"bias$": Zeros()}'


def initialize(model: nn.Module, initializers: Mapping[str, Initializer], seed: int = 0) -> dict[str, Initializer]:
    """Fill the parameters whose names match; the others stay as they are. To be called before the state is made.

    What a parameter gets depends on the seed and its name alone: it is the same on every worker, on every device, and
    whatever else there is in the model.

    Args:
        model: changed in place.
        initializers: by pattern, a regular expression that is searched for in the name, or the exact name; a parameter
            matches one at most. Functions of one's own, `f(name, tensor, generator)`, fill the tensor or return one.
        seed: of the run.

    Returns:
        What each of the parameters that were filled was filled by.

    Raises:
        InputError: a pattern matches nothing, a parameter matches two, or an initialiser is none or gives what does not
            fit.
    """
    check_type("model", model, nn.Module, expected="a torch.nn.Module", hint="pass the module before its state is made")
    check_type("initializers", initializers, Mapping, expected="initializers by pattern", hint=_HINT)
    check_value("seed", seed, NonNegativeInt)
    for pattern, initializer in initializers.items():
        if isinstance(initializer, type) or not callable(initializer):
            name = f"The initializer of {pattern!r}"
            raise wrong_type(name, initializer, expected="an initializer, or a function of your own", hint=_HINT)
    parameters = dict(model.named_parameters())
    found = assigned("initializers", initializers, parameters)
    for name, initializer in found.items():
        fill(initializer, name, parameters[name], seed)
    return found
