"""First values of parameters, as values: TensorFlow's initialisers, in law and not in bits, on torch's layouts.

An initialiser is called with the name of a parameter, a tensor and a generator, and fills the tensor, or returns
another one of its shape; a function of the user's own does the same. `fill` seeds the generator by the seed and the
name alone: neither the other parameters, nor their order, nor the number of workers show in what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor, nn

from lockstep.checks import (
    Checked,
    FiniteFloat,
    Hint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    check_type,
    check_value,
    wrong_type,
)
from lockstep.errors import InputError
from lockstep.randomness import key_of, mix
from lockstep.selection import assigned

Initializer = Callable[[str, Tensor, Generator], Tensor | None]
"""`initializer(name, tensor, generator)` fills the tensor, or returns one of the same shape."""
Mode = Literal["fan_in", "fan_out", "fan_avg"]
Distribution = Literal["truncated_normal", "untruncated_normal", "uniform"]

# The standard deviation of a standard normal distribution that is cut at two of them.
_STDDEV_OF_CUT = 0.87962566103423978


@dataclass(frozen=True)
class Full(Checked):
    """The same value everywhere."""

    value: FiniteFloat

    def __call__(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a tensor."""
        tensor.fill_(self.value)


@dataclass(frozen=True)
class Zeros:
    """Zero everywhere: TF-Slim's first biases."""

    def __call__(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a tensor."""
        tensor.zero_()


@dataclass(frozen=True)
class TruncatedNormal(Checked):
    """A normal distribution without what is more than two standard deviations from the mean: that is drawn anew.

    As `tf.truncated_normal_initializer`. The values have 0.88 times the standard deviation that is given.
    """

    stddev: NonNegativeFloat
    """Standard deviation of the distribution before it is cut."""
    mean: FiniteFloat = 0.0

    def __call__(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a tensor."""
        _draw(tensor, "truncated_normal", self.stddev, generator)
        tensor.add_(self.mean)


@dataclass(frozen=True)
class VarianceScaling(Checked):
    """Values whose variance is `scale / n`, with n the inputs or outputs of a unit, or the mean of the two.

    As `tf.variance_scaling_initializer` (TensorFlow, init_ops.py). He's initialiser is `VarianceScaling(2.0)`, Glorot's
    is `Xavier()`. See `fans` for what n is.
    """

    scale: Annotated[PositiveFloat, Hint("write VarianceScaling(2.0) for layers with ReLU")] = 1.0
    mode: Mode = "fan_in"
    distribution: Distribution = "truncated_normal"
    """A normal distribution cut at two standard deviations, and widened so that the variance is right; a whole one; or
    a uniform one."""

    def __call__(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a tensor."""
        fan_in, fan_out = fans(tensor.shape)
        num = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        stddev = math.sqrt(self.scale / max(1.0, num))
        before_cut = stddev / _STDDEV_OF_CUT if self.distribution == "truncated_normal" else stddev
        _draw(tensor, self.distribution, before_cut, generator)


@dataclass(frozen=True)
class Xavier(Checked):
    """TF-Slim's first weights of convolutions and fully connected layers: Glorot and Bengio, 2010.

    Uniform within sqrt(6 / (fan_in + fan_out)); or normal, cut at two standard deviations. The normal one is widened by
    the 1.3 of `xavier_initializer`, so that the variance is 0.6 % more than 2 / (fan_in + fan_out).
    """

    uniform: bool = True

    def __call__(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a tensor."""
        variance = 2 / max(1, sum(fans(tensor.shape)))
        if self.uniform:
            _draw(tensor, "uniform", math.sqrt(variance), generator)
        else:
            _draw(tensor, "truncated_normal", math.sqrt(1.3 * variance), generator)


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """The inputs and outputs of a unit, by the shape of the weights: (outputs, inputs, kernel ...), as torch has them.

    As TensorFlow counts them on its own layouts. A convolution in groups counts the inputs of one group; a depthwise
    one thus has one, where TensorFlow, with its channels elsewhere, counts all. A vector counts its length twice.
    """
    if len(shape) < 2:
        length = math.prod(shape)
        return length, length
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def fill(initializer: Initializer, name: str, tensor: Tensor, seed: int) -> None:
    """Give a parameter its first values: the same for a seed and a name on every device, in every memory format.

    The initialiser, a value of this module or a function of one's own, gets a tensor of its own on the CPU, in 32 bits
    at least, with the values as they are.
    """
    if tensor.is_meta or not tensor.is_floating_point():
        raise InputError(
            f"The parameter {name!r} cannot be initialised.",
            given=f"{tensor.dtype}, on {tensor.device}",
            expected="a floating-point tensor with data",
            hint='have the memory first, with model.to_empty(device="cpu"); or leave it out',
        )
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    generator = Generator().manual_seed(mix(seed, key_of(name)))
    with torch.no_grad():
        own = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        returned = initializer(name, own, generator)
        tensor.copy_(own if returned is None else _fitting(name, tensor, returned))


def _fitting(name: str, tensor: Tensor, returned: object) -> Tensor:
    hint = "fill the tensor in place and return None, or return a tensor of its shape"
    if not isinstance(returned, Tensor):
        raise wrong_type(f"What the initializer of {name!r} returns", returned, expected="a tensor, or None", hint=hint)
    if returned.shape != tensor.shape:
        raise InputError(
            f"The initializer of {name!r} returns a tensor that does not fit.",
            given=f"shape {tuple(returned.shape)}",
            expected=f"shape {tuple(tensor.shape)}",
            hint=hint,
        )
    return returned


def _draw(tensor: Tensor, distribution: Distribution, stddev: float, generator: Generator) -> None:
    """Mean 0, and this standard deviation: of a cut distribution, that of the whole one."""
    if distribution == "uniform":
        limit = math.sqrt(3) * stddev
        tensor.uniform_(-limit, limit, generator=generator)
    elif distribution == "untruncated_normal":
        tensor.normal_(0.0, stddev, generator=generator)
    else:
        nn.init.trunc_normal_(tensor, a=-2.0, b=2.0, generator=generator).mul_(stddev)


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
