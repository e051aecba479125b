from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.norms import norms_of


def exact(tensor: Tensor, order: int) -> float:
    return float(torch.linalg.vector_norm(tensor.double().flatten(), order))


@pytest.mark.parametrize("order", [1, 2])
def test_each_tensor_has_its_norm_and_none_has_zero(order: int) -> None:
    tensors = [torch.randn(5), torch.randn(3, 2).t(), torch.tensor(-2.0), torch.zeros(0)]
    found = norms_of([tensors[0], None, *tensors[1:]], order)
    assert found == pytest.approx([exact(tensors[0], order), 0.0, *(exact(tensor, order) for tensor in tensors[1:])])
    assert norms_of([]) == []
    assert norms_of([None]) == [0.0]


@pytest.mark.parametrize("shape", [(2**18 + 7,), (3, 2**17 + 1), (2, 3, 300, 301)])
def test_a_large_tensor_has_all_its_digits_in_any_layout(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape) + 1
    turned = tensor.movedim(0, -1)
    for each in (tensor, turned):
        assert norms_of([each])[0] == pytest.approx(exact(each, 2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_added_up_in_more(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), 100.0, dtype=dtype)
    assert norms_of([tensor, torch.ones(2)]) == pytest.approx([100 * 1000**0.5, 2**0.5])
