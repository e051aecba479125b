from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lockstep as ls
from lockstep.optim import rules
from lockstep.optim.from_torch import FromTorch
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import FTRL, LAMB, LARS, SGD, Adadelta, Adagrad, Adam, AdamW, RMSProp
from lockstep.optim.rules import Rule
from lockstep.optim.schedules import ScaledByBatch, Warmup
from lockstep.tensors import quotients

SHAPES = {"conv.weight": (6, 2, 3, 3), "conv.bias": (40,), "scale": ()}
NAMES = list(SHAPES)

WITH_TORCH = {
    "sgd": (SGD(0.1, weight_decay=0.01), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (SGD(0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (Adam(0.02), torch.optim.Adam, {"lr": 0.02}),
    "adam_decay": (
        Adam(0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        torch.optim.Adam,
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (AdamW(0.02), torch.optim.AdamW, {"lr": 0.02}),
    "adamw_decay": (AdamW(0.02, weight_decay=0.5), torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.5}),
    "adagrad": (Adagrad(0.1), torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad_decay": (
        Adagrad(0.1, initial_accumulator_value=0.1, eps=1e-3, weight_decay=0.1),
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adadelta": (Adadelta(1.0), torch.optim.Adadelta, {"lr": 1.0}),
    "adadelta_decay": (
        Adadelta(2.0, rho=0.7, eps=1e-3, weight_decay=0.1),
        torch.optim.Adadelta,
        {"lr": 2.0, "rho": 0.7, "eps": 1e-3, "weight_decay": 0.1},
    ),
}
RULES: dict[str, Callable[..., Rule]] = {
    "sgd": lambda **more: SGD(0.1, **more),
    "nesterov": lambda **more: SGD(0.1, momentum=0.9, nesterov=True, **more),
    "rmsprop": lambda **more: RMSProp(0.1, momentum=0.9, centered=True, **more),
    "adam": lambda **more: Adam(0.1, **more),
    "adam_hat": lambda **more: Adam(0.1, epsilon_hat=True, **more),
    "adamw": lambda **more: AdamW(0.1, **more),
    "adagrad": lambda **more: Adagrad(0.1, **more),
    "adadelta": lambda **more: Adadelta(1.0, **more),
    "ftrl": lambda **more: FTRL(0.1, l1=0.01, l2=0.02, l2_shrinkage=0.03, **more),
    "lars": lambda **more: LARS(10.0, **more),
    "lamb": lambda **more: LAMB(0.1, **more),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"], indirect=True)


@pytest.fixture
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(rules, "can_fuse", lambda *_: False)
    return bool(request.param)


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def drawn(num_steps: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(2)
    return [
        [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in SHAPES.values()]
        for _ in range(num_steps)
    ]


def train(bound: Any, steps: Sequence[Sequence[Tensor | None]], first: int = 0, divisor: float = 1.0) -> None:
    for step, gradients in enumerate(steps, first):
        mine = [None if g is None else g.clone() for g in gradients]
        bound.update(Gradients(NAMES, mine, divisor=divisor), step)


def trained(rule: Rule, steps: Sequence[Sequence[Tensor | None]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    parameters = start(dtype)
    train(rule.bind(parameters), steps)
    return list(parameters.values())


def assert_equal(
    first: Mapping[str, Tensor] | Sequence[Tensor], second: Mapping[str, Tensor] | Sequence[Tensor]
) -> None:
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


def by_torch(cls: Any, arguments: Mapping[str, Any], steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Twenty updates by a torch optimizer, in the dtype of the gradients or float32, whichever is wider."""
    dtype = steps[0][0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    parameters = [torch.nn.Parameter(tensor.to(wide)) for tensor in start(dtype).values()]
    optimizer = cls(parameters, **arguments, foreach=False)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(wide)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@fused_or_not
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 3e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize(("ours", "cls", "arguments"), WITH_TORCH.values(), ids=WITH_TORCH)
def test_twenty_updates_are_those_of_torch(
    ours: Rule, cls: Any, arguments: dict[str, Any], dtype: torch.dtype, rounding: float, fused: bool
) -> None:
    theirs = by_torch(cls, arguments, drawn(20, dtype))
    torch.testing.assert_close(trained(ours, drawn(20, dtype), dtype), theirs, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("ours", "cls", "arguments"), WITH_TORCH.values(), ids=WITH_TORCH)
def test_16_bit_parameters_are_updated_as_torch_updates_wide_ones(
    ours: Rule, cls: Any, arguments: dict[str, Any], dtype: torch.dtype, size: float
) -> None:
    """Small gradients too: their squares are 0 in 16 bits."""
    steps = [[gradient * size for gradient in gradients] for gradients in drawn(20, dtype)]
    mine = [parameter.float() for parameter in trained(ours, steps, dtype)]
    rounding = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(mine, by_torch(cls, arguments, steps), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_rule
@pytest.mark.parametrize("fused", [False], ids=["foreach"], indirect=True)
def test_an_update_of_16_bit_parameters_is_calculated_in_32_bits(
    rule: Callable[..., Rule], dtype: torch.dtype, fused: bool
) -> None:
    parameters, wide = start(dtype), {n: t.float() for n, t in start(dtype).items()}
    bound, bound_wide = rule(weight_decay=0.1).bind(parameters), rule(weight_decay=0.1).bind(wide)
    train(bound, drawn(1, dtype))
    train(bound_wide, [[g.float() for g in drawn(1, dtype)[0]]])
    assert_equal(parameters, {n: t.to(dtype) for n, t in wide.items()})
    assert_equal(bound.slots(), bound_wide.slots())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in RULES if name != "ftrl"])
def test_gradients_of_zero_move_nothing(name: str, dtype: torch.dtype) -> None:
    rule = RULES[name](weight_decay=0.0)
    assert_equal(
        trained(rule, [[torch.zeros_like(t) for t in start(dtype).values()]] * 3, dtype), [*start(dtype).values()]
    )


@every_rule
@fused_or_not
def test_parameters_without_a_gradient_are_left_alone_with_their_slots(rule: Callable[..., Rule], fused: bool) -> None:
    steps: list[list[Tensor | None]] = [list(gradients) for gradients in drawn(4)]
    parameters = start()
    bound = rule(weight_decay=0.1).bind(parameters)
    train(bound, steps[:2])
    before = {n: t.clone() for n, t in (parameters | bound.slots()).items() if n.endswith("conv.bias")}
    for gradients in steps[2:]:
        gradients[1] = None
    train(bound, steps[2:], first=2)
    assert_equal({n: t for n, t in (parameters | bound.slots()).items() if n in before}, before)
    assert not torch.equal(parameters["scale"], start()["scale"])


@every_rule
@fused_or_not
def test_weight_decay_by_pattern_is_that_of_each_parameter_alone(rule: Callable[..., Rule], fused: bool) -> None:
    mixed = trained(rule(weight_decay={"weight$": 0.2, "scale": 0.7}), drawn(3))
    for index, decay in enumerate([0.2, 0.0, 0.7]):
        assert_equal(mixed[index], trained(rule(weight_decay=decay), drawn(3))[index])
    assert not torch.equal(mixed[0], trained(rule(weight_decay=0.0), drawn(3))[0])


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divisor", [1024.0, 3.7])
def test_a_division_on_the_way_has_the_bits_of_one_before(
    rule: Callable[..., Rule], dtype: torch.dtype, divisor: float
) -> None:
    first, second = start(dtype), start(dtype)
    train(rule(weight_decay=0.1).bind(first), drawn(3, dtype), divisor=divisor)
    train(rule(weight_decay=0.1).bind(second), [[g / divisor for g in step] for step in drawn(3, dtype)])
    assert_equal(first, second)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_slots_continue_with_the_same_bits(rule: Callable[..., Rule], dtype: torch.dtype) -> None:
    parameters, steps = start(dtype), drawn(6, dtype)
    bound = rule().bind(parameters)
    train(bound, steps[:3])
    saved = {n: t.clone() for n, t in bound.slots().items()}
    values, copies = bound.values(), {n: t.clone() for n, t in parameters.items()}
    train(bound, steps[3:], first=3)
    again = rule().bind(copies)
    assert again.expects(saved).keys() == saved.keys()
    again.load(saved, values)
    train(again, steps[3:], first=3)
    assert_equal(copies, parameters)
    assert_equal(again.slots(), bound.slots())


@every_rule
def test_slots_have_the_memory_format_of_the_parameter(rule: Callable[..., Rule]) -> None:
    weight = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for slot in rule().bind({"weight": weight}).slots().values():
        assert (slot.dtype, slot.stride()) == (weight.dtype, weight.stride())


def test_rmsprop_follows_tensorflows_formula() -> None:
    alpha, momentum, eps, lr = 0.8, 0.7, 0.01, 0.1
    values = start()["conv.bias"]
    squares, means, buffer = torch.ones_like(values), torch.zeros_like(values), torch.zeros_like(values)
    for _, gradient, _ in drawn(20):
        squares = alpha * squares + (1 - alpha) * gradient**2
        means = alpha * means + (1 - alpha) * gradient
        buffer = momentum * buffer + lr * gradient / torch.sqrt(squares - means**2 + eps)
        values = values - buffer
    rule = RMSProp(lr, alpha=alpha, momentum=momentum, eps=eps, centered=True)
    torch.testing.assert_close(trained(rule, drawn(20))[1], values, rtol=1e-12, atol=1e-12)


def test_rmsprop_starts_its_means_where_it_is_told() -> None:
    gradient = [torch.full(shape, 2.0, dtype=torch.float64) for shape in SHAPES.values()]
    for initial in (0.0, 1.0):
        moved = start()["scale"] - trained(RMSProp(0.1, eps=0.5, initial_accumulator_value=initial), [gradient])[2]
        assert moved.item() == pytest.approx(0.1 * 2.0 / math.sqrt(0.9 * initial + 0.1 * 4.0 + 0.5), rel=1e-12)


def test_a_variance_that_rounds_to_below_zero_gives_no_nan() -> None:
    """Each mean is rounded by itself, and one of equal gradients has no variance."""
    parameters = {"weight": torch.zeros(2000)}
    bound = RMSProp(0.1, centered=True, initial_accumulator_value=0.0, eps=1e-30).bind(parameters)
    gradient = torch.linspace(0.1, 1.0, 2000)
    lowest = 0.0
    for step in range(200):
        bound.update(Gradients(["weight"], [gradient]), step)
        slots = bound.slots()
        lowest = min(lowest, float((slots["square_avg/weight"] - slots["grad_avg/weight"] ** 2).min()))
    assert lowest < 0.0, "this input no longer shows what is tested"
    assert parameters["weight"].isfinite().all()


@fused_or_not
def test_epsilon_hat_is_added_to_the_root_before_its_correction(fused: bool) -> None:
    beta1, beta2, eps, lr = 0.9, 0.99, 0.3, 0.1
    values = start()["conv.bias"]
    mean, square = torch.zeros_like(values), torch.zeros_like(values)
    for step, (_, gradient, _) in enumerate(drawn(20), 1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        values = values - rate * mean / (square.sqrt() + eps)
    hat = trained(Adam(lr, betas=(beta1, beta2), eps=eps, epsilon_hat=True), drawn(20))[1]
    torch.testing.assert_close(hat, values, rtol=1e-12, atol=1e-12)
    plain = trained(Adam(lr, betas=(beta1, beta2), eps=eps), drawn(20))[1]
    assert (plain - values).abs().max() > 0.01


@fused_or_not
def test_adam_corrects_by_the_steps_of_the_run(fused: bool) -> None:
    """As TensorFlow's beta powers do: also for a parameter that has its first gradient late."""
    parameters = {"weight": torch.zeros(1, dtype=torch.float64)}
    bound = Adam(0.1, eps=0.0).bind(parameters)
    for step, gradient in enumerate([None, None, torch.ones(1, dtype=torch.float64)]):
        bound.update(Gradients(["weight"], [gradient]), step)
    expected = 0.1 * (0.1 / (1 - 0.9**3)) / math.sqrt(0.001 / (1 - 0.999**3))
    assert -parameters["weight"].item() == pytest.approx(expected, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    lr=st.floats(0.0, 1.0),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.9999)),
    eps=st.floats(1e-6, 1.0),
    decay=st.floats(0.0, 1.0),
)
def test_adam_of_any_numbers_is_torchs(lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
    for ours, cls in ((Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)):
        arguments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
        theirs = by_torch(cls, arguments, drawn(20))
        torch.testing.assert_close(trained(ours(**arguments), drawn(20)), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("power", [-0.5, -0.3, 0.0])
def test_ftrl_follows_tensorflows_formula(power: float) -> None:
    lr, l1, l2, shrinkage = 0.1, 0.5, 0.02, 0.03
    values = start()["conv.bias"]
    total, linear = torch.full_like(values, 0.1), torch.zeros_like(values)
    zeros = 0
    for _, gradient, _ in drawn(20):
        new = total + gradient**2
        linear = linear + gradient + 2 * shrinkage * values - (new**-power - total**-power) / lr * values
        quadratic = new**-power / lr + 2 * l2
        values = torch.where(linear.abs() > l1, (linear.sign() * l1 - linear) / quadratic, 0.0)
        total, zeros = new, zeros + int((values == 0).sum())
    rule = FTRL(lr, learning_rate_power=power, l1=l1, l2=l2, l2_shrinkage=shrinkage)
    mine = trained(rule, drawn(20))[1]
    torch.testing.assert_close(mine, values, rtol=1e-12, atol=1e-12)
    assert zeros
    assert torch.equal(mine == 0, values == 0)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("skip_vectors", [True, False])
def test_lars_follows_the_paper(momentum: float, skip_vectors: bool) -> None:
    lr, decay, trust_coefficient = 2.0, 0.1, 0.01
    values = list(start().values())
    buffers = [torch.zeros_like(v) for v in values]
    for gradients in drawn(20):
        for index, gradient in enumerate(gradients):
            weight = values[index]
            trust = trust_coefficient * weight.norm() / (gradient.norm() + decay * weight.norm())
            if skip_vectors and weight.ndim < 2:
                trust = torch.ones((), dtype=torch.float64)
            buffers[index] = momentum * buffers[index] + lr * trust * (gradient + decay * weight)
            values[index] = weight - buffers[index]
    rule = LARS(
        lr, momentum=momentum, weight_decay=decay, trust_coefficient=trust_coefficient, skip_vectors=skip_vectors
    )
    torch.testing.assert_close(trained(rule, drawn(20)), values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("skip_vectors", [True, False])
def test_lamb_follows_the_paper(skip_vectors: bool) -> None:
    lr, decay, beta1, beta2, eps = 0.1, 0.1, 0.8, 0.95, 1e-3
    values = list(start().values())
    means, squares = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    for step, gradients in enumerate(drawn(20), 1):
        for index, gradient in enumerate(gradients):
            weight = values[index]
            means[index] = beta1 * means[index] + (1 - beta1) * gradient
            squares[index] = beta2 * squares[index] + (1 - beta2) * gradient**2
            root = (squares[index] / (1 - beta2**step)).sqrt()
            update = means[index] / (1 - beta1**step) / (root + eps) + decay * weight
            trust = (
                torch.ones((), dtype=torch.float64)
                if skip_vectors and weight.ndim < 2
                else weight.norm() / update.norm()
            )
            values[index] = weight - lr * trust * update
    rule = LAMB(lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, skip_vectors=skip_vectors)
    torch.testing.assert_close(trained(rule, drawn(20)), values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [LARS(0.1, momentum=0.0), LAMB(0.1)], ids=["lars", "lamb"])
def test_a_tensor_of_zeros_moves_by_the_plain_rate(rule: Rule) -> None:
    parameters = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    rule.bind(parameters).update(Gradients(list(parameters), [torch.ones(2, 2), torch.ones(2)]), 0)
    torch.testing.assert_close(parameters, {"weight": torch.full((2, 2), -0.1), "bias": torch.full((2,), -0.1)})


@pytest.mark.parametrize("rule", [LARS(0.1), LAMB(0.1)], ids=["lars", "lamb"])
def test_vectors_alone_are_updated_too(rule: Rule) -> None:
    parameters = {"bias": torch.zeros(2)}
    rule.bind(parameters).update(Gradients(["bias"], [torch.ones(2)]), 0)
    torch.testing.assert_close(parameters["bias"], torch.full((2,), -0.1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rule", "cls", "arguments"),
    [
        (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
        (
            Adagrad(0.1, initial_accumulator_value=0.1),
            torch.optim.Adagrad,
            {"lr": 0.1, "initial_accumulator_value": 0.1},
        ),
    ],
    ids=["sgd", "adagrad"],
)
def test_rows_of_an_embedding_are_updated_as_torch_does(
    rule: Rule, cls: Any, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(3)
    table = torch.randn(5, 2, generator=random, dtype=torch.float64)
    ours, theirs = table.to(dtype), torch.nn.Parameter(table.clone())
    bound, optimizer = rule.bind({"table": ours}), cls([theirs], **arguments)
    for step, rows in enumerate([[0, 3], [3, 4], [3]]):
        index, values = torch.tensor(rows), torch.randn(len(rows), 2, generator=random, dtype=torch.float64).to(dtype)
        theirs.grad = torch.zeros(5, 2, dtype=torch.float64).index_copy(0, index, values.double())
        optimizer.step()
        bound.update(Gradients(["table"], [values], rows={0: index}), step)
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), theirs.detach(), rtol=rounding, atol=rounding)
    assert torch.equal(ours[1:3], table.to(dtype)[1:3])


@pytest.mark.parametrize(
    "rule",
    [
        Adagrad(0.1, weight_decay={"table": 0.1}),
        SGD(0.1, momentum=0.9),
        *[make() for n, make in RULES.items() if n[:3] not in ("sgd", "ada")],
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_other_rules_refuse_sparse_gradients_before_anything_moves(rule: Rule) -> None:
    parameters = {"weight": torch.ones(2), "table": torch.zeros(5, 2)}
    bound = rule.bind(parameters)
    bound.check_rows(["another"])
    refused = r"cannot update 'table' from a sparse gradient.*\n.*\n.*or Adagrad"
    with pytest.raises(ls.InputError, match=refused):
        bound.check_rows({"table", "another"})
    before = {name: slot.clone() for name, slot in bound.slots().items()}
    with pytest.raises(ls.InputError, match=refused):
        bound.update(Gradients(list(parameters), [torch.ones(2), torch.ones(1, 2)], rows={1: torch.tensor([2])}), 0)
    assert parameters["weight"].tolist() == [1.0, 1.0]
    assert_equal(bound.slots(), before)


def test_a_weight_decay_of_other_parameters_does_not_matter_to_sparse_gradients() -> None:
    bound = SGD(0.1, weight_decay={"weight": 0.1}).bind({"weight": torch.ones(2), "table": torch.zeros(5, 2)})
    bound.check_rows(["table"])
    with pytest.raises(ls.InputError, match="cannot update 'weight' from a sparse gradient"):
        bound.check_rows(["weight", "table"])


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("sgd", "nesterov")])
def test_complex_parameters_are_refused_by_rules_that_square_gradients(name: str) -> None:
    parameters = {"weight": torch.zeros(2), "spectrum": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(
        ls.InputError, match=r"cannot update complex parameters.*\n.*'spectrum'\n.*real.*\n.*optim\.SGD"
    ):
        RULES[name]().bind(parameters)


@pytest.mark.parametrize(
    "arguments", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}], ids=["plain", "all"]
)
def test_complex_parameters_are_updated_as_torch_does(arguments: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(4)
    values = torch.randn(4, 6, generator=random, dtype=torch.complex128)
    ours, theirs = values[0].clone(), torch.nn.Parameter(values[0].clone())
    bound, optimizer = SGD(0.1, **arguments).bind({"spectrum": ours}), torch.optim.SGD([theirs], 0.1, **arguments)
    for step in range(3):
        theirs.grad = values[step + 1].clone()
        optimizer.step()
        bound.update(Gradients(["spectrum"], [values[step + 1]]), step)
    torch.testing.assert_close(ours, theirs.detach())


def test_ftrl_says_at_which_step_the_rate_is_0() -> None:
    bound = FTRL(ls.optim.Cosine(0.1, 2)).bind({"weight": torch.zeros(2)})
    for step in range(2):
        bound.update(Gradients(["weight"], [torch.ones(2)]), step)
    refused = r"is 0 in the update that makes step 3.*\n.*\n.*above 0"
    with pytest.raises(ls.InputError, match=refused):
        bound.learning_rates(2)
    with pytest.raises(ls.InputError, match=refused):
        bound.update(Gradients(["weight"], [torch.ones(2)]), 2)


@every_rule
def test_what_a_schedule_gives_is_checked_before_anything_changes(rule: Callable[..., Rule]) -> None:
    def schedule(step: int) -> Any:
        return torch.tensor([0.1]) if step else 0.1

    parameters = start()
    bound = replace(rule(), lr=schedule).bind(parameters)  # type: ignore[type-var]
    train(bound, drawn(1))
    before = {name: tensor.clone() for name, tensor in (parameters | bound.slots()).items()}
    refused = r"learning rate after 1 updates cannot be used.*\n.*tensor\(\[0.1000\]\), from .*schedule\n"
    with pytest.raises(ls.InputError, match=refused):
        bound.learning_rates(1)
    with pytest.raises(ls.InputError, match=refused):
        train(bound, drawn(1), first=1)
    assert_equal(parameters | bound.slots(), before)


def test_lengths_are_resolved_anew_for_each_stream() -> None:
    bound = SGD(ScaledByBatch(Warmup(0.1, ls.Epochs(2)), 10)).bind(start())
    for batch_size, num_steps in ((10, 20), (50, 4), (10, 20)):
        lines = bound.resolve(100, batch_size)
        assert any(f"{num_steps} steps" in line for line in lines), lines
        assert bound.learning_rates(num_steps // 2) == {"": pytest.approx(0.05 * batch_size / 10)}


def test_the_patterns_of_a_weight_decay_are_told_with_their_parameters() -> None:
    decays = {"weight$": 0.2, "scale": 0.7}
    assert list(AdamW(0.1, weight_decay=decays).bind(start()).matched()) == [
        ("AdamW weight_decay 'weight$' = 0.2", ["conv.weight"]),
        ("AdamW weight_decay 'scale' = 0.7", ["scale"]),
    ]
    assert list(AdamW(0.1).bind(start()).matched()) == []


def test_values_of_another_optimizer_are_refused() -> None:
    bound = SGD(0.1).bind(start())
    bound.check_values({})
    for refuse in (bound.check_values, lambda values: bound.load({}, values)):
        with pytest.raises(
            ls.CheckpointError, match=r"values of another optimizer.*\n.*groups, state\n.*SGD.*\n.*resume"
        ):
            refuse({"groups": [{}], "state": {}})


@pytest.mark.parametrize("lr", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
@pytest.mark.parametrize("make", [SGD, Adam, FTRL, LAMB, lambda lr: FromTorch(torch.optim.NAdam, lr=lr)])
def test_a_number_of_numpys_or_torchs_is_a_rate(make: Any, lr: Any) -> None:
    found = make(lr=lr)
    assert found == make(lr=0.5)
    assert repr(found) == repr(make(lr=0.5)), "a checkpoint tells it as the same"
    assert found.bind(start()).learning_rates(0) == {"": 0.5}


@pytest.mark.parametrize("lr", [torch.ones(1), np.ones(2), np.bool_(True), torch.tensor(1j)], ids=repr)
def test_an_array_and_what_is_no_number_are_no_rate(lr: Any) -> None:
    with pytest.raises(ls.InputError, match="lr is of the wrong type"):
        SGD(lr)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RMSProp(-0.1), "lr is out of range"),
        (lambda: RMSProp(0.1, alpha=1.0), r"alpha is out of range.*\n.*alpha=1.0\n.*below 1"),
        (lambda: RMSProp(0.1, momentum=1.5), "momentum is out of range"),
        (lambda: RMSProp(0.1, eps=-1.0), r"eps is out of range.*\n.*\n.*0 or more, finite"),
        (lambda: RMSProp(0.1, eps="small"), r"eps is of the wrong type.*\n.*eps is str\n.*a number"),
        (lambda: RMSProp(0.1, centered=1), "centered is of the wrong type"),
        (lambda: RMSProp(0.1, initial_accumulator_value=-1), "initial_accumulator_value is out of range"),
        (lambda: RMSProp(0.1, weight_decay=-1), "weight_decay is out of range"),
        (lambda: Adam("fast"), "lr is of the wrong type"),
        (lambda: Adam(0.1, betas=0.9), r"betas is of the wrong type.*\n.*float\n.*a list\n.*betas=\(0.9, 0.999\)"),
        (lambda: Adam(0.1, betas="ab"), "betas is of the wrong type"),
        (lambda: Adam(0.1, betas=(0.9, 0.99, 0.999)), "betas is of the wrong length"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), r"betas\[1\] is out of range"),
        (lambda: Adam(0.1, betas=(None, 0.9)), r"betas\[0\] is of the wrong type"),
        (lambda: Adam(0.1, eps=math.nan), "eps is out of range"),
        (lambda: Adam(0.1, eps=True), "eps is of the wrong type"),
        (lambda: Adam(0.1, epsilon_hat=1e-8), "epsilon_hat is of the wrong type"),
        (lambda: SGD(True), r"lr is of the wrong type.*\n.*lr is bool\n.*a number"),
        (lambda: SGD(0.1, momentum=True), r"momentum is of the wrong type.*\n.*bool"),
        (lambda: SGD(0.1, momentum=0.9, nesterov="no"), r"nesterov is of the wrong type.*\n.*str\n.*True or False"),
        (lambda: SGD(0.1, weight_decay=True), r"weight_decay is of the wrong type.*\n.*bool"),
        (lambda: SGD(0.1, weight_decay={"bias$": True}), r"weight_decay of 'bias\$' is of the wrong type.*\n.*bool"),
        (lambda: FTRL(0.1, learning_rate_power=False), "learning_rate_power is of the wrong type"),
        (lambda: AdamW(0.1, weight_decay="x"), "weight_decay is of the wrong type"),
        (lambda: Adagrad(0.1, initial_accumulator_value=-0.1), "initial_accumulator_value is out of range"),
        (lambda: Adagrad(0.1, eps=-1e-10), "eps is out of range"),
        (lambda: Adagrad(0.1, eps=0), r"divide by 0.*\n.*\n.*one of them above 0"),
        (lambda: Adadelta(1.0, rho=-0.1), "rho is out of range"),
        (lambda: Adadelta(1.0, eps=-1e-6), "eps is out of range"),
        (lambda: Adadelta(1.0, eps=0), r"eps is out of range.*\n.*\n.*above 0, finite\n.*as large as the root of eps"),
        (lambda: FTRL(0.0), r"divides by lr, which is 0.\n"),
        (lambda: FTRL(0.1, learning_rate_power=0.5), r"learning_rate_power is out of range.*\n.*\n.*at most 0"),
        (lambda: FTRL(0.1, learning_rate_power="sqrt"), "learning_rate_power is of the wrong type"),
        (lambda: FTRL(0.1, initial_accumulator_value=0.0), "initial_accumulator_value is out of range"),
        (lambda: FTRL(0.1, l1=-1.0), "l1 is out of range"),
        (lambda: FTRL(0.1, l2=-1.0), "l2 is out of range"),
        (lambda: FTRL(0.1, l2_shrinkage=-1.0), "l2_shrinkage is out of range"),
        (lambda: LARS(0.1, momentum=-0.1), "momentum is out of range"),
        (lambda: LARS(0.1, trust_coefficient=math.inf), "trust_coefficient is out of range"),
        (lambda: LARS(0.1, skip_vectors="yes"), "skip_vectors is of the wrong type"),
        (lambda: LAMB(0.1, betas=(0.9,)), "betas is of the wrong length"),
        (lambda: LAMB(0.1, eps=-1.0), "eps is out of range"),
        (lambda: LAMB(0.1, skip_vectors=None), "skip_vectors is of the wrong type"),
    ],
)
def test_fields_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make()


@pytest.mark.parametrize("divisor", [3.0, torch.tensor(3.0, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("rule", [RMSProp(0.1, momentum=0.9), Adadelta(1.0), FTRL(0.1), LARS(0.1), LAMB(0.1)], ids=repr)
def test_clipped_gradients_are_divided_block_by_block(
    rule: Rule, owned: bool, divisor: float | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a clip takes no memory of the size of the model."""
    monkeypatch.setattr(rules, "_CACHED_ELEMENTS", 50)
    sizes: list[int] = []

    def noted(tensors: list[Tensor], by: float | Tensor) -> list[Tensor]:
        sizes.append(sum(tensor.numel() for tensor in tensors))
        return quotients(tensors, by)

    monkeypatch.setattr(rules, "quotients", noted)
    monkeypatch.setattr("lockstep.optim.gradients.quotients", lambda *_: pytest.fail("all of them at once"))
    shapes = {f"weight{number}": (30,) for number in range(9)}
    gradients = [torch.randn(30) for _ in shapes]
    found, expected = ({name: torch.ones(shape) for name, shape in shapes.items()} for _ in range(2))
    rule.bind(expected).update(Gradients([*shapes], quotients(gradients, divisor)), 0)
    rule.bind(found).update(Gradients([*shapes], [g.clone() for g in gradients], divisor=divisor, owned=owned), 0)
    assert sizes == [60, 60, 60, 60, 30]
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name])
