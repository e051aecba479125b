"""What a GPU is called, and which flags of torch's backends a step on it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.towers.backends import backends_of_steps
from lockstep.workers.devices import check_devices, identity

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]


def test_a_gpu_is_known_by_its_uuid_and_described() -> None:
    device = ls.join().device
    assert device.type == "cuda"
    assert len(identity(device)) >= 32
    with pytest.raises(ls.InputError, match="Several workers have the same device"):
        check_devices([identity(device)] * 2)
    described = backends_of_steps(ls.Towers(conv_tf32=False), device, exact=False).described()
    assert described["gpu"] == torch.cuda.get_device_name(device)
    assert described["conv_tf32"] == "off"
    assert "none" not in described.values()


def test_tf32_changes_the_bits_of_a_matrix_product_and_is_put_back() -> None:
    device = ls.join().device
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("TF32 needs Ampere or later")
    left, right = torch.randn(2, 256, 256, device=device)
    plain = left @ right
    with backends_of_steps(ls.Towers(matmul_tf32=True), device, exact=False):
        assert not torch.equal(left @ right, plain)
    assert torch.equal(left @ right, plain)


class Pooled(nn.Module):
    """A convolution, and a pooling whose gradient CUDA has in no deterministic form."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Return the pooled features, shape (batch, 2, 3, 3)."""
        return nn.functional.adaptive_avg_pool2d(self.convolution(images), 3)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["image"]).square().mean()}


def test_an_exact_step_names_an_operator_that_is_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the step calls no cuBLAS, which may have read it already
    state = ls.TrainState(Pooled().to(ls.join().device), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"image": torch.randn(8, 1, 10, 10)}), batch_size=4)
    with pytest.raises(ls.InputError, match="adaptive_avg_pool2d_backward"):
        ls.train(state, losses, loader, exchange=ls.AllReduce(exact=True), until=ls.Steps(1))
    ls.train(state, losses, loader, until=ls.Steps(1))
