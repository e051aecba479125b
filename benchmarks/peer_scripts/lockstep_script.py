"""Ours: run by `lockstep run`."""

import torch
from torch_parts import final_loss, loss, net
from turns import WORKLOADS, Turns, arrays, parsed

import lockstep as ls


def losses(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"cross_entropy": loss(model, batch["image"], batch["label"])}


arguments = parsed()
workload = WORKLOADS[arguments.workload]
here = ls.join()
assert here.num_workers == arguments.num_workers
state = ls.TrainState(net(arguments), ls.optim.SGD(workload.lr, momentum=workload.momentum))
loader = ls.data.Loader(
    ls.data.Arrays({name: torch.from_numpy(values) for name, values in arrays(arguments).items()}),
    batch_size=workload.batch_size * here.num_workers,
    order="sequential",
)
towers = ls.Towers(precision=arguments.precision, channels_last=True, compile=arguments.compile)
turns = Turns(is_chief=here.is_chief)
turns.begin(torch=torch.__version__)
for _ in ls.train_steps(state, losses, loader, towers, until=ls.Steps(arguments.steps)):
    turns.made_step()
turns.end(final_loss(arguments, state.model))
