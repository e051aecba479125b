"""The counting of waits and launches itself: what each call of torch costs an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_calls import QUEUED, accelerator, counted, foreach_launches
from torch import Tensor

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.readers.reader import Arrays
from lockstep.tensors import reading_waits

X = torch.randn(4, 4)
P = torch.nn.Parameter(torch.randn(4, 4))


def busy() -> None:
    for _ in range(QUEUED):
        X.add(1)


def slot_read(between: Callable[[], None]) -> None:
    slot = torch.empty(4, pin_memory=True)
    slot.copy_(X[0], non_blocking=True)
    between()
    slot.tolist()


WAITS: dict[str, Callable[[], Any]] = {
    "tolist": X.tolist,
    "item": X[0, 0].item,
    "bool": lambda: bool(X[0, 0] > 0),
    "float": lambda: float(X[0, 0]),
    "cpu": X.cpu,
    "to cpu": lambda: X.to("cpu"),
    "tensor of numbers": lambda: torch.tensor([1.0], device=X.device),
    "as_tensor of numbers": lambda: torch.as_tensor([1.0], device=X.device),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "pageable copy": lambda: torch.zeros(4).to(X.device),
    "pageable copy, non_blocking": lambda: torch.zeros(4).to(X.device, non_blocking=True),
    "pinned copy, blocking": lambda: torch.zeros(4).pin_memory().to(X.device),
    "copy_ from the host": lambda: X[0].copy_(torch.zeros(4)),
    "mask": lambda: X[X > 0],
    "nonzero": X.nonzero,
    "unique": X.unique,
    "equal": lambda: X.equal(X),
    "backward of prod": lambda: torch.autograd.grad(P.prod(0).sum(), P),
    "indices of the host": lambda: X[[0, 1]],
    "a slot read at once": lambda: slot_read(lambda: None),
    "a pageable slot": lambda: torch.empty(4).copy_(X[0], non_blocking=True),
}
NO_WAITS: dict[str, Callable[[], Any]] = {
    "full": lambda: torch.full((), 2.0, device=X.device),
    "arithmetic": lambda: (X + 1).where(X > 0, 0.0),
    "a number of the host": lambda: X * torch.tensor(2.0),
    "mask filled": lambda: X.clone().__setitem__(X > 0, 1.0),
    "pinned copy": lambda: torch.zeros(4).pin_memory().to(X.device, non_blocking=True),
    "host alone": lambda: (torch.tensor([1.0, 2.0]) + 1).tolist(),
    "a slot read late": lambda: slot_read(busy),
    "a late copy": lambda: (X.to("cpu", non_blocking=True), busy())[0].tolist(),
    "backward": lambda: torch.autograd.grad((X @ P).sum(), P),
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)
def test_each_of_these_waits_once_and_is_named_by_its_line(call: Callable[[], Any]) -> None:
    with counted() as calls:
        call()
    assert len(calls.waits) == 1
    assert calls.waits[0].line.startswith("test_device_calls.py:")


@pytest.mark.parametrize("call", NO_WAITS.values(), ids=NO_WAITS)
def test_none_of_these_waits(call: Callable[[], Any]) -> None:
    with counted() as calls:
        call()
    assert not calls.waits


def test_tensors_of_both_sides_are_refused() -> None:
    with counted(), pytest.raises(AssertionError, match="stack takes tensors of the host and of the device"):
        torch.stack([X[0, 0], torch.tensor(1.0)])


def test_launches_are_counted_by_operation_and_line() -> None:
    with counted() as calls:
        X.add(1).view(16).clone()
        torch._foreach_add_([X, X], 1.0)
    assert sorted((call.what, count) for call, count in calls.launches.items()) == [
        ("_foreach_add_", 1),
        ("add", 1),
        ("clone", 1),
    ]
    assert calls.num_launches == 3
    assert set(calls.by_line().values()) == {2, 1}


def lists_of(*lists: list[Tensor]) -> list[list[Tensor]]:
    return [*lists]


def test_a_foreach_kernel_takes_chunks_of_one_dtype() -> None:
    many, large, counts = [torch.zeros(4)] * 130, [torch.zeros(65536 * 321)], [torch.zeros((), dtype=torch.int64)] * 5
    assert foreach_launches("_foreach_copy_", lists_of(many, many), returns_new=False) == 3  # 64 of two lists
    assert foreach_launches("_foreach_mul_", lists_of(many), returns_new=False) == 2  # 110 of one
    assert foreach_launches("_foreach_add_", lists_of(large, large), returns_new=False) == 2  # 320 blocks
    assert foreach_launches("_foreach_copy_", lists_of(many + counts, many + counts), returns_new=False) == 135
    transposed = [torch.zeros(4, 3).t()] * 2
    assert foreach_launches("_foreach_add_", lists_of([torch.zeros(3, 4)] * 2, transposed), returns_new=False) == 2


def test_a_list_of_two_dtypes_is_noted() -> None:
    mixed = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    with counted() as calls:
        torch._foreach_copy_(mixed, [m.clone() for m in mixed])
    assert [call.what for call in calls.mixed] == ["_foreach_copy_"]
    assert calls.num_launches == 4


def test_a_batch_of_a_loader_is_on_the_device_and_cost_nothing() -> None:
    loader = Loader(Arrays({"x": torch.rand(8, 4)}), batch_size=4)
    with counted() as calls:
        batch = next(ls.batches(loader))
        assert not calls.launches
        batch["x"].tolist()
    assert [call.what for call in calls.waits] == ["tolist"]


def test_inside_reading_a_cpu_waits() -> None:
    with accelerator():
        assert reading_waits(torch.device("cpu"))
    assert not reading_waits(torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "num_launches"), [(torch.float32, 1), (torch.float64, 9)], ids=str)
def test_a_number_of_another_dtype_is_cast_for_each_tensor(dtype: torch.dtype, num_launches: int) -> None:
    tensors, divisor = [torch.ones(3) for _ in range(9)], torch.ones((), dtype=dtype)
    with counted() as calls:
        torch._foreach_div(tensors, divisor)
    assert calls.num_launches == num_launches
