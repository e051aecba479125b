"""What is launched on a GPU, counted by torch's profiler: as few as `device_calls` counts on CPU tensors, or fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from device_calls import counted, foreach_launches
from gpu_nets import BATCH_SIZE, NUM_CLASSES, losses, make_loader, worker
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import lockstep as ls
from lockstep.tensors import copy_all

NUM_LAYERS, MORE_LAUNCHES = 50, 80
"""A step has 41 launches more than one by hand, as counted on a CPU. The rest is room for what a GPU alone counts:
fills of memory, reductions of two kernels. One launch more for each layer would be 50, and so beyond it."""


def num_launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that a call enqueues."""
    if not torch.cuda.is_available():
        with counted() as calls:
            call()
        return calls.num_launches
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def make_net() -> nn.Sequential:
    """Many layers of few numbers, so that what is done for each parameter or buffer alone shows."""
    layers = [[nn.Conv2d(3 if not i else 8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()] for i in range(NUM_LAYERS)]
    flat = [module for layer in layers for module in layer]
    return nn.Sequential(*flat, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, NUM_CLASSES)).to(worker().device)


def steps_by_hand() -> Iterator[None]:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    for batch in ls.batches(make_loader(), ls.Towers(1)):
        optimizer.zero_grad()
        losses(net, batch)[0]["cross_entropy"].backward()
        optimizer.step()
        yield


def of_one_step(run: Iterator[object]) -> int:
    for _ in islice(run, 4):
        pass
    return num_launches(lambda: next(run))


def test_a_step_launches_little_beside_its_model() -> None:
    by_hand = of_one_step(steps_by_hand())
    state = ls.TrainState(make_net(), ls.optim.SGD(0.01, momentum=0.9))
    ours = of_one_step(ls.train_steps(state, losses, make_loader(), ls.Towers(1)))
    assert by_hand > 6 * NUM_LAYERS
    assert ours <= by_hand + MORE_LAUNCHES


def test_lists_are_copied_in_as_few_launches_as_are_counted() -> None:
    device = worker().device
    floats = [torch.rand(BATCH_SIZE, device=device) for _ in range(150)]
    integers = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(70)]
    expected = sum(foreach_launches("_foreach_copy_", [each, each], returns_new=False) for each in (floats, integers))
    values = [*floats, *integers]
    kept = [torch.empty_like(value) for value in values]
    assert num_launches(lambda: copy_all(kept, values)) <= expected == 5
