"""A network that was trained for 8 bits, as its exported graph computes it: weights and outputs are whole numbers.

Weights are kept as int8. An output is divided into steps, rounded to uint8, and multiplied again: in ONNX that is a
pair of QuantizeLinear and DequantizeLinear, which runtimes join with the layers to kernels for whole numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.models.quantization import Calls, QuantizationParameters, Quantizer, fake_quantized, quantizer_of

_BITS = 8
_TO_INT8 = 128  # less of it, whole numbers from 0 to 255 are those of int8


@torch.no_grad()
def integer_network(model: nn.Module, images: Tensor, *, for_onnx: bool) -> nn.Module:
    """Return a copy of a quantized model, in evaluation mode, with int8 weights, to be traced.

    Args:
        model: after an update or more, in evaluation mode.
        images: that it takes.
        for_onnx: with ONNX's operators in place of torch's.

    Raises:
        InputError: it has no ranges yet, or other whole numbers than those of 8 bits.
    """
    model = copy.deepcopy(model)
    quantizer = quantizer_of(model)
    assert quantizer is not None, "asked before"
    bits = (quantizer.weight_bits, quantizer.activation_bits)
    if bits != (_BITS, _BITS) or not quantizer.steps:
        raise InputError(
            "This network cannot be exported as one of whole numbers.",
            given=f"weights of {bits[0]} bits, activations of {bits[1]}, ranges of {int(quantizer.steps)} updates",
            expected="8 bits each, and an update or more",
            hint="train with quantization.weight_bits=8 and activation_bits=8; or export the tensors, as .safetensors",
        )
    weights: dict[str, Tensor] = {}
    quantizer.make_calls = partial(_Folded, weights=weights)
    model(images)
    _take_integers(quantizer, weights)
    quantizer.make_calls = partial(_OfWholeNumbers, for_onnx=for_onnx)
    return model


def _take_integers(quantizer: Quantizer, weights: Mapping[str, Tensor]) -> None:
    """Give layers int8 weights, one for each of their calls, and the quantizer scales and zero points as buffers."""
    of_layers: dict[str, list[Tensor]] = {name: [] for name in quantizer.layers}
    for key, row in quantizer.rows.items():
        low, high = quantizer.weights[row]
        parameters = QuantizationParameters.of(low, high, _BITS, narrow=True)
        divisor = torch.where(parameters.scale == 0, 1.0, parameters.scale)
        steps = (fake_quantized(weights[key], low, high, _BITS, narrow=True) / divisor).round()
        of_layers[key.rpartition(":")[0]].append((steps + parameters.zero_point - _TO_INT8).to(torch.int8))
        quantizer.register_buffer(f"weight_scale_{row}", parameters.scale)
        quantizer.register_buffer(f"weight_zero_point_{row}", (parameters.zero_point - _TO_INT8).to(torch.int8))
    for row, (low, high) in enumerate(quantizer.ranges()):
        parameters = QuantizationParameters.of(low, high, _BITS, narrow=False)
        quantizer.register_buffer(f"scale_{row}", parameters.scale.clamp(min=torch.finfo(torch.float32).tiny))
        quantizer.register_buffer(f"zero_point_{row}", parameters.zero_point.to(torch.uint8))
    for name, each in of_layers.items():
        layer: Any = quantizer.layers[name]
        if each:
            del layer.weight
            layer.register_buffer("weight", torch.stack(each))


class _Folded(Calls):
    """Notes the weights that a network computes with, batch norm folded into them."""

    def __init__(self, quantizer: Quantizer, *, weights: dict[str, Tensor]) -> None:
        super().__init__(quantizer.layers, quantizer.plan)
        self._weights = weights

    def weight(self, key: str, weight: Tensor) -> Tensor:
        """Note it."""
        self._weights[key] = weight
        return weight

    def output(self, key: str, values: Tensor) -> Tensor:
        """Leave it."""
        return values


class _OfWholeNumbers(Calls):
    """Computes with int8 weights, and outputs that were uint8, as a graph has them."""

    def __init__(self, quantizer: Quantizer, *, for_onnx: bool) -> None:
        super().__init__(quantizer.layers, quantizer.plan)
        self._quantizer, self._for_onnx = quantizer, for_onnx

    def plain(self, key: str, call: Any) -> Tensor:
        """Compute a layer for its shape alone, which batch norm is still to be folded into."""
        return self.computed(key, call)

    def computed(self, key: str, call: Any, factor: Tensor | None = None) -> Tensor:
        """Compute a layer; the factor is in its weights."""
        made: Tensor = call.with_argument(1, "weight", self.weight(key, call.argument(1, "weight"))).made()
        return made

    def weight(self, key: str, weight: Tensor) -> Tensor:
        """Multiply int8 by the scale."""
        row = self._quantizer.rows[key]
        integers = weight[int(key.rpartition(":")[2])]
        return self._dequantized(integers, f"weight_scale_{row}", f"weight_zero_point_{row}")

    def output(self, key: str, values: Tensor) -> Tensor:
        """Round values to uint8, and multiply these by the scale."""
        row = self._quantizer.output_rows[key]
        scale, zero_point = self._quantizer.get_buffer(f"scale_{row}"), self._quantizer.get_buffer(f"zero_point_{row}")
        if self._for_onnx:
            integers: Tensor = torch.onnx.ops.symbolic(
                "QuantizeLinear", (values, scale, zero_point), dtype=torch.uint8, shape=values.shape
            )
        else:
            steps = (values / scale + 0.5).floor() + zero_point
            integers = steps.clamp(0, 2**_BITS - 1).to(torch.uint8)
        return self._dequantized(integers, f"scale_{row}", f"zero_point_{row}")

    def _dequantized(self, integers: Tensor, scale_name: str, zero_point_name: str) -> Tensor:
        scale, zero_point = self._quantizer.get_buffer(scale_name), self._quantizer.get_buffer(zero_point_name)
        if self._for_onnx:
            made: Tensor = torch.onnx.ops.symbolic(
                "DequantizeLinear", (integers, scale, zero_point), dtype=torch.float32, shape=integers.shape
            )
            return made
        return (integers.float() - zero_point.float()) * scale
