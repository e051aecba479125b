"""Tests on a GPU: `make test-gpu`. With LOCKSTEP_GPU_TESTS=cpu they try themselves out on the CPU.

There the package takes the branches of an accelerator, and what a GPU alone can show is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_calls import accelerator

IS_TRIAL = os.environ.get("LOCKSTEP_GPU_TESTS") == "cpu"
NOTICES = (
    "Synchronization debug mode is a prototype feature",
    "TensorFloat32 tensor cores",
    "Warning. Profiler clears events",
    "`torch.jit.script_method` is deprecated",
    "TypedStorage is deprecated",
    "The CUDA Graph is empty",
)
"""How warnings of torch begin that tell of no fault, as regular expressions: those of the sync debug mode, inductor,
its CUDA graphs and the profiler. A colon would end one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and leave them out where there is no GPU; torch's notices are no errors."""
    reason = "needs a GPU: make test-gpu on a machine that has one"
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.process)
            for notice in NOTICES:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{notice}"))
            item.add_marker(pytest.mark.skipif(not (IS_TRIAL or torch.cuda.is_available()), reason=reason))


@pytest.fixture(autouse=True)
def _as_on_an_accelerator() -> Iterator[None]:
    if not IS_TRIAL:
        yield
        return
    with accelerator():
        yield
