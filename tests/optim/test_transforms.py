from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from device_calls import accelerator, counted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lockstep as ls
from lockstep.optim import AdaptiveClip, ClipGlobalNorm, ClipNorm, ClipValue, ScaleGradients
from lockstep.optim.gradients import Gradients
from lockstep.optim.transforms import bind_transform
from lockstep.training.attempt import Attempt

DOUBLE = torch.float64
SHAPES = {"conv.weight": (4, 3, 2, 2), "conv.bias": (4,), "head.weight": (2, 4), "head.bias": (2,), "scale": ()}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=generator, dtype=DOUBLE) for n, s in SHAPES.items()}


def transformed(
    transforms: Any,
    found: Mapping[str, Tensor | None],
    *,
    parameters: Mapping[str, Tensor] | None = None,
    step: int = 0,
) -> dict[str, Tensor | None]:
    """The gradients after one transform or several, each made sure to be unchanged in place."""
    before = {name: None if g is None else g.clone() for name, g in found.items()}
    gradients = Gradients(list(found), list(found.values()))
    for transform in transforms if isinstance(transforms, Sequence) else [transforms]:
        bind_transform(transform, parameters or {name: torch.zeros(()) for name in found})(gradients, step)
    for name, gradient in found.items():
        if gradient is not None:
            assert torch.equal(gradient, before[name])  # type: ignore[arg-type]
    return dict(zip(found, gradients.tensors, strict=True))


def assert_close(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], rtol: float = 1e-12
) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=rtol, atol=1e-300)


def by_torch(
    clip: Callable[[list[nn.Parameter]], object], found: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    parameters = {name: nn.Parameter(torch.zeros_like(g)) for name, g in found.items() if g is not None}
    for name, parameter in parameters.items():
        gradient = found[name]
        parameter.grad = None if gradient is None else gradient.clone()
    clip(list(parameters.values()))
    return {name: parameters[name].grad if name in parameters else None for name in found}


ALL = [ScaleGradients({".": 0.5}), ClipNorm(0.1), ClipGlobalNorm(0.1), ClipValue(0.1), AdaptiveClip(0.001)]
kinds = pytest.mark.parametrize("transform", ALL, ids=lambda each: type(each).__name__)


# Multiplication


def test_gradients_are_multiplied_by_the_number_of_their_pattern() -> None:
    found = drawn(0)
    after = transformed(ScaleGradients({"bias$": 3.7, "conv.weight": -2.0, "scale": 1.0}), found)
    factors = {"conv.weight": -2.0, "conv.bias": 3.7, "head.weight": 1.0, "head.bias": 3.7, "scale": 1.0}
    assert_close(after, {name: g * factors[name] for name, g in found.items()})
    assert after["head.weight"] is found["head.weight"]


def test_an_exact_name_multiplies_that_parameter_alone() -> None:
    found = {"scale": tensor(1.0), "head.scale": tensor(1.0)}
    assert transformed(ScaleGradients({"scale": 3.7}), found) == {"scale": tensor(3.7), "head.scale": tensor(1.0)}


@pytest.mark.parametrize("pattern", ["^conv", "bias$"])
def test_times_zero_gradients_are_zero_and_the_others_the_same(pattern: str) -> None:
    found = drawn(0)
    after = transformed(ScaleGradients({pattern: 0.0}), found)
    zero = [name for name, g in after.items() if not g.any()]  # type: ignore[union-attr]
    assert zero == ([n for n in found if n.startswith("conv")] if pattern == "^conv" else ["conv.bias", "head.bias"])
    assert all(after[name] is found[name] for name in found if name not in zero)


def test_times_zero_a_parameter_still_decays() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = ls.optim.SGD(0.5, weight_decay=0.1)
    state = ls.TrainState(model, optimizer, gradient_transforms=[ScaleGradients({"weight": 0.0})])
    state.apply(Attempt([torch.ones(1, 2)], (), {"loss": 1.0}))
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 0.95))


