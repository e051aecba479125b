"""The update gives the numbers that TensorFlow, TF-Slim and Keras gave: optimizers, schedules, gradient transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import update_inputs as inputs
from torch import Tensor
from update_reference import BOTH, LATER_TOLERANCE, RECORDED, TOLERANCE, Named, Settings, assert_close, tensors

from lockstep import optim
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import FTRL, Adadelta
from lockstep.optim.rules import BoundOptimizer, Optimizer
from lockstep.optim.schedules import Schedule
from lockstep.optim.transforms import GradientTransform
from lockstep.towers.tower_outputs import densified, rows_of


def test_the_inputs_are_those_that_were_recorded_with() -> None:
    assert inputs.digest() == RECORDED["about"]["inputs_sha256"]


# Optimizers -----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Settings], Optimizer]] = {
    "GradientDescentOptimizer": lambda s: optim.SGD(s["learning_rate"]),
    "MomentumOptimizer": lambda s: optim.SGD(
        s["learning_rate"], momentum=s["momentum"], nesterov=s.get("use_nesterov", False)
    ),
    "RMSPropOptimizer": lambda s: optim.RMSProp(
        s["learning_rate"],
        alpha=s["decay"],
        eps=s["epsilon"],
        momentum=s["momentum"],
        centered=s.get("centered", False),
    ),
    "AdamOptimizer": lambda s: optim.Adam(s["learning_rate"], (s["beta1"], s["beta2"]), s["epsilon"], epsilon_hat=True),
    "AdagradOptimizer": lambda s: optim.Adagrad(
        s["learning_rate"], initial_accumulator_value=s["initial_accumulator_value"], eps=0.0
    ),
    "AdadeltaOptimizer": lambda s: Adadelta(s["learning_rate"], s["rho"], s["epsilon"]),
    "FtrlOptimizer": lambda s: FTRL(
        s["learning_rate"],
        s["learning_rate_power"],
        s["initial_accumulator_value"],
        l1=s["l1_regularization_strength"],
        l2=s["l2_regularization_strength"],
        l2_shrinkage=s.get("l2_shrinkage_regularization_strength", 0.0),
    ),
    # Keras adds epsilon to the root as it is in AdamW, and to the corrected one in Lamb, which spares no vectors.
    "AdamW": lambda s: optim.AdamW(
        s["learning_rate"],
        (s["beta_1"], s["beta_2"]),
        s["epsilon"],
        weight_decay=s["weight_decay"],
        epsilon_hat=True,
    ),
    "Lamb": lambda s: optim.LAMB(
        s["learning_rate"], (s["beta_1"], s["beta_2"]), s["epsilon"], weight_decay=0.0, skip_vectors=False
    ),
}


def assert_same_path(
    optimizer: Any,
    steps: Sequence[Gradients],
    recorded: Mapping[str, Named],
    dtype: str,
    transforms: Sequence[GradientTransform] = (),
) -> None:
    """Update by update: after each recorded step our parameters are those recorded."""
    initial = inputs.initial(dtype)
    parameters = tensors({name: initial[name] for name in steps[0].names})
    bound, stages = optimizer.bind(parameters), [transform.bind(parameters) for transform in transforms]
    for step, gradients in enumerate(steps):
        for stage in stages:
            stage(gradients, step)
        bound.update(gradients, step)
        expected = recorded.get(str(step + 1), {})
        for name, value in expected.items():
            tolerance = (LATER_TOLERANCE if step else TOLERANCE)[dtype]
            # In float64 the way that each has gone: where the update is small, the start would hide what is wrong.
            start = initial[name] if dtype == "float64" else 0.0
            scale = size_of_terms(optimizer, bound, name, step)
            assert_close(parameters[name].numpy() - start, np.array(value, dtype) - start, tolerance, scale)


def size_of_terms(optimizer: Any, bound: BoundOptimizer, name: str, step: int) -> float:
    """The largest number of which a parameter is the difference: this is what is rounded, however little is left of it.

    FTRL takes l1 off its linear term, and divides what is left.
    """
    if not isinstance(optimizer, FTRL):
        return 0.0
    return float((bound.slots()[f"linear/{name}"].abs() / ftrl_divisor(optimizer, bound, name, step)).max())


def ftrl_divisor(optimizer: FTRL, bound: BoundOptimizer, name: str, step: int) -> Tensor:
    root = bound.slots()[f"accumulator/{name}"] ** -optimizer.learning_rate_power
    return root / bound.learning_rates(step)[""] + 2 * optimizer.l2


def test_the_tolerance_allows_one_rounding_of_what_cancels() -> None:
    """Another processor may round FTRL's linear term to its neighbour, of which nearly all is taken off here."""
    case = RECORDED["optimizers"]["ftrl_large_l1"]
    optimizer = OPTIMIZERS[case["kind"]](case["kwargs"])
    assert isinstance(optimizer, FTRL)
    parameters = tensors(inputs.initial("float32"))
    bound = optimizer.bind(parameters)
    bound.update(dense_steps("float32")[0], 0)
    linear = bound.slots()["linear/biases"]
    neighbour = torch.nextafter(linear, torch.tensor(torch.inf))
    solution = neighbour.clamp(-optimizer.l1, optimizer.l1) - neighbour
    rounded = solution / ftrl_divisor(optimizer, bound, "biases", 0)
    given = rounded, parameters["biases"], TOLERANCE["float32"]
    assert_close(*given, size_of_terms(optimizer, bound, "biases", 0))
    with pytest.raises(AssertionError):
        assert_close(*given)


