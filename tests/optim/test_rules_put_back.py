"""Updates that no kernel of torch holds back: what a flag on the device puts back, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_calls import accelerator
from torch import Tensor

import lockstep as ls
from lockstep.optim import rules
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import FTRL, Adadelta
from lockstep.optim.rules import Rule

RULES: dict[str, Rule] = {
    "sgd": ls.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": ls.optim.Adam(0.1),
    "adamw": ls.optim.AdamW(0.1, weight_decay=0.1),
    "adagrad": ls.optim.Adagrad(0.1),
    "adadelta": Adadelta(1.0),
    "rmsprop": ls.optim.RMSProp(0.1, momentum=0.9, centered=True, weight_decay={"kernel": 0.1}),
    "ftrl": FTRL(0.1, l1=0.01),
    "lars": ls.optim.LARS(0.1, weight_decay=0.1),
    "lamb": ls.optim.LAMB(0.1, weight_decay=0.1),
}
DTYPES = {
    "float32": [torch.float32],
    "float64": [torch.float64],
    "float16": [torch.float16],
    "bfloat16 and float32": [torch.bfloat16, torch.float32],
}


def parameters(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {"kernel": (8, 3, 5, 5), "bias": (40,), "scale": (), "weight": (7, 100)}
    named = {n: torch.randn(s, generator=random).to(dtypes[i % len(dtypes)]) for i, (n, s) in enumerate(shapes.items())}
    named["kernel"] = named["kernel"].to(memory_format=torch.channels_last)
    named["bias"][3] = -0.0
    return named


def gradients(named: dict[str, Tensor], seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=random)) for p in named.values()]


def bits(named: dict[str, Tensor], bound: Any) -> list[Tensor]:
    tensors = [*named.values(), *bound.slots().values()]
    return [t.clone().flatten().contiguous().view(torch.uint8) for t in tensors]


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_bad_update_changes_no_bit_and_a_good_one_is_that_without_a_flag(
    rule: Rule, dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "can_fuse", lambda *_: False)
    with accelerator():
        named, plain = parameters(dtypes), parameters(dtypes)
        bound, without_flag = rule.bind(named), rule.bind(plain)
        assert bound.takes_found_inf
        for step in range(3):
            before = bits(named, bound)
            for bad in (math.nan, math.inf):
                given = gradients(named, step)
                given[step].fill_(bad)
                attempt = Gradients([*named], given)
                attempt.found_inf = torch.ones(())
                bound.update(attempt, step)
                assert all(map(torch.equal, bits(named, bound), before))
            attempt = Gradients([*named], gradients(named, step))
            attempt.found_inf = torch.zeros(())
            bound.update(attempt, step)
            without_flag.update(Gradients([*plain], gradients(plain, step)), step)
            assert all(map(torch.equal, bits(named, bound), bits(plain, without_flag)))
            assert not all(map(torch.equal, bits(named, bound), before))


def test_a_large_model_is_copied_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    put_back = rules.put_back

    def watched(tensors: list[Tensor], copies: list[Tensor], found_inf: Tensor) -> None:
        sizes.append(sum(copy.numel() for copy in copies))
        put_back(tensors, copies, found_inf)

    monkeypatch.setattr(rules, "_COPIED_ELEMENTS", 100)
    monkeypatch.setattr(rules, "put_back", watched)
    with accelerator():
        named = {f"weight.{i}": torch.ones(50) for i in range(10)}
        attempt = Gradients([*named], gradients(named, 1))
        attempt.found_inf = torch.zeros(())
        ls.optim.RMSProp(0.1).bind(named).update(attempt, 0)
    assert sizes == [200] * 5, "two parameters and their slots"


@pytest.mark.parametrize(
    "parameter",
    [torch.ones(4, 6)[:, ::2], torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta")],
    ids=["not dense", "complex", "of another device"],
)
def test_what_cannot_be_put_back_does_not_say_so(parameter: Tensor) -> None:
    assert not rules.can_put_back([torch.ones(3), parameter])
    with accelerator():
        assert not ls.optim.SGD(0.1).bind({"weight": parameter}).takes_found_inf
