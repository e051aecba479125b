"""Quantization-aware training: a net computes with the weights and activations that whole numbers can stand for.

As TensorFlow's rewriter has it (tf.contrib.quantize of 1.15, for Jacob et al., 2018). It quantizes the weights of
convolutions and linear layers; their outputs, after a ReLU or ReLU6 where one follows; and sums and products of these.
Ranges are of a tensor as a whole and hold 0. Those of weights, which are without the least of the whole numbers, are
the last ones; those of activations a moving average. Batch norm without a bias before it is folded into the weights:
these are scaled by the moving variance and then quantized, and the output is corrected to the statistics of the batch.

Layers are found by running the net once: what it computes after them is known then, whatever its modules are.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lockstep.errors import InputError
from lockstep.models.layers import FrozenBatchNorm2d
from lockstep.tensors import reading_waits

EMA_DECAY = 0.999
"""Share of the range of an activation that an update keeps."""
NAME = "quantization"
"""What a model that is quantized calls the module of its ranges."""
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_TAG = "_lockstep_layer"
_BATCH_NORM = inspect.signature(F.batch_norm)


class QuantizationParameters(NamedTuple):
    """How a range is divided: the scale of a step, and the whole number that stands for 0; both without dimensions."""

    scale: Tensor
    zero_point: Tensor

    @classmethod
    def of(cls, low: Tensor, high: Tensor, bits: int, *, narrow: bool) -> QuantizationParameters:
        """Divide the range from `low` to `high`, moved so that 0 is on a step; `narrow` is without the least number.

        A range from 0 to 0 has a scale of 0.
        """
        least, most = whole_numbers(bits, narrow=narrow)
        scale = (high - low) / (most - least)
        from_low = (least - low / scale).nan_to_num(least, least, least)
        return cls(scale, (from_low.clamp(least, most) + 0.5).floor().clamp(least, most))


def whole_numbers(bits: int, *, narrow: bool) -> tuple[int, int]:
    """Return the least and the largest of the whole numbers of so many bits; `narrow` is without 0."""
    return int(narrow), 2**bits - 1


class _FakeQuantized(torch.autograd.Function):
    """TensorFlow's kernel: torch's own rounds halves to even, and passes gradients half a step beyond the range."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: Tensor, high: Tensor, bits: int, narrow: bool) -> Tensor:
        scale, zero_point = QuantizationParameters.of(low, high, bits, narrow=narrow)
        least, most = whole_numbers(bits, narrow=narrow)
        first, last = (least - zero_point) * scale, (most - zero_point) * scale
        is_empty = scale == 0
        divisor = torch.where(is_empty, 1.0, scale)
        ctx.save_for_backward((values >= first).logical_and_(values <= last).logical_or_(is_empty))
        inside = values.clamp(first, last).sub_(first).div_(divisor)
        return inside.sub_((0.5 - first / divisor).floor()).add_(0.5).floor_().mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (is_inside,) = ctx.saved_tensors
        return slopes[0] * is_inside, None, None, None, None


def fake_quantized(values: Tensor, low: Tensor, high: Tensor, bits: int = 8, *, narrow: bool = False) -> Tensor:
    """Round values to the steps of a range, as tf.quantization.fake_quant_with_min_max_vars does.

    Args:
        values: of any shape; the gradient passes where they are inside the range.
        low: the least value of the range, without dimensions; neither end gets a gradient.
        high: the largest value.
        bits: of the whole numbers that stand for the values.
        narrow: the range is divided without the least of them.
    """
    made: Tensor = _FakeQuantized.apply(values, low, high, bits, narrow)  # type: ignore[no-untyped-call]
    return made


class Plan(NamedTuple):
    """What a net computes, by layers and their outputs: keys "NAME:CALL", and with a "+" after it a sum of one."""

    layers: tuple[str, ...]
    """The calls of layers, in order."""
    outputs: tuple[str, ...]
    """What is quantized, in order: the outputs of layers, sums and products."""
    activated: frozenset[str]
    """Outputs that a ReLU or ReLU6 follows, behind which they are quantized."""
    normed: frozenset[str]
    """Layers that batch norm is folded into."""


