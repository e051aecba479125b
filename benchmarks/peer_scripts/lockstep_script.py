"""Ours: run by `lockstep run`."""

import torch
from torch.nn import functional as F
from torch_parts import final_loss, loss, net, outputs
from turns import FIRST_STEPS, WORKLOADS, Places, Turns, arrays, parsed

import lockstep as ls


def losses(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"cross_entropy": loss(model, batch["image"], batch["label"])}


def score(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"loss": F.cross_entropy(outputs(model, batch["image"]), batch["label"], reduction="none")}


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
if arguments.what == "train":
    for _ in ls.train_steps(state, losses, loader, towers, until=ls.Steps(arguments.steps)):
        turns.made_step()
else:
    ls.train(state, losses, loader, towers, until=ls.Steps(FIRST_STEPS))
if arguments.what == "evaluate":
    turns.end(turns.repeat(arguments, lambda: ls.evaluate(state, score, loader)["loss"]))
else:
    if arguments.what == "save":
        places = Places(arguments)
        turns.repeat(arguments, lambda: ls.save(state, loader, places.next()))
    turns.end(final_loss(arguments, state.model))