def test_a_multiplier_may_be_a_function_of_the_step() -> None:
    flag = True
    asked: list[int] = []

    def follow(step: int) -> float:
        asked.append(step)
        return 3.7 if flag else 1.0

    transform = bind_transform(
        ScaleGradients({"a": follow, "c": ls.optim.Cosine(1.0, 10)}), {n: tensor(1.0) for n in "abc"}
    )

    def scaled(step: int) -> list[float]:
        gradients = Gradients(list("abc"), [tensor(1.0), tensor(1.0), tensor(2.0)])
        transform(gradients, step)
        return [float(g) for g in gradients.tensors if g is not None]

    assert scaled(0) == [3.7, 1.0, 2.0]
    flag = False
    assert scaled(5) == pytest.approx([1.0, 1.0, 1.0])
    assert asked == [0, 5]


@kinds
def test_a_parameter_without_gradient_stays_without(transform: Any) -> None:
    found = {"a": None, "b": tensor(3.0, 4.0), "c": None}
    after = transformed(transform, found, parameters={name: tensor(1.0, 1.0) for name in found})
    assert after["a"] is None
    assert after["c"] is None
    assert after["b"].abs().max() < 3.0  # type: ignore[union-attr]
    nothing = {"a": None, "b": None}
    assert transformed(transform, nothing, parameters={n: tensor(1.0) for n in nothing}) == nothing


# Clips


def test_each_gradient_is_clipped_to_the_norm_alone() -> None:
    found = {"large": tensor(1.0, 2.0, 3.0), "small": tensor(0.1, 0.2), "exact": tensor(0.6, 0.8)}
    after = transformed(ClipNorm(1.0), found)
    torch.testing.assert_close(after["large"], tensor(1.0, 2.0, 3.0) / math.sqrt(14.0), rtol=1e-12, atol=0.0)
    assert after["small"] is found["small"]
    torch.testing.assert_close(after["exact"], found["exact"], rtol=1e-12, atol=0.0)


def test_a_scalar_gradient_is_clipped_as_a_vector_of_one() -> None:
    gradient = {"a": torch.tensor(4.0)}
    assert transformed(ClipNorm(3.0), gradient)["a"] == 3.0
    assert transformed(ClipNorm(5.0), gradient)["a"] == 4.0


def test_a_norm_may_be_clipped_for_some_parameters() -> None:
    found = drawn(1, scale=100.0)
    after = transformed(ClipNorm(1.0, pattern=["^head", "scale"]), found)
    norms = {name: float(g.norm()) for name, g in after.items()}  # type: ignore[union-attr]
    assert {name for name, norm in norms.items() if norm == pytest.approx(1.0)} == {"head.weight", "head.bias", "scale"}
    assert after["conv.weight"] is found["conv.weight"]


magnitudes = st.floats(1e-3, 1e3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), magnitudes, magnitudes)
def test_the_global_norm_is_clipped_as_torch_and_tensorflow_do(seed: int, scale: float, limit: float) -> None:
    found = drawn(seed, scale)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
    after = transformed(ClipGlobalNorm(limit), found)
    assert_close(after, {name: g * (limit / max(norm, limit)) for name, g in found.items()})
    theirs = by_torch(lambda parameters: nn.utils.clip_grad_norm_(parameters, limit), found)
    # Torch divides by norm + 1e-6, and does so already where the sum is what exceeds the limit.
    factor = min(1.0, limit / norm) / min(1.0, limit / (norm + 1e-6))
    assert_close(after, {name: g * factor for name, g in theirs.items() if g is not None}, rtol=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), magnitudes, magnitudes)
