"""First values against those that TensorFlow and TF-Slim drew: the same laws, on torch's layouts."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from lockstep.weights.initializers import (
    Distribution,
    Initializer,
    Mode,
    TruncatedNormal,
    VarianceScaling,
    Xavier,
    Zeros,
    fill,
)

GOLDEN = Path(__file__).parent / "initializers_golden.json.gz"
MIN_VALUES = 200_000
# How many standard errors two samples of one law may be apart; the seeds are fixed.
SIGMAS = 4.5

CASES: dict[str, Initializer] = {
    "truncated_normal(0.1)": TruncatedNormal(0.1),
    "truncated_normal(0.5, 2)": TruncatedNormal(0.5, mean=2),
    "xavier normal": Xavier(uniform=False),
    "slim.conv2d weights": Xavier(),
    "slim.fully_connected weights": Xavier(),
    "variance_scaling(vector)": VarianceScaling(distribution="uniform"),
} | {
    f"variance_scaling({mode}, {distribution}) {layer}": VarianceScaling(2.0, mode, distribution)
    for mode in get_args(Mode)
    for distribution in get_args(Distribution)
    for layer in ("convolution", "dense")
}


@cache
def golden() -> Any:
    return json.loads(gzip.decompress(GOLDEN.read_bytes()))


def of_torch(shape: list[int]) -> list[int]:
    """The shape in torch's layout: outputs and inputs first."""
    return [*shape[:-3:-1], *shape[:-2]] if len(shape) > 1 else shape


def drawn(initializer: Initializer, shape: list[int]) -> np.ndarray[Any, Any]:
    tensor = torch.empty(of_torch(shape))
    values: list[np.ndarray[Any, Any]] = []
    while sum(each.size for each in values) < MIN_VALUES:
        fill(initializer, "layer.weight", tensor, seed=len(values))
        values.append(tensor.flatten().double().numpy().copy())
    return np.concatenate(values)


@pytest.mark.parametrize("name", CASES)
def test_the_law_is_that_of_tensorflow(name: str) -> None:
    expected = golden()[name]
    values = drawn(CASES[name], expected["shape"])
    error = SIGMAS * np.sqrt(1 / values.size + 1 / expected["num"])
    assert abs(values.mean() - expected["mean"]) < error * expected["stddev"]
    assert values.std() == pytest.approx(expected["stddev"], rel=error)
    shares = np.arange(1, len(expected["quantiles"]) + 1) / (len(expected["quantiles"]) + 1)
    found = np.searchsorted(np.sort(values), expected["quantiles"]) / values.size
    assert (np.abs(found - shares) < error * np.sqrt(shares * (1 - shares))).all()
    if "untruncated" not in name:
        width = expected["greatest"] - expected["least"]
        assert values.min() == pytest.approx(expected["least"], abs=2e-4 * width)
        assert values.max() == pytest.approx(expected["greatest"], abs=2e-4 * width)


@pytest.mark.parametrize("name", ["slim.conv2d biases", "slim.fully_connected biases"])
def test_first_biases_are_zero(name: str) -> None:
    expected = golden()[name]
    assert expected["least"] == expected["greatest"] == 0
    tensor = torch.ones(expected["shape"])
    fill(Zeros(), "layer.bias", tensor, seed=0)
    assert not tensor.any()


def test_every_case_is_tested() -> None:
    assert golden().keys() == {*CASES, "slim.conv2d biases", "slim.fully_connected biases"}