def dense_steps(dtype: str) -> list[Gradients]:
    return [Gradients(list(values), list(tensors(values).values())) for values in inputs.gradients(dtype)]


def sparse_steps(dtype: str, *, repeated: bool) -> list[Gradients]:
    return [sparse_embedding(*pair) for pair in inputs.sparse_gradients(dtype, repeated=repeated)]


def sparse_embedding(rows: inputs.Indices, values: inputs.Array) -> Gradients:
    """The embedding's gradient as the exchange hands it on: rows that come twice are added up."""
    sparse = torch.sparse_coo_tensor(
        torch.from_numpy(rows[None]), torch.from_numpy(values), inputs.SHAPES["embedding"], check_invariants=True
    )
    unique, sums = rows_of(*densified(sparse))
    return Gradients(["embedding"], [sums], rows={0: unique})


@BOTH
@pytest.mark.parametrize("name", RECORDED["optimizers"])
def test_optimizer(name: str, dtype: str) -> None:
    case = RECORDED["optimizers"][name]
    assert_same_path(OPTIMIZERS[case["kind"]](case["kwargs"]), dense_steps(dtype), case[dtype], dtype)


@BOTH
@pytest.mark.parametrize("name", RECORDED["sparse_optimizers"])
def test_optimizer_with_sparse_gradients(name: str, dtype: str) -> None:
    case = RECORDED["sparse_optimizers"][name]
    steps = sparse_steps(dtype, repeated=True)
    assert_same_path(OPTIMIZERS[case["kind"]](case["kwargs"]), steps, case[dtype], dtype)


@BOTH
def test_momentum_at_the_rate_of_a_schedule(dtype: str) -> None:
    case = RECORDED["scheduled_momentum"]
    rate = SCHEDULES["exponential_decay"](case["exponential_decay"])
    optimizer = OPTIMIZERS[case["kind"]]({"learning_rate": rate, **case["kwargs"]})
    assert_same_path(optimizer, dense_steps(dtype), case[dtype], dtype)


# Schedules ------------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Settings], Schedule]] = {
    "exponential_decay": lambda s: optim.Exponential(
        s["learning_rate"], s["decay_steps"], s["decay_rate"], staircase=s["staircase"]
    ),
    "polynomial_decay": lambda s: optim.Polynomial(
        s["learning_rate"], s["decay_steps"], s["end_learning_rate"], power=s["power"], cycle=s["cycle"]
    ),
    "cosine_decay": lambda s: optim.Cosine(s["learning_rate"], s["decay_steps"], final=s["alpha"] * s["learning_rate"]),
    # TensorFlow's value still holds at the boundary; ours, as Object Detection's, is the next one there.
    "piecewise_constant": lambda s: optim.PiecewiseConstant(tuple(b + 1 for b in s["boundaries"]), tuple(s["values"])),
}