def test_values_are_clipped_as_torch_does(seed: int, scale: float, limit: float) -> None:
    found = {**drawn(seed, scale), "none": None}
    theirs = by_torch(lambda parameters: nn.utils.clip_grad_value_(parameters, limit), found)
    after = transformed(ClipValue(limit), found)
    for name, gradient in theirs.items():
        assert gradient is None if after[name] is None else torch.equal(after[name], gradient)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), magnitudes, magnitudes)
def test_each_norm_is_clipped_as_tensorflow_does(seed: int, scale: float, limit: float) -> None:
    found = drawn(seed, scale)
    assert_close(
        transformed(ClipNorm(limit), found), {n: g * limit / max(float(g.norm()), limit) for n, g in found.items()}
    )


def test_a_value_at_the_limit_counts_though_norms_are_rounded() -> None:
    gradients = Gradients(["a"], [torch.tensor([47.0])])
    limit = gradients.norm / 3.0 * 0.7
    gradients.divide(3.0)
    gradients.multiply({0: 0.7})
    before = gradients.tensors[0]
    assert before is not None
    ClipValue(limit).bind({})(gradients, 0)
    assert gradients.tensors[0] == before.clamp(max=limit) < before


@kinds
def test_what_does_not_exceed_is_left_alone(transform: Any) -> None:
    found = {name: 1e-9 * g for name, g in drawn(0).items()}
    if isinstance(transform, ScaleGradients):
        transform = ScaleGradients({".": 1})
    after = transformed(transform, found, parameters=drawn(1))
    assert all(after[name] is found[name] for name in found)


@kinds
@pytest.mark.parametrize("scale", [1e-3, 65536.0])
def test_a_loss_scale_is_taken_out_first(transform: Any, scale: float) -> None:
    found, parameters = drawn(3), drawn(4)
    gradients = Gradients(list(found), [g * scale for g in found.values()], divisor=scale)
    assert gradients.norm > 1.0
    bind_transform(transform, parameters)(gradients, 0)
    expected = transformed(transform, found, parameters=parameters)
    assert_close(dict(zip(found, gradients.tensors, strict=True)), expected, rtol=1e-11)
    norms = [float(g.norm()) for g in expected.values() if g is not None]
    assert gradients.norms == pytest.approx(norms, rel=1e-11)


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_and_memory_layout_stay(transform: Any, dtype: torch.dtype) -> None:
    gradient = torch.full((2, 3, 4, 5), 1000.0).to(dtype).to(memory_format=torch.channels_last)
    parameter = torch.ones_like(gradient).requires_grad_()
    after = transformed(transform, {"a": gradient}, parameters={"a": parameter})["a"]
    assert after is not None
    assert (after.dtype, after.stride(), after.requires_grad) == (dtype, gradient.stride(), False)
    assert 0.0 < float(after.max()) < 1000.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("transform", [ClipNorm(2.5), ClipNorm(0.1, "weight"), AdaptiveClip(1.0)], ids=repr)
def test_an_accelerator_clips_as_a_cpu_does_and_the_host_reads_nothing(transform: Any, dtype: torch.dtype) -> None:
    found: dict[str, Tensor | None] = {name: g.to(dtype) for name, g in drawn(0).items()} | {"conv.bias": None}
    parameters = {name: p.to(dtype) for name, p in drawn(1).items()}
    expected = transformed(transform, found, parameters=parameters)
    gradients = Gradients(list(found), list(found.values()))
    with accelerator(), counted(refuse_waits=True):
        bind_transform(transform, parameters)(gradients, 0)
    after = dict(zip(found, gradients.tensors, strict=True))
    changed = [name for name, g in found.items() if g is not None and not torch.equal(g, expected[name])]  # type: ignore[arg-type]
    assert 0 < len(changed) < len(found) - 1
    torch.testing.assert_close(after, expected, rtol=max(1e-6, torch.finfo(dtype).eps), atol=0.0)


