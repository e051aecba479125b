"""Ours: run by `lockstep run`."""

import torch
from lockstep_nets import OWN_NETS
from torch.nn import functional as F
from torch_parts import NETS, final_loss, loss, net, outputs
from turns import DETECTORS, FIRST_STEPS, WORKLOADS, Places, Turns, arrays, parsed

import lockstep as ls
from lockstep.ragged import Ragged
from lockstep.recipes.data import DetectionData
from lockstep.recipes.tasks import Detection


def losses(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"cross_entropy": loss(model, batch["image"], batch["label"])}


def score(model: torch.nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"loss": F.cross_entropy(outputs(model, batch["image"]), batch["label"], reduction="none")}


def fields() -> dict[str, torch.Tensor | Ragged]:
    data = {name: torch.from_numpy(values) for name, values in arrays(arguments).items()}
    if arguments.workload not in DETECTORS:
        return data
    lengths = data.pop("lengths")
    data["boxes"] = data["boxes"][:, [1, 0, 3, 2]] / workload.image_size  # shares, the top first
    return {name: values if name == "image" else Ragged(values, lengths) for name, values in data.items()}


arguments = parsed()
workload = WORKLOADS[arguments.workload]
here = ls.join()
assert here.num_workers == arguments.num_workers
state = ls.TrainState(net(arguments, {**NETS, **OWN_NETS}), ls.optim.SGD(workload.lr, momentum=workload.momentum))
augment, counts = (), None
if arguments.workload in DETECTORS:
    task = Detection(DetectionData(), workload.num_classes)
    losses, augment, counts = task.losses, task.targets(), task.counts(state.model)
size = workload.batch_size * here.num_workers
loader = ls.data.Loader(ls.data.Arrays(fields()), batch_size=size, order="sequential", augment=augment)
towers = ls.Towers(precision=arguments.precision, channels_last=True, compile=arguments.compile)
turns = Turns(is_chief=here.is_chief)
turns.begin(torch=torch.__version__)
if arguments.what == "train":
    for _ in ls.train_steps(state, losses, loader, towers, counts=counts, until=ls.Steps(arguments.steps)):
        turns.made_step()
else:
    ls.train(state, losses, loader, towers, until=ls.Steps(FIRST_STEPS))
if arguments.what == "evaluate":
    turns.end(turns.repeat(arguments, lambda: ls.evaluate(state, score, loader)["loss"]))
elif workload.loss_in_training:
    first = ls.data.Loader(ls.data.Arrays(fields()), batch_size=size, order="sequential", augment=augment)
    turns.end(next(ls.train_steps(state, losses, first, towers, counts=counts)).total)
else:
    if arguments.what == "save":
        places = Places(arguments)
        turns.repeat(arguments, lambda: ls.save(state, loader, places.next()))
    turns.end(final_loss(arguments, state.model))
