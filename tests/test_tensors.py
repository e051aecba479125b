"""Lists of tensors: the same results in one call a dtype, and one read for many."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from device_calls import accelerator, counted
from torch import Tensor

from lockstep.tensors import add_all_, all_widened, are_finite, copy_all, map_all, norms_of, quotients, with_strides_of

MIXED = [torch.float32, torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.float32]
anywhere = pytest.mark.parametrize("device", [nullcontext, accelerator], ids=["cpu", "accelerator"])


def drawn(seed: int, dtypes: list[torch.dtype] = MIXED) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 2, (3, index), generator=generator).to(dtype) for index, dtype in enumerate(dtypes)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(map(torch.equal, found, expected))


@anywhere
def test_each_gets_the_value_in_its_place(device: type) -> None:
    dtypes = [*MIXED, torch.uint16, torch.float8_e4m3fn]
    to, values = drawn(1, dtypes), drawn(2, dtypes)
    with device():
        copy_all(to, values)
        copy_all([], [])
    assert_same([t.float() for t in to], [v.float() for v in values])


@anywhere
def test_sums_are_those_of_the_tensors_in_one_place(device: type) -> None:
    tensors, others = drawn(1), drawn(2)
    expected = [a + b for a, b in zip(tensors, others, strict=True)]
    with device():
        assert_same(map_all(torch._foreach_add, tensors, others), expected)
        assert_same(map_all(torch._foreach_add, tensors[:1], others[:1]), expected[:1])
        assert_same(tensors, drawn(1))
        add_all_(tensors, others)
    assert_same(tensors, expected)


def test_quotients_are_those_by_the_number_in_a_launch_or_two() -> None:
    tensors, divisor = drawn(1, [torch.float32] * 50), torch.tensor(3.7, dtype=torch.float64)
    with accelerator(), counted() as calls:
        found = quotients(tensors, divisor)
    assert_same(found, [tensor / 3.7 for tensor in tensors])
    assert {call.what: n for call, n in calls.launches.items()} == {"_to_copy": 1, "_foreach_div": 1}


def test_a_divisor_is_not_rounded_to_the_16_bits_of_a_tensor() -> None:
    """In float16 it would be infinite, and the quotient 0."""
    tensors = [torch.full((3,), 6e4, dtype=torch.float16), torch.ones(2), torch.full((2,), 2.0, dtype=torch.bfloat16)]
    with accelerator():
        found = quotients(tensors, torch.tensor(1e5, dtype=torch.float64))
    assert_same(found, [(tensor.double() / 1e5).to(tensor.dtype) for tensor in tensors])


def test_a_launch_takes_many_tensors_of_one_dtype() -> None:
    dtypes = [torch.float32, torch.int64] * 50
    to, values = drawn(1, dtypes), drawn(2, dtypes)
    with accelerator(), counted() as calls:
        copy_all(to, values)
        add_all_(map_all(torch._foreach_add, to, values), values)
    assert not calls.mixed
    # Lists of 50 tensors; a sum that is new is a third list.
    assert {call.what: n for call, n in calls.launches.items()} == {
        "_foreach_copy_": 2,
        "_foreach_add": 4,
        "_foreach_add_": 2,
    }


@anywhere
def test_tensors_of_16_bits_are_widened_in_their_layout(device: type) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.bfloat16]
    narrow = [tensor.t() for tensor in drawn(1, dtypes)]
    with device():
        wide = all_widened(narrow)
    assert_same(wide, [t.float() if t.itemsize < 4 else t for t in narrow])
    assert [t.stride() for t in wide] == [t.stride() for t in narrow]
    assert wide[1] is narrow[1]


@anywhere
def test_what_is_not_finite_is_found_in_one_read(device: type) -> None:
    tensors = [torch.ones(2), torch.tensor([1.0, math.nan]), torch.zeros(0), torch.tensor(-math.inf), torch.tensor(3)]
    with device(), counted() as calls:
        assert are_finite(tensors) == [True, False, True, False, True]
        assert are_finite([]) == []
    assert are_finite([tensor.to_sparse() for tensor in tensors]) == [True, False, True, False, True]
    assert len(calls.waits) == (1 if device is accelerator else len(tensors))


def test_strides_of_dimensions_of_one_cost_nothing() -> None:
    kernel = torch.rand(8, 4, 1, 1)
    gradient = torch.rand(8, 4, 1, 1).to(memory_format=torch.channels_last)
    assert gradient.stride() != kernel.stride()
    with counted() as calls:
        found = with_strides_of(gradient, kernel)
        assert with_strides_of(kernel, kernel) is kernel
    assert not calls.launches
    assert found.stride() == kernel.stride()
    assert torch.equal(found, gradient)
    assert found.data_ptr() == gradient.data_ptr()


def test_other_strides_are_copied() -> None:
    kernel = torch.rand(8, 4, 3, 1).to(memory_format=torch.channels_last)
    gradient = torch.rand(8, 4, 3, 1)
    found = with_strides_of(gradient, kernel)
    assert found.stride() == kernel.stride()
    assert torch.equal(found, gradient)


# Norms


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