# Sparse gradients


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (ScaleGradients({"table": 3.7}), [[3.7 * 3, 3.7 * 4], [3.7 * 0, 3.7 * 12]]),
        (ClipNorm(6.5), [[1.5, 2.0], [0.0, 6.0]]),
        (ClipGlobalNorm(6.5), [[1.5, 2.0], [0.0, 6.0]]),
        (ClipValue(3.5), [[3.0, 3.5], [0.0, 3.5]]),
    ],
)
def test_the_values_of_a_sparse_gradient_change_and_its_rows_stay(transform: Any, expected: list[list[float]]) -> None:
    rows, values = torch.tensor([7, 2]), torch.tensor([[3.0, 4.0], [0.0, 12.0]], dtype=DOUBLE)
    gradients = Gradients(["table"], [values], rows={0: rows})
    bind_transform(transform, {"table": torch.ones(9, 2)})(gradients, 0)
    torch.testing.assert_close(gradients.tensors[0], torch.tensor(expected, dtype=DOUBLE))
    assert gradients.rows[0] is rows
    assert rows.tolist() == [7, 2]
    assert values.tolist() == [[3.0, 4.0], [0.0, 12.0]]


def test_adaptive_clipping_refuses_sparse_gradients() -> None:
    parameters = {"table": torch.ones(9, 2), "weight": torch.ones(2)}

    def gradients() -> Gradients:
        return Gradients(list(parameters), [torch.ones(1, 2), torch.ones(2)], rows={0: torch.tensor([3])})

    with pytest.raises(ls.InputError, match=r"A sparse gradient cannot.*\n.*'table'\n.*dense.*\n.*pattern without"):
        AdaptiveClip().bind(parameters)(gradients(), 0)
    rest = gradients()
    AdaptiveClip(pattern="weight").bind(parameters)(rest, 0)
    assert float(rest.tensors[1].norm()) == pytest.approx(0.01 * math.sqrt(2.0))  # type: ignore[union-attr]


# Adaptive clipping


def clipped_by_units(weights: Tensor, gradient: Tensor, clip_factor: float, eps: float) -> Tensor:
    """The rule of the paper, written out unit by unit."""
    one = weights.squeeze().ndim <= 1
    units = [(weights, gradient)] if one else list(zip(weights, gradient, strict=True))
    parts = []
    for unit, slope in units:
        most = clip_factor * max(float(unit.norm()), eps)
        norm = float(slope.norm())
        parts.append(slope * (most / norm) if norm > most else slope)
    return torch.stack(parts).reshape(gradient.shape)