class Quantizer(nn.Module):
    """The ranges of a net's weights and activations, which are buffers, and what quantizes them.

    Args:
        layers: convolutions and linear layers by name.
        plan: what the net computes of them.
        delay: quantizing begins with the update of this number, counted from 1; ranges are taken from the start.
        weight_bits: of the whole numbers that stand for weights.
        activation_bits: of those that stand for activations.
    """

    make_calls: Callable[[Any], Calls] | None = None
    """Makes the context of a forward pass; None: that of a training."""
    steps: Tensor
    """Forward passes in training."""
    weights: Tensor
    """(layers, 2): the last range of each layer's weights."""
    activations: Tensor
    """(outputs, 2): the moving average of the range of each output, from 0; see `ranges`."""

    def __init__(
        self, layers: Mapping[str, nn.Module], plan: Plan, delay: int, weight_bits: int, activation_bits: int
    ) -> None:
        super().__init__()
        self.plan, self._layers = plan, dict(layers)  # a dict, whose modules are not this one's
        self.delay, self.weight_bits, self.activation_bits = delay, weight_bits, activation_bits
        self.rows = {key: row for row, key in enumerate(plan.layers)}
        self.output_rows = {key: row for row, key in enumerate(plan.outputs)}
        self._entered: list[Calls] = []
        # No weights of another net are asked for them: a run that starts from some has ranges of its own.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("weights", torch.zeros(len(plan.layers), 2), persistent=False)
        self.register_buffer("activations", torch.zeros(len(plan.outputs), 2), persistent=False)

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """The layers by name."""
        return self._layers

    def forward(self, values: Any) -> Any:
        """Return what it is given: a model that runs its modules one after the other runs this one last."""
        return values

    def enter(self, *_: Any) -> None:
        """Quantize what the model computes from here on: a hook before its forward pass."""
        self._entered.append((self.make_calls or _Quantizing)(self))
        self._entered[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(self, *_: Any) -> None:
        """Quantize no further: a hook behind its forward pass."""
        self._entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def ranges(self) -> Tensor:
        """Return the ranges of the outputs, (outputs, 2): the averages, which began with 0, without that share."""
        return self.activations / self.weight_of_values()

    def weight_of_values(self) -> Tensor:
        """Return the share of the averages that is of values, and not of the 0 that they began with."""
        # In float32, as TensorFlow does: of the first range it leaves out a part in 20,000.
        return 1 - (1 - torch.tensor(1 - EMA_DECAY, device=self.steps.device)) ** self.steps.float()


class Calls(TorchFunctionMode):
    """A context for one forward pass, in which the functions that a net calls are quantized.

    What a layer has returned is known again by an attribute of the tensor, until another function has changed it.
    """

    def __init__(self, layers: Mapping[str, nn.Module], plan: Plan | None = None) -> None:
        super().__init__()
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._plan, self._seen = plan, Counter[str]()

    @abstractmethod
    def weight(self, key: str, weight: Tensor) -> Tensor:
        """Return what is computed with in place of a weight."""

    @abstractmethod
    def output(self, key: str, values: Tensor) -> Tensor:
        """Return what is handed on in place of an output."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Quantize what a layer, the activation after it, or a sum returns; pass all other calls on to torch."""
        handler = self._HANDLERS.get(getattr(func, "__name__", ""))
        call = _Call(func, tuple(args), kwargs or {})
        return call.made() if handler is None else handler(self, call)

    def is_normed(self, key: str) -> bool:
        """Whether batch norm follows a layer, and is folded into it."""
        return self._plan is not None and key in self._plan.normed

    def is_value(self, tag: _Tag) -> bool:
        """Whether a tensor with this tag is an output, and not what batch norm is still to be folded into."""
        return tag.layer is None

    def _layer(self, call: _Call) -> Any:
        name = self._names.get(id(call.argument(1, "weight")))
        if name is None:
            return call.made()
        key = self._numbered(f"{name}:")
        self._check_known(key)
        if self.is_normed(key) and call.argument(2, "bias") is None:
            return _tagged(self.plain(key, call), _Tag(key, call))
        return self._finished(key, self.computed(key, call))

    def _check_known(self, key: str) -> None:
        """Refuse a layer that was not computed when the layers were found: it has no range."""
        if self._plan is not None and key not in self._plan.layers:
            raise InputError(
                "This network computes other layers than it did on black images, by which they were found.",
                given=f"call {key.rpartition(':')[2]} (from 0) of layer {key.rpartition(':')[0]}",
                expected=f"the calls of {len(self._plan.layers)} layers, each time",
                hint="leave quantization out of the recipe; or have the network compute the same on any images",
            )

    def plain(self, key: str, call: _Call) -> Tensor:
        """Compute a layer as it is, for the batch norm that is folded into it."""
        return cast(Tensor, call.made())

    def computed(self, key: str, call: _Call, factor: Tensor | None = None) -> Tensor:
        """Compute a layer with its quantized weights, each output's times a factor."""
        weight = call.argument(1, "weight")
        if factor is not None:
            weight = weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
        return cast(Tensor, call.with_argument(1, "weight", self.weight(key, weight)).made())

    def _norm(self, call: _Call) -> Any:
        tag = _tag_of(call.argument(0, "input"))
        if tag is None or tag.layer is None:
            return call.made()
        given = _BATCH_NORM.bind(*call.args, **call.kwargs)
        given.apply_defaults()
        return self._finished(tag.key, self.folded(tag.key, tag.layer, given.arguments))

    def folded(self, key: str, layer: _Call, norm: Mapping[str, Any]) -> Tensor:
        """Compute a layer and the batch norm after it in one, as the rewriter folds it."""
        mean, variance, eps = norm["running_mean"], norm["running_var"], norm["eps"]
        scale = torch.ones_like(variance) if norm["weight"] is None else norm["weight"]
        shift = torch.zeros_like(mean) if norm["bias"] is None else norm["bias"]
        of_channels = (-1, *[1] * (norm["input"].dim() - 2))
        moving = (variance + eps).rsqrt()
        if not norm["training"]:
            factor = scale * moving
            frozen: Tensor = self.computed(key, layer, factor) + (shift - mean * factor).reshape(of_channels)
            return frozen
        plain = norm["input"]
        of_batch, batch_mean = torch.var_mean(plain, [0, *range(2, plain.dim())], correction=0)
        of_batch = (of_batch + eps).rsqrt()
        with torch.no_grad():  # the moving statistics, by whichever policy they have
            F.batch_norm(plain.detach(), mean, variance, training=True, momentum=norm["momentum"], eps=eps)
        output = self.computed(key, layer, scale * moving) * (of_batch / moving).reshape(of_channels)
        corrected: Tensor = output + (shift - batch_mean * scale * of_batch).reshape(of_channels)
        return corrected

    def _activation(self, call: _Call) -> Any:
        values = call.argument(0, "input")
        tag, made = _tag_of(values), call.made()
        if tag is None or not self.is_value(tag) or not _is_relu(call):
            return made
        return self.activated(tag, made)

    def activated(self, tag: _Tag, values: Tensor) -> Tensor:
        """Return what is handed on in place of the output of a ReLU."""
        return _tagged(self.output(tag.key, values) if tag.is_open else values, _Tag(tag.key))

    def _sum(self, call: _Call) -> Any:
        operands = [each for each in call.args[:2] if isinstance(each, Tensor)]
        tags = [tag for each in operands if (tag := _tag_of(each)) is not None and self.is_value(tag)]
        made = call.made()
        if not tags or len(operands) < 2:
            return made
        key = self._numbered(f"{tags[0].key}+")
        return made if self._plan is not None and key not in self._plan.outputs else self._finished(key, made)

    def _finished(self, key: str, values: Tensor) -> Tensor:
        """Hand an output on, quantized unless a ReLU follows."""
        if self._plan is not None and key in self._plan.activated:
            return _tagged(values, _Tag(key, is_open=True))
        return _tagged(self.output(key, values), _Tag(key))

    def _passed(self, call: _Call) -> Any:
        """Make a call whose output is the same value in another shape, or the largest of some."""
        values = call.argument(0, "input")
        tag, made = _tag_of(values), call.made()
        if tag is None or not self.is_value(tag) or not isinstance(made, Tensor):
            return made
        return _tagged(made, tag._replace(layer=None))

    def _numbered(self, name: str) -> str:
        self._seen[name] += 1
        return f"{name}{self._seen[name] - 1}"

    _HANDLERS: ClassVar[Mapping[str, Callable[[Any, _Call], Any]]] = {
        **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), _layer),
        "batch_norm": _norm,
        **dict.fromkeys(("relu", "relu_", "relu6", "hardtanh", "hardtanh_"), _activation),
        **dict.fromkeys(("add", "add_", "__add__", "__iadd__", "__radd__"), _sum),
        **dict.fromkeys(("mul", "mul_", "__mul__", "__imul__", "__rmul__"), _sum),
        **dict.fromkeys(("max_pool2d", "flatten", "reshape", "view", "squeeze", "dropout", "contiguous"), _passed),
    }


