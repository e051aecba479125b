"""Checkpoints of a run on a GPU: none is torn, and an exact run that was stopped twice ends with the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from gpu_nets import EXACT, everything, losses, make_loader, make_state, worker

import lockstep as ls
from lockstep.checkpoints.store import Store

STEPS = 12


def files(workdir: Path) -> dict[str, bytes]:
    """The tensors and values of all checkpoints; the manifest alone holds times."""
    found = sorted((workdir / "checkpoints").glob("step-*/*"))
    return {path.relative_to(workdir).as_posix(): path.read_bytes() for path in found if path.name != "manifest.json"}


@pytest.mark.parametrize("stream", ["the default stream", "a stream of the user's own"])
def test_no_checkpoint_is_torn(stream: str, tmp_path: Path) -> None:
    """A save goes on while the next updates are made: it has the bytes of one that waits."""
    device = worker().device
    is_side = stream != "the default stream" and device.type == "cuda"
    found = []
    for in_background in (True, False):
        workdir = tmp_path / f"background-{in_background}"
        context = torch.cuda.stream(torch.cuda.Stream()) if is_side else nullcontext()
        towers, store = ls.Towers(2, precision="bf16"), Store(workdir / "checkpoints")
        with context, ls.Saver(store) as saver:
            state, loader = make_state(**everything()), make_loader()
            for _ in ls.train_steps(state, losses, loader, towers, EXACT, until=ls.Steps(STEPS)):
                if in_background:
                    saver.save(state, loader)
                else:
                    ls.save(state, loader, store)
        found.append(files(workdir))
    assert found[0] == found[1]
    assert len(found[0]) > STEPS


def exact_run(workdir: Path, *ends: int) -> dict[str, bytes]:
    """A run that is stopped and resumed at each of these steps but the last."""
    for end in ends:
        state, loader = make_state(**everything()), make_loader()
        ls.resume(state, loader, workdir)
        towers = ls.Towers(2, precision="bf16", channels_last=True)
        ls.train(state, losses, loader, towers, EXACT, until=ls.Steps(end))
        ls.save(state, loader, workdir)
    newest = f"step-{ends[-1]:08d}"
    return {path: data for path, data in files(workdir).items() if newest in path}


def test_an_exact_run_that_was_resumed_twice_ends_with_the_same_bits(tmp_path: Path) -> None:
    worker()
    assert exact_run(tmp_path / "whole", STEPS) == exact_run(tmp_path / "twice", 4, 9, STEPS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU every operator is deterministic")
def binned(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    """A loss with an operator that has no deterministic algorithm on CUDA devices."""
    logits = model(batch["image"])
    return {"sum": logits.sum() + 0 * torch.histc(logits.detach(), bins=4).sum()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU every operator is deterministic")
def test_an_operator_without_a_deterministic_algorithm_is_named() -> None:
    worker()
    reports = ls.train_steps(make_state(), binned, make_loader(), exchange=EXACT)
    with pytest.raises(ls.InputError, match=r"histc.* has no deterministic algorithm"):
        next(reports)