@BOTH
@pytest.mark.parametrize("name", RECORDED["schedules"])
def test_schedule(name: str, dtype: str) -> None:
    case = RECORDED["schedules"][name]
    schedule = SCHEDULES[case["kind"]](case["kwargs"])
    assert_close([schedule(step) for step in inputs.SCHEDULE_STEPS], case[dtype], TOLERANCE[dtype])


# Gradients ------------------------------------------------------------------------------------------------------------

TRANSFORMS: dict[str, GradientTransform] = {
    "clip_gradient_norms": optim.ClipNorm(inputs.CLIP_NORM),
    "multiply_gradients": optim.ScaleGradients(inputs.MULTIPLIERS),
    "clip_by_global_norm": optim.ClipGlobalNorm(inputs.CLIP_NORM),
    "clip_by_value": optim.ClipValue(inputs.CLIP_NORM),
}
TRAIN_OP = (TRANSFORMS["multiply_gradients"], TRANSFORMS["clip_gradient_norms"])
OF_EMBEDDING = {
    **TRANSFORMS,
    "multiply_gradients": optim.ScaleGradients({"embedding": inputs.MULTIPLIERS["embedding"]}),
}


def transformed(transform: GradientTransform, gradients: Gradients) -> dict[str, Tensor]:
    transform.bind(dict.fromkeys(gradients.names, torch.empty(0)))(gradients, 0)
    return {n: g for n, g in zip(gradients.names, gradients.tensors, strict=True) if g is not None}


@BOTH
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("size", ["long", "short", "zero"])
def test_transform(size: str, kind: str, dtype: str) -> None:
    given, recorded = tensors(inputs.single_gradients(dtype)[size]), RECORDED["gradients"][dtype][size]
    gradients = Gradients(list(given), list(given.values()))
    assert gradients.norm == pytest.approx(recorded["global_norm"], rel=TOLERANCE[dtype])
    for name, value in transformed(TRANSFORMS[kind], gradients).items():
        assert_close(value, recorded[kind][name], TOLERANCE[dtype])


@BOTH
@pytest.mark.parametrize("kind", ["clip_gradient_norms", "multiply_gradients", "clip_by_global_norm"])
def test_transform_of_a_sparse_gradient(kind: str, dtype: str) -> None:
    rows, values = inputs.sparse_sets(dtype)["unique"]
    gradients, order = sparse_embedding(rows, values), np.argsort(rows)
    expected = np.array(RECORDED["gradients"][dtype]["unique"][kind]["embedding"])[order]
    assert_close(transformed(OF_EMBEDDING[kind], gradients)["embedding"], expected, TOLERANCE[dtype])


@BOTH
def test_a_row_that_comes_twice_is_added_up_before_the_clip_and_not_after(dtype: str) -> None:
    rows, values = inputs.sparse_sets(dtype)["duplicated"]
    recorded = np.array(RECORDED["gradients"][dtype]["duplicated"]["clip_gradient_norms"]["embedding"])
    ours = transformed(TRANSFORMS["clip_gradient_norms"], sparse_embedding(rows, values))["embedding"]
    # TensorFlow's is clipped as if the two were rows of their own, and so the sum of them may be shorter or longer.
    assert np.linalg.norm(recorded) == pytest.approx(inputs.CLIP_NORM)
    theirs = np.stack([recorded[1], recorded[0] + recorded[2]])
    assert_close(ours, theirs * (inputs.CLIP_NORM / np.linalg.norm(theirs)), TOLERANCE[dtype])


@BOTH
def test_train_op(dtype: str) -> None:
    case = RECORDED["train_op"]["momentum"]
    optimizer = optim.SGD(case["learning_rate"], momentum=case["momentum"])
    assert_same_path(optimizer, dense_steps(dtype), case[dtype], dtype, TRAIN_OP)


@BOTH
def test_train_op_with_sparse_gradients(dtype: str) -> None:
    case = RECORDED["train_op"]["sparse"]
    transforms = (OF_EMBEDDING["multiply_gradients"], OF_EMBEDDING["clip_gradient_norms"])
    steps = sparse_steps(dtype, repeated=False)
    assert_same_path(optim.SGD(case["learning_rate"]), steps, case[dtype], dtype, transforms)