@pytest.mark.parametrize(
    "shape",
    [(), (5,), (4, 3), (1, 6), (6, 1), (4, 1, 1), (4, 2, 3), (4, 3, 2, 2), (4, 1, 3, 3), (1, 3, 2, 2), (2, 2, 2, 2, 2)],
)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_gradients_are_clipped_by_the_norm_of_their_units(shape: tuple[int, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    weights, gradient = (torch.randn(shape, generator=generator, dtype=DOUBLE) for _ in range(2))
    gradient[...] *= scale * torch.logspace(0, 3, gradient.numel(), dtype=DOUBLE).reshape(shape)
    after = transformed(AdaptiveClip(0.1, 1e-2), {"a": gradient}, parameters={"a": weights})
    torch.testing.assert_close(after["a"], clipped_by_units(weights, gradient, 0.1, 1e-2), rtol=1e-12, atol=0.0)


def test_many_tensors_are_clipped_as_each_alone() -> None:
    shapes = [(4, 3), (2, 3), (5, 1), (), (70, 60), (4, 3), (2, 2, 3), (3, 2, 3), (70, 60), (7,), (4, 3)]
    generator = torch.Generator().manual_seed(0)
    parameters, found = {}, {}
    for index, shape in enumerate(shapes):
        weights, gradient = (torch.randn(shape, generator=generator, dtype=DOUBLE) for _ in range(2))
        parameters[f"p{index}"] = weights
        found[f"p{index}"] = gradient * (0.0, 1e-3, 1.0)[index % 3]
    after = transformed(AdaptiveClip(0.1), {**found, "p5": None}, parameters=parameters)
    assert after.pop("p5") is None
    for name, gradient in after.items():
        expected = clipped_by_units(parameters[name], found[name], 0.1, 1e-3)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0.0)
        assert (gradient is found[name]) == torch.equal(expected, found[name])


@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_small_tensors_of_one_shape_take_no_more_calls_than_two_of_them(scale: float) -> None:
    class Calls(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in (torch.linalg.vector_norm, torch.cat, torch._foreach_div)
            return func(*args, **(kwargs or {}))

    def calls(num_tensors: int) -> int:
        parameters = {f"p{i}": torch.ones(4, 3) for i in range(num_tensors)}
        gradients = Gradients(list(parameters), [torch.full((4, 3), scale) for _ in parameters])
        assert gradients.norm > 0.0
        transform = AdaptiveClip().bind(parameters)
        with Calls() as counted:
            transform(gradients, 0)
        assert (gradients.tensors[-1][0, 0] == scale) == (scale < 1.0)  # type: ignore[index]
        return counted.count

    assert 0 < calls(20) == calls(2)


def test_units_within_their_limit_are_left_alone() -> None:
    weights = torch.ones(2, 4, dtype=DOUBLE)
    gradient = torch.stack([torch.full((4,), 0.01, dtype=DOUBLE), torch.full((4,), 5.0, dtype=DOUBLE)])
    after = transformed(AdaptiveClip(0.1), {"a": gradient}, parameters={"a": weights})["a"]
    assert after is not None
    assert torch.equal(after[0], gradient[0])
    torch.testing.assert_close(after[1], torch.full((4,), 0.1, dtype=DOUBLE))


def test_weights_that_are_zero_are_taken_to_have_the_least_norm() -> None:
    after = transformed(AdaptiveClip(0.5, eps=0.01), {"a": tensor(3.0, 4.0)}, parameters={"a": tensor(0.0, 0.0)})
    torch.testing.assert_close(after["a"], tensor(0.003, 0.004))


def test_the_weights_count_as_they_are_at_each_update() -> None:
    weight = nn.Parameter(torch.ones(4))
    transform = AdaptiveClip(0.5).bind({"a": weight})
    for size in (1.0, 10.0):
        weight.data = torch.full((4,), size)
        gradients = Gradients(["a"], [torch.full((4,), 100.0)])
        transform(gradients, 0)
        assert gradients.norm == pytest.approx(size)


def test_a_layer_is_left_out_of_adaptive_clipping_by_a_pattern() -> None:
    found, parameters = drawn(0, scale=100.0), drawn(1)
    after = transformed(AdaptiveClip(0.01, pattern="^(?!head[.])"), found, parameters=parameters)
    assert {name for name in found if after[name] is found[name]} == {"head.weight", "head.bias"}


def test_empty_parameters_are_passed_over() -> None:
    found = {"a": torch.zeros(0, 3), "b": torch.full((2, 2), 9.0)}
    after = transformed(AdaptiveClip(), found, parameters={"a": torch.zeros(0, 3), "b": torch.ones(2, 2)})
    assert after["a"] is found["a"]
    assert float(after["b"].max()) < 1.0  # type: ignore[union-attr]


# Several


def halve_first(gradients: Gradients, step: int) -> None:
    """A transform of one's own, as a plain function."""
    gradients.multiply({0: 0.5 ** (step + 1)})


@pytest.mark.parametrize(
    ("transforms", "moved"),
    [
        ([ScaleGradients({"weight": 2.0}), ClipNorm(1.0)], 1.0),
        ([ClipNorm(1.0), ScaleGradients({"weight": 2.0})], 2.0),
        ([ClipGlobalNorm(1.0), ScaleGradients({"weight": 2.0}), ClipGlobalNorm(1.5)], 1.5),
        ([halve_first], 5.0),
        ([halve_first, ClipValue(3.5)], math.hypot(3.0, 3.5)),
        ([ClipValue(7.0), halve_first], math.hypot(3.0, 3.5)),
        ([], 10.0),
    ],
)
def test_transforms_work_in_the_order_of_their_list(transforms: list[Any], moved: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    state = ls.TrainState(model, ls.optim.SGD(1.0), gradient_transforms=transforms)
    outcome = state.apply(Attempt([torch.tensor([[6.0, 8.0]])], (), {"loss": 1.0}))
    assert float(model.weight.detach().norm()) == pytest.approx(moved)
    assert outcome.gradient_norm == 10.0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*ALL, ClipNorm(0.5, "bias"), halve_first]), max_size=5), st.floats(1e-3, 1e3))