class _Call(NamedTuple):
    """A call of one of torch's functions."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def made(self) -> Any:
        """Make it."""
        return self.func(*self.args, **self.kwargs)

    def argument(self, place: int, name: str) -> Any:
        """Return an argument, by its place or its name; None where it is not given."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)

    def with_argument(self, place: int, name: str, value: Any) -> _Call:
        """Return the same call with another argument."""
        if len(self.args) > place:
            return self._replace(args=(*self.args[:place], value, *self.args[place + 1 :]))
        return self._replace(kwargs={**self.kwargs, name: value})


class _Tag(NamedTuple):
    """What is known of a tensor."""

    key: str
    layer: _Call | None = None
    """The call that made it, where batch norm is still to be folded into that layer."""
    is_open: bool = False
    """It is quantized behind the activation that follows."""


def _tagged(values: Tensor, tag: _Tag) -> Tensor:
    setattr(values, _TAG, tag)
    return values


def _tag_of(values: Any) -> _Tag | None:
    tag: _Tag | None = getattr(values, _TAG, None)
    return tag


def _is_relu(call: _Call) -> bool:
    if not call.func.__name__.startswith("hardtanh"):
        return True
    return (call.argument(1, "min_val"), call.argument(2, "max_val")) == (0, 6)


class _Recorder(Calls):
    """Finds what a net computes."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(layers)
        self._layers, self._outputs = list[str](), list[str]()
        self._activated, self._normed = set[str](), set[str]()

    def plan(self) -> Plan:
        """Return it."""
        return Plan(tuple(self._layers), tuple(self._outputs), frozenset(self._activated), frozenset(self._normed))

    def is_value(self, tag: _Tag) -> bool:
        """All outputs are: of a layer that batch norm does not follow it is known no earlier."""
        return True

    def is_normed(self, key: str) -> bool:
        """It may be: see `folded`."""
        self._layers.append(key)
        self._outputs.append(key)
        return True

    def folded(self, key: str, layer: _Call, norm: Mapping[str, Any]) -> Tensor:
        """Note it."""
        if norm["running_mean"] is not None:
            self._normed.add(key)
        made: Tensor = F.batch_norm(**norm)
        return made

    def activated(self, tag: _Tag, values: Tensor) -> Tensor:
        """Note it."""
        self._activated.add(tag.key)
        return _tagged(values, _Tag(tag.key))

    def weight(self, key: str, weight: Tensor) -> Tensor:
        """Leave it."""
        return weight

    def output(self, key: str, values: Tensor) -> Tensor:
        """Leave it; sums are noted here."""
        if key not in self._outputs:
            self._outputs.append(key)
        return values


class _Quantizing(Calls):
    """Computes with weights and outputs as whole numbers stand for them; in training it takes their ranges."""

    def __init__(self, quantization: Quantizer) -> None:
        super().__init__(quantization.layers, quantization.plan)
        self._quantization = quantization
        steps = quantization.steps
        self._takes_ranges = quantization.training
        if self._takes_ranges:
            steps += 1
        self._ranges = None if self._takes_ranges else quantization.ranges()
        self._divisor = quantization.weight_of_values()
        first = max(quantization.delay, 1) if self._takes_ranges else 1
        is_active = steps >= first
        self._is_active: bool | Tensor = is_active if reading_waits(steps.device) else bool(is_active)

    def weight(self, key: str, weight: Tensor) -> Tensor:
        """Quantize a weight by its own range, without the least number."""
        of_layer = self._quantization.weights[self._quantization.rows[key]]
        if self._takes_ranges:
            of_layer.copy_(_range_of(weight))
        return self._chosen(weight, of_layer.clone(), self._quantization.weight_bits, narrow=True)

    def output(self, key: str, values: Tensor) -> Tensor:
        """Quantize an output by the moving average of its range."""
        if not values.numel():
            return values
        row = self._quantization.output_rows[key]
        if self._ranges is not None:
            return self._chosen(values, self._ranges[row], self._quantization.activation_bits)
        average = self._quantization.activations[row]
        average.sub_((average - _range_of(values)) * (1 - EMA_DECAY))
        return self._chosen(values, average / self._divisor, self._quantization.activation_bits)

    def _chosen(self, values: Tensor, ends: Tensor, bits: int, *, narrow: bool = False) -> Tensor:
        if self._is_active is False:
            return values
        low, high = ends
        made = fake_quantized(values, low, high, bits, narrow=narrow)
        return made if self._is_active is True else torch.where(self._is_active, made, values)


@torch.no_grad()
def _range_of(values: Tensor) -> Tensor:
    """Return the least and the largest value, and 0 if it is beyond them: shape (2,)."""
    least, most = values.detach().float().aminmax()
    return torch.stack([least.clamp(max=0), most.clamp(min=0)])


def quantize(model: nn.Module, images: Tensor, *, delay: int, weight_bits: int = 8, activation_bits: int = 8) -> None:
    """Have a model train with its weights and activations quantized; it gets a module "quantization" of ranges.

    Args:
        model: on the CPU, in the mode in which all of its layers are computed.
        images: two or more that it takes, by which its layers are found; the model is not changed by them.
        delay: see `Quantizer`.
        weight_bits: from 2 to 8; see there.
        activation_bits: likewise.

    Raises:
        InputError: the model has no convolution and no linear layer, or has something else of that name.
    """
    plan = _recorded(model, images)
    if not plan.layers or hasattr(model, NAME):
        raise InputError(
            "This network cannot be quantized.",
            given=f"a {type(model).__name__} with {len(plan.layers)} layers that it computes",
            expected=f"convolutions or linear layers as modules, and nothing that is called {NAME!r}",
            hint="leave quantization out of the recipe",
        )
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.is_quantized = True
    quantization = Quantizer(_layers_of(model), plan, delay, weight_bits, activation_bits)
    model.add_module(NAME, quantization)
    model.register_forward_pre_hook(quantization.enter)
    model.register_forward_hook(quantization.leave, always_call=True)


def quantizer_of(model: nn.Module) -> Quantizer | None:
    """Return what quantizes a model; None of one in floating point."""
    found = getattr(model, NAME, None)
    return found if isinstance(found, Quantizer) else None


@torch.no_grad()
def _recorded(model: nn.Module, images: Tensor) -> Plan:
    """Run a copy of a model once; random numbers are put back."""
    trial = copy.deepcopy(model)
    recorder = _Recorder(_layers_of(trial))
    with torch.random.fork_rng(devices=[]), recorder:
        trial(images)
    return recorder.plan()


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
