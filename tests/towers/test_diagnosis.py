"""Finding what was not finite first, also in fields and outputs of kinds that torch looks at in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.towers.diagnosis import first_nonfinite

PLAIN = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [0.0, 3.0]])


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "sparse": PLAIN.to_sparse,
    "hybrid": lambda: PLAIN.to_sparse(1),
    "rows": PLAIN.to_sparse_csr,
    "nested": lambda: nested([torch.ones(3), torch.tensor([1.0, math.inf]), torch.ones(1)]),
    "float8": lambda: PLAIN.to(torch.float8_e5m2),
}


def batch_of(value: Any) -> ls.Batch:
    return ls.Batch({"x": value, "y": torch.ones(3)}, position=0, batch_size=3, towers=range(1), epoch_size=3)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_field_of_an_unusual_kind_is_looked_at(kind: str) -> None:
    found = first_nonfinite(nn.Identity(), batch_of(UNUSUAL[kind]()), None, {})
    assert found == ("the field 'x' of the batch is not finite", [1])


def test_what_cannot_be_looked_at_is_left_aside() -> None:
    packed = torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    gradients = {"weight": torch.tensor([math.nan])}
    assert first_nonfinite(nn.Identity(), batch_of(packed), None, gradients) == (
        "the gradient of 'weight' is not finite",
        None,
    )


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_an_output_of_an_unusual_kind_is_looked_at(kind: str) -> None:
    class Unusual(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return UNUSUAL[kind]()

    model = nn.Sequential(nn.Identity(), Unusual())
    batch = batch_of(torch.ones(3, 2))
    words, _ = first_nonfinite(model, batch, lambda: model(batch["x"]), {})
    assert words == "the output of module '1' (Unusual) is not finite"
