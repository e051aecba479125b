"""Single operations give the numbers that TensorFlow gave (recorded by make_mnist_golden.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mnist_reference import golden

from lockstep.metrics.classification import in_top_k
from lockstep.models.mnist import MnistNet, local_response_norm
from lockstep.optim.gradients import Gradients
from lockstep.optim.optimizers import SGD

RECORDED = golden("operations_golden.json.gz")


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_top_k_counts_ties_and_what_is_not_finite_as_tensorflow_does(k: int, dtype: torch.dtype) -> None:
    recorded = RECORDED["in_top_k"]
    scores = torch.tensor([[float(score) for score in row] for row in recorded["scores"]], dtype=dtype)
    hits = in_top_k(scores, torch.tensor(recorded["labels"]), k)
    assert hits.tolist() == recorded["expected"][str(k)]


def test_local_response_norm() -> None:
    recorded = {name: torch.tensor(value) for name, value in RECORDED["local_response_normalization"].items()}
    images = recorded["inputs"].permute(0, 3, 1, 2).contiguous().requires_grad_()
    outputs = local_response_norm(images).permute(0, 2, 3, 1)
    torch.testing.assert_close(outputs, recorded["outputs"], rtol=2e-6, atol=0)
    (gradients,) = torch.autograd.grad((outputs * recorded["output_weights"]).sum(), images)
    torch.testing.assert_close(gradients.permute(0, 2, 3, 1), recorded["gradients"], rtol=2e-5, atol=1e-6)


def test_initial_weights_have_tensorflows_distribution() -> None:
    recorded = RECORDED["truncated_normal"]
    drawn = MnistNet(generator=torch.Generator().manual_seed(0)).local3.weight.detach().double().flatten() / 0.04
    assert recorded["largest"] <= 2
    assert drawn.abs().max() <= 2 + 1e-6
    assert drawn.std().item() == pytest.approx(recorded["std"], rel=2e-3)
    quantiles = np.quantile(drawn.numpy(), recorded["probabilities"])
    np.testing.assert_allclose(quantiles, recorded["quantiles"], atol=6e-3)


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_nesterov_follows_a_rate_that_changes_at_each_step(whose: str) -> None:
    recorded = RECORDED["nesterov"]
    parameter = torch.nn.Parameter(torch.tensor(recorded["start"], dtype=torch.float64))
    theirs = torch.optim.SGD([parameter], lr=1.0, momentum=recorded["momentum"], nesterov=True)
    rates = recorded["rates"]
    ours = SGD(rates.__getitem__, momentum=recorded["momentum"], nesterov=True).bind({"variable": parameter.data})
    for step, (gradient, expected) in enumerate(zip(recorded["gradients"], recorded["path"], strict=True)):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        if whose == "torch":
            theirs.param_groups[0]["lr"] = rates[step]
            theirs.step()
        else:
            ours.update(Gradients(["variable"], [parameter.grad]), step)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-14)
