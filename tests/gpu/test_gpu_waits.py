"""The host never waits for a GPU in a step of `train_steps`, nor for a micro-batch of an evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_calls import counted
from gpu_nets import (
    BATCH_SIZE,
    EXACT,
    Decoded,
    assert_equal,
    counts,
    everything,
    learned,
    losses,
    make_loader,
    make_state,
    summed_losses,
    worker,
)
from torch import Tensor, nn

import lockstep as ls

WARM_UP, STEPS = 4, 4
ROWS: dict[str, tuple[ls.Towers, dict[str, Any]]] = {
    "one tower": (ls.Towers(1), {}),
    "four towers": (ls.Towers(4), {}),
    "first statistics": (ls.Towers(4, batch_norm="first"), {}),
    "last statistics": (ls.Towers(4, batch_norm="last"), {}),
    "no statistics": (ls.Towers(4, batch_norm="none"), {}),
    "synchronized statistics": (ls.Towers(4, batch_norm="sync"), {}),
    "bf16, channels_last": (ls.Towers(1, precision="bf16", channels_last=True), {}),
    "fp16": (ls.Towers(2, precision="fp16"), {}),
    "everything": (ls.Towers(2, precision="bf16", channels_last=True), everything()),
    "RMSProp": (ls.Towers(1), {"optimizer": ls.optim.RMSProp(1e-3, momentum=0.9)}),
    "LAMB": (ls.Towers(1), {"optimizer": ls.optim.LAMB(0.01)}),
    "clips of each": (ls.Towers(1), {"gradient_transforms": [ls.optim.ClipNorm(0.1), ls.optim.AdaptiveClip(0.01)]}),
    "skips": (ls.Towers(1), {"nonfinite": "skip"}),
    "compiled": (ls.Towers(1, compile=True), {}),
}


@contextmanager
def no_waits() -> Iterator[None]:
    """Torch raises an error where the host would wait; on a CPU the tests do."""
    if not torch.cuda.is_available():
        with counted(refuse_waits=True):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("row", "counted_losses"),
    [
        *((row, False) for row in ROWS),
        *(pytest.param(row, True, marks=[pytest.mark.slow] * (row != "everything")) for row in ROWS),
    ],
    ids=lambda value: value if isinstance(value, str) else "sums" if value else "means",
)
def test_a_step_never_waits(row: str, counted_losses: bool) -> None:
    worker()
    towers, options = ROWS[row]
    if towers.compile and not torch.cuda.is_available():
        pytest.skip("to compile for a CPU takes long")
    function, count = (summed_losses, counts) if counted_losses else (losses, None)
    reports = ls.train_steps(make_state(**options), function, make_loader(), towers, counts=count)
    for _ in range(WARM_UP):
        next(reports)
    with no_waits():
        for _ in range(STEPS):
            report = next(reports)
    assert report.step == WARM_UP + STEPS
    reports.close()


def test_loader_processes_that_start_after_cuda_give_the_same_batches() -> None:
    """They are forked, prefetch, and their batches are copied beside the step: what is learned tells."""
    worker()
    found = []
    for reader, num_processes in ((ls.data.Arrays, 0), (Decoded, 2)):
        state, loader = make_state(), make_loader(reader=reader, num_processes=num_processes)
        ls.train(state, losses, loader, ls.Towers(1), EXACT, until=ls.Steps(3 * len(loader.reader) // BATCH_SIZE))
        found.append(learned(state))
    assert_equal(*found)


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    logits = model(batch["image"])
    return {"top1": ls.metrics.in_top_k(logits, batch["label"]), "cells": (logits.argmax(1), batch["label"])}


def num_waits(num_examples: int) -> int:
    """The waits of an evaluation, which torch warns of."""
    images = torch.zeros(num_examples, 3, 16, 16)
    loader = ls.data.Loader(
        ls.data.Arrays({"image": images, "label": torch.arange(num_examples) % 10}), batch_size=BATCH_SIZE
    )
    state, metrics = make_state(), {"cells": ls.metrics.ConfusionMatrix(10)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            ls.evaluate(state, score, loader, metrics=metrics)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(map(is_wait, said))


def is_wait(said: warnings.WarningMessage) -> bool:
    """Whether a warning is of a wait, and not torch's notice of what its mode does not detect."""
    return "called a synchronizing" in str(said.message)


def test_notices_of_torch_are_no_errors_and_no_waits() -> None:
    """Torch gives the first with the mode that these tests set, the second where it compiles float32 for Ampere."""
    mode = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    cores = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting"
    for notice in (mode, cores):
        warnings.warn(notice, UserWarning, stacklevel=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.warn(mode, UserWarning, stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
    assert [is_wait(each) for each in said] == [False, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch warns of waits for a GPU alone")
def test_an_evaluation_waits_as_often_for_many_micro_batches_as_for_few() -> None:
    worker()
    assert num_waits(3 * BATCH_SIZE) == num_waits(12 * BATCH_SIZE)


def with_a_plain_number(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found, metrics = losses(model, batch)
    return found, {"one": 1.0, **metrics}


def test_a_plain_number_among_the_metrics_is_reported() -> None:
    worker()
    report = next(ls.train_steps(make_state(), with_a_plain_number, make_loader(), ls.Towers(4)))
    assert report.metrics["one"] == 1.0


def reentered(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """A loss function that waits itself."""
    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
    assert loss.item() > 0
    return {"cross_entropy": loss}


def test_a_wait_of_the_users_own_is_seen() -> None:
    """So that the tests above can fail. The error comes after the report of the batch before, as the docs say."""
    worker()
    reports = ls.train_steps(make_state(), reentered, make_loader(), ls.Towers(1))
    for _ in range(2):
        next(reports)
    with no_waits():
        next(reports)
        with pytest.raises(RuntimeError, match=r"would wait|synchronizing"):
            next(reports)
    reports.close()
