"""Values in memory are a source like any other: listed without a copy, read as tensors of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.errors import CheckpointError, InputError
from lockstep.weights.source import MemorySource, TensorInfo, WeightSource


def read_only(array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    array.setflags(write=False)
    return array


def test_values_are_listed_with_shape_dtype_and_size() -> None:
    source: WeightSource = MemorySource({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": np.zeros(4)}, "my values")
    assert source.path == Path("my values")
    assert source.kind == "values in memory"
    assert source.tensors == {"a": TensorInfo((2, 3), "bfloat16", 12), "b": TensorInfo((4,), "float64", 32)}


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=np.float32)[::-2],
        np.arange(6, dtype=">i4"),
        read_only(np.arange(6)),
        np.array(3.0),
        np.zeros((0, 2), np.float16),
        np.array([True, False]),
    ],
    ids=["whole", "fortran", "reversed", "big-endian", "read-only", "scalar", "empty", "bool"],
)
def test_arrays_of_every_kind_are_read(value: np.ndarray) -> None:  # type: ignore[type-arg]
    source = MemorySource({"a": value})
    tensor = source.read("a")
    info = source.tensors["a"]
    assert (tuple(tensor.shape), str(tensor.dtype), tensor.nbytes) == (
        info.shape,
        f"torch.{info.dtype}",
        info.num_bytes,
    )
    assert tensor.is_contiguous()
    assert np.array_equal(tensor.numpy(), value)


def test_tensors_are_read_as_they_are_then_and_belong_to_the_reader() -> None:
    value = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).t()
    tensor = MemorySource({"a": value}).read("a")
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    assert torch.equal(tensor, value)
    tensor.zero_()
    assert value.sum() == 15


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError) as refusal:
        MemorySource({"a": torch.zeros(1)}).read("b")
    assert str(refusal.value) == (
        "There is no tensor 'b' in memory.\n"
        "  given:    'b'\n"
        "  expected: one of 'a'\n"
        "  hint:     ask for a name that is listed"
    )


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (np.array(["text"]), "dtype <U4"),
        (np.array([None]), "dtype object"),
        (torch.zeros(2, device="meta"), "torch.strided, on meta, torch.float32"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo, on cpu, torch.float32"),
    ],
    ids=["text", "objects", "meta", "sparse"],
)
def test_values_that_are_no_numbers_in_memory_are_refused(value: object, given: str) -> None:
    with pytest.raises(InputError) as refusal:
        MemorySource({"a": value})  # type: ignore[dict-item]
    assert refusal.value.what == "values['a'] cannot be loaded."
    assert refusal.value.given == given


@pytest.mark.parametrize("values", [[1], {"a": [1.0]}, {1: np.zeros(1)}])
def test_values_are_tensors_and_arrays_by_name(values: object) -> None:
    with pytest.raises(InputError, match="of the wrong type"):
        MemorySource(values)  # type: ignore[arg-type]
