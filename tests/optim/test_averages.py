from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.optim import MovingAverage
from lockstep.training.attempt import Attempt

DOUBLE = torch.float64


def averaged(average: MovingAverage, values: list[float]) -> list[float]:
    """The average of one number that starts at the first of the values and takes the others, after each update."""
    parameter = torch.tensor(values[0], dtype=DOUBLE)
    bound = average.bind({"p": parameter}, {})
    averages = [float(bound.tensors["p"])]
    for step, value in enumerate(values[1:], start=1):
        parameter.fill_(value)
        bound.update(step)
        averages.append(float(bound.tensors["p"]))
    return averages


def test_a_constant_decay_averages_from_the_first_value_on() -> None:
    expected = [1.0, 0.9 + 0.1 * 2.0, 0.9 * 1.1 - 0.1 * 4.0]
    assert averaged(MovingAverage(0.9, dynamic=False), [1.0, 2.0, -4.0]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("decay", [0.5001, 0.9, 0.9999])
def test_a_fused_average_has_the_bits_of_torchs_own(decay: float, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (7,), (33, 5), (1000,), (300, 301), (4, 8, 3, 3)]
    sources = [torch.randn(shape, dtype=dtype) * scale for shape in shapes for scale in (1e-20, 1.0, 1e10)]
    sources = [s.to(memory_format=torch.channels_last) if s.ndim == 4 else s for s in sources]
    bound = MovingAverage(decay, dynamic=False).bind({str(i): source for i, source in enumerate(sources)}, {})
    expected = [source.clone() for source in sources]
    for source in sources:
        source.copy_(torch.randn_like(source))
    sources[12][3], sources[-1][0, 0, 0, 0] = math.inf, math.nan
    torch._foreach_lerp_(expected, sources, 1.0 - decay)
    bound.update(1)
    for average, own in zip(bound.tensors.values(), expected, strict=True):
        assert torch.equal(average.nan_to_num(7.0), own.nan_to_num(7.0))


def test_after_a_half_life_the_value_of_before_weighs_half() -> None:
    values = averaged(MovingAverage(half_life_steps=4, dynamic=False), [1.0, *[0.0] * 8])
    assert (values[4], values[8]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert MovingAverage(half_life_steps=1000).decay_at(10**6) == pytest.approx(0.5 ** (1 / 1000))


def test_a_decay_beside_a_half_life_is_refused() -> None:
    message = r"said twice.*\n.*decay=0.5, half_life_steps=4\n.*one of them\n.*leave decay or"
    with pytest.raises(ls.InputError, match=message):
        MovingAverage(0.5, half_life_steps=4)
    with pytest.raises(ls.InputError, match=r"would never move.*\n.*1e\+17"):
        MovingAverage(half_life_steps=1e17)


def test_a_dynamic_decay_grows_with_the_steps_up_to_its_limit() -> None:
    average = MovingAverage(0.5)
    assert [average.decay_at(step) for step in (0, 1, 2, 7, 8, 9, 1000)] == [
        1 / 10,
        2 / 11,
        3 / 12,
        8 / 17,
        0.5,
        0.5,
        0.5,
    ]
    assert MovingAverage(0.5, dynamic=False).decay_at(1) == 0.5
    values = [1.0, 3.0, -2.0, 5.0]
    expected = [1.0]
    for step, value in enumerate(values[1:], start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        expected.append(decay * expected[-1] + (1 - decay) * value)
    assert averaged(average, values) == pytest.approx(expected, rel=1e-12)


def test_the_default_is_that_of_the_inception_trainer() -> None:
    average = MovingAverage()
    assert (average.decay, average.dynamic) == (0.9999, True)
    assert average.decay_at(10**6) == 0.9999


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return dict(model.named_parameters()), dict(model.named_buffers())


def test_statistics_are_averaged_on_request() -> None:
    model = nn.BatchNorm1d(2)
    assert list(MovingAverage().bind(*tensors_of(model)).tensors) == ["weight", "bias"]
    bound = MovingAverage(0.75, dynamic=False, statistics=True).bind(*tensors_of(model))
    assert list(bound.tensors) == ["weight", "bias", "running_mean", "running_var"]
    with torch.no_grad():
        model.weight.fill_(5.0)
        model.running_mean.fill_(8.0)  # type: ignore[union-attr]
        bound.update(1)
    assert bound.tensors["weight"].tolist() == [2.0, 2.0]
    assert bound.tensors["bias"].tolist() == [0.0, 0.0]
    assert bound.tensors["running_mean"].tolist() == [2.0, 2.0]
    assert bound.tensors["running_var"].tolist() == [1.0, 1.0]


def test_a_buffer_that_is_not_finite_at_the_start_is_copied() -> None:
    mask = torch.triu(torch.full((2, 2), -math.inf), diagonal=1)
    buffers = {"mask": mask, "mean": torch.zeros(2), "low": torch.tensor([math.inf], dtype=torch.bfloat16)}
    bound = MovingAverage(0.75, dynamic=False, statistics=True).bind({"p": torch.zeros(1)}, buffers)
    assert list(bound.tensors) == ["p", "mask", "mean", "low"]
    for step in (1, 2):
        buffers["mean"].fill_(4.0 * step)
        bound.update(step)
    assert torch.equal(bound.tensors["mask"], mask)
    assert bound.tensors["mean"].tolist() == [0.75 * 1.0 + 0.25 * 8.0] * 2
    mask[0, 0] = 5.0
    buffers["low"].fill_(3.0)
    bound.update(3)
    assert bound.tensors["mask"].tolist() == [[5.0, -math.inf], [0.0, 0.0]]
    assert bound.tensors["low"].tolist() == [3.0]
    assert bound.tensors["low"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_16_bits_are_kept_in_32(dtype: torch.dtype) -> None:
    parameters = {"low": torch.full((3,), 1.0).to(dtype), "high": torch.ones(2), "double": torch.ones(2, dtype=DOUBLE)}
    bound = MovingAverage(0.999, dynamic=False).bind(parameters, {})
    assert [t.dtype for t in bound.tensors.values()] == [torch.float32, torch.float32, DOUBLE]
    for parameter in parameters.values():
        parameter.fill_(2.0)
    for step in range(1, 11):
        bound.update(step)
    for average in bound.tensors.values():  # a step of 0.001 is lost in bfloat16
        torch.testing.assert_close(average.double(), torch.full_like(average, 2.0 - 0.999**10, dtype=DOUBLE))
    assert parameters["low"].dtype == dtype


def test_an_average_starts_as_a_copy_that_needs_no_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    bound = MovingAverage().bind({"p": parameter}, {})
    assert not bound.tensors["p"].requires_grad
    bound.tensors["p"].fill_(7.0)
    assert parameter.tolist() == [1.0, 1.0]


def state_of(**options: Any) -> ls.TrainState:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    average = MovingAverage(0.5, dynamic=False, **options)
    return ls.TrainState(model, ls.optim.SGD(1.0), average=average)


def attempt(first: Tensor | None, mean: float) -> Attempt:
    statistics = [torch.tensor([mean]), torch.tensor([1.0]), torch.tensor(1)]
    return Attempt([first, torch.zeros(1), torch.zeros(1)], statistics, {"loss": 1.0})


def test_the_average_follows_what_the_update_has_made() -> None:
    state = state_of(statistics=True)
    state.apply(attempt(torch.full((1, 2), 2.0), mean=4.0))
    saved = state.sections()
    assert saved["parameters"]["0.weight"].tolist() == [[-1.0, -1.0]]
    assert saved["average"]["0.weight"].tolist() == [[0.0, 0.0]]
    assert saved["average"]["1.running_mean"].tolist() == [2.0]
    assert "1.running_mean" not in state_of().sections()["average"]


def test_the_average_of_a_parameter_that_stays_goes_on_towards_it() -> None:
    state = state_of()
    state.apply(attempt(torch.full((1, 2), 2.0), mean=0.0))
    state.apply(attempt(None, mean=0.0))
    assert state.sections()["parameters"]["0.weight"].tolist() == [[-1.0, -1.0]]
    assert state.sections()["average"]["0.weight"].tolist() == [[-0.5, -0.5]]


def test_a_run_without_average_keeps_none() -> None:
    state = ls.TrainState(nn.Linear(2, 1), ls.optim.SGD(1.0))
    assert not state.sections()["average"]


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_decay_outside_of_zero_to_one_is_refused(decay: float) -> None:
    with pytest.raises(ls.InputError, match=r"decay is out of range.*\n.*\n.*above 0, below 1\n.*0.9999"):
        MovingAverage(decay)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MovingAverage("x"), r"decay is of the wrong type.*\n.*str\n.*a number\n.*0.9999"),
        (lambda: MovingAverage(True), r"decay is of the wrong type.*\n.*bool"),
        (lambda: MovingAverage(dynamic="no"), r"dynamic is of the wrong type.*\n.*str\n.*True or False"),
        (lambda: MovingAverage(statistics=1), r"statistics is of the wrong type.*\n.*int\n.*True or False"),
    ],
)
def test_an_average_that_cannot_be_meant_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make()


def test_the_average_of_a_buffer_is_its_own_where_the_weights_are_laid_out_anew() -> None:
    model = nn.Conv2d(3, 4, 3)
    model.register_buffer("window", torch.rand(2, 3, 4, 4))
    state = ls.TrainState(model, ls.optim.SGD(0.1), average=MovingAverage(0.9, dynamic=False, statistics=True))
    state.to_channels_last()
    average = state._average
    assert average is not None
    expected = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with torch.no_grad():
        for name, source in {**state.parameters, "window": model.window}.items():
            source.add_(torch.rand(source.shape))
            expected[name].lerp_(source, 0.1)
        average.update(1)
    assert all(torch.allclose(average.tensors[name], expected[name]) for name in expected)
