"""What a step takes of a GPU's memory: less where activations are computed again; and modes of torch.compile."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_nets import BATCH_SIZE, NUM_CLASSES, learned, losses, make_loader, make_state, worker
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.doctor.check_result import results_of
from lockstep.doctor.compute import compute_checks
from lockstep.training.memory import snapshot_of_lack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the memory, or the compiler, of a GPU")


def peak_bytes(patterns: tuple[str, ...]) -> int:
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(8)]
    net = nn.Sequential(nn.Conv2d(3, 32, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, NUM_CLASSES))
    state = ls.TrainState(net.to(worker().device), ls.optim.SGD(0.1))
    images = torch.randn(BATCH_SIZE, 3, 128, 128)
    arrays = ls.data.Arrays({"image": images, "label": torch.arange(BATCH_SIZE) % NUM_CLASSES})
    loader = ls.data.Loader(arrays, batch_size=BATCH_SIZE)
    towers = ls.Towers(1, activation_checkpointing=patterns)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ls.train(state, losses_of_net, loader, towers, until=ls.Steps(4))
    return torch.cuda.max_memory_allocated() - before


def losses_of_net(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}


def test_activations_that_are_computed_again_take_less_memory() -> None:
    assert peak_bytes((r"^[1-8]$",)) < 0.8 * peak_bytes(())


def test_torchs_snapshot_is_left_where_memory_is_lacking(tmp_path: Path) -> None:
    device, path = worker().device, tmp_path / "memory" / "worker-0.pickle"
    with snapshot_of_lack(path, device):
        kept = torch.zeros(1_000_003, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device=device)
    sizes = [
        block["requested_size"] for part in pickle.loads(path.read_bytes())["segments"] for block in part["blocks"]
    ]
    assert len(kept) in sizes


def test_the_doctor_tries_each_gpu_and_tells_its_memory() -> None:
    machine, *devices = results_of({"devices": compute_checks()["devices"]})
    assert machine.numbers["accelerators"] == len(devices) == torch.cuda.device_count()
    for each in devices:
        assert each.verdict != "fails", each
        assert 0 < each.numbers["free_bytes"] <= each.numbers["bytes"]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.filterwarnings("ignore:Not enough SMs")
def test_a_compiled_model_trains_as_the_plain_one_does(mode: Any) -> None:
    """With two towers, and an attempt in the midst that changes nothing."""
    worker()
    found = []
    for towers in (ls.Towers(2), ls.Towers(2, compile=True, compile_mode=mode)):
        state = make_state(nonfinite="skip")
        state.model[8].p = 0.0
        ls.train(state, losses, make_loader({50: float("nan")}), towers, until=ls.Steps(8))
        assert state.num_skipped == 1
        found.append(learned(state))
    plain, compiled = found
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=0.02, atol=1e-3, msg=name)