def test_any_list_of_transforms_is_one_after_the_other(transforms: list[Any], scale: float) -> None:
    found, parameters = drawn(5), drawn(6)
    together = Gradients(list(found), [g * scale for g in found.values()], divisor=scale)
    apart: Mapping[str, Tensor | None] = found
    for transform in transforms:
        bind_transform(transform, parameters)(together, 1)
        apart = transformed(transform, apart, parameters=parameters, step=1)
    tensors, divisor, _ = together.to_divide()
    after = {name: None if g is None else g / divisor for name, g in zip(found, tensors, strict=True)}
    assert_close(after, apart, rtol=1e-10)


class TimesTen:
    """A value of one's own."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place

    def __repr__(self) -> str:
        return f"TimesTen(in_place={self.in_place})"

    def bind(self, parameters: Mapping[str, Tensor]) -> Callable[[Gradients, int], None]:
        return self

    def __call__(self, gradients: Gradients, step: int) -> None:
        if self.in_place:
            for gradient in gradients.tensors:
                if gradient is not None:
                    gradient.mul_(10.0)
        gradients.put({i: g.mul(10.0) for i, g in enumerate(gradients.tensors) if g is not None})


def doubled_in_place(gradients: Gradients, step: int) -> None:
    gradients.tensors[1].mul_(2.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (doubled_in_place, r"changed the gradient of 'b' in place.*\n.*doubled_in_place\n.*others.*\n.*gradients\.put"),
        (TimesTen(in_place=True), r"changed the gradient of 'a' in place.*\n.*TimesTen\(in_place=True\)"),
    ],
)
@pytest.mark.parametrize("divisor", [1.0, 2.0])
def test_a_transform_that_changes_a_gradient_in_place_is_refused(transform: Any, message: str, divisor: float) -> None:
    gradients = Gradients(["a", "b"], [tensor(1.0), tensor(1.0)], divisor=divisor)
    with pytest.raises(ls.InputError, match=message):
        bind_transform(transform, {})(gradients, 0)


def test_a_value_of_ones_own_puts_others_in_the_place_of_gradients() -> None:
    found = {"a": tensor(1.0), "b": None}
    assert transformed([TimesTen(in_place=False)] * 2, found) == {"a": tensor(100.0), "b": None}


@pytest.mark.parametrize("puts_it", [False, True])
def test_a_tensor_that_others_hold_is_not_used_up_by_the_update(puts_it: bool) -> None:
    constant = torch.full((1, 2), 8.0)
    put: list[Any] = [lambda gradients, step: gradients.put({0: constant})] if puts_it else []
    model = nn.Linear(2, 1, bias=False)
    state = ls.TrainState(model, ls.optim.SGD(1.0), gradient_transforms=[*put, ClipGlobalNorm(1.0)])
    state.apply(Attempt([torch.ones(1, 2) if puts_it else constant], (), {"loss": 1.0}))
    assert state.kernels == "fused"
    assert constant.tolist() == [[8.0, 8.0]]


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaleGradients({}), r"nothing to multiply gradients by.*\n.*{}\n.*at least one pattern.*\n.*leave"),
        (lambda: ScaleGradients(3), r"multipliers is of the wrong type.*\n.*int\n.*by pattern\n.*ScaleGradients\({"),
        (lambda: ScaleGradients([("a", 1.0)]), r"multipliers is of the wrong type.*\n.*list"),
        (lambda: ScaleGradients({"a": "2"}), r"multiplier of 'a' is of the wrong type.*\n.*str\n.*a number, or"),
        (lambda: ScaleGradients({"a": ls.optim.Cosine}), r"multiplier of 'a' is of the wrong type.*\n.*class Cosine"),
        (lambda: ScaleGradients({"a": math.nan}), r"multiplier of 'a' is not finite.*\n.*nan\n.*\n.*correct it"),
        (
            lambda: ScaleGradients({"tail": 1.0}).bind({"a": tensor(1)}),
            "pattern of ScaleGradients matches no parameter",
        ),
        (lambda: ScaleGradients({"a": 1.0, ".": 2}).bind({"a": tensor(1)}), "'a' is matched by two patterns"),
        (lambda: ScaleGradients({tensor(1): 1.0}).bind({"a": tensor(1)}), "pattern of ScaleGradients is of the wrong"),
        (lambda: ClipNorm(1.0, "tail").bind({"a": tensor(1)}), "A pattern of ClipNorm matches no parameter"),
        (
            lambda: AdaptiveClip(pattern=["a", "b"]).bind({"a": tensor(1)}),
            "pattern of AdaptiveClip matches no parameter",
        ),
        (lambda: ClipNorm(0.0), r"max_norm is out of range.*\n.*max_norm=0.0\n.*above 0\n.*largest allowed"),
        (lambda: ClipGlobalNorm(-1.0), r"max_norm is out of range.*\n.*max_norm=-1.0"),
        (lambda: ClipGlobalNorm(math.nan), r"max_norm is out of range.*\n.*max_norm=nan"),
        (
            lambda: ClipGlobalNorm(True),
            r"max_norm is of the wrong type.*\n.*bool\n.*a number\n.*largest allowed",
        ),
        (lambda: ClipValue("1"), r"max_value is of the wrong type.*\n.*str\n.*a number"),
        (lambda: ClipValue(0), r"max_value is out of range.*\n.*max_value=0"),
        (lambda: AdaptiveClip(0.0), r"clip_factor is out of range.*\n.*clip_factor=0.0"),
        (lambda: AdaptiveClip(eps=0.0), r"eps is out of range.*\n.*eps=0.0\n.*above 0\n.*small norm"),
    ],
)
def test_transforms_that_cannot_be_meant_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            None,
            r"multiplier of 'a' after 7 updates cannot be used.*\n.*None, from .*lambda.*\n.*a finite number\n.*step 7",
        ),
        (math.inf, r"multiplier of 'a' after 7 updates cannot be used.*\n.*inf, from .*\n.*a finite number\n"),
        (-math.inf, r"multiplier of 'a' after 7 updates cannot be used.*\n.*-inf, from "),
    ],
)
def test_what_a_function_returns_is_checked(returned: Any, message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        transformed(ScaleGradients({"a": lambda step: returned}), {"a": tensor(1.0)}, step=7)


def test_a_multiplier_may_be_negative_at_some_steps() -> None:
    transform = ScaleGradients({"a": lambda step: -2.0 if step else 1})
    assert transformed(transform, {"a": tensor(1.0)}, step=7) == {"a": tensor(-2.0)}


@pytest.mark.parametrize("wrong", [3, "clip", ClipNorm, ClipGlobalNorm, None])
def test_what_is_no_transform_is_refused(wrong: Any) -> None:
    with pytest.raises(ls.InputError, match=r"This is no gradient transform.*\n.*\n.*ClipGlobalNorm\(10.0\), or a fun"):
        bind_transform(wrong, {"a": tensor(1.0)})
