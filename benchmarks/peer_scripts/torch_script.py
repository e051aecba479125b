"""Plain PyTorch: the loop of its tutorials; with several workers run by torchrun, with DDP."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_parts import data_loader, evaluated, evaluation_loader, final_loss, loader_of, loss, net, optimizer
from turns import FIRST_STEPS, Places, Turns, parsed

arguments = parsed()
rank = int(os.environ.get("RANK", 0))
module = net(arguments)
model: torch.nn.Module = module
if arguments.num_workers > 1:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == arguments.num_workers
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
if arguments.compile:
    model = torch.compile(model)  # type: ignore[assignment]
update = optimizer(arguments, module)
turns = Turns(is_chief=rank == 0)
turns.begin(torch=torch.__version__)


def step(images: torch.Tensor, labels: torch.Tensor) -> None:
    update.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if arguments.precision == "bf16" else nullcontext():
        value = loss(model, images, labels)
    value.backward()
    update.step()


def save() -> None:
    torch.save({"model": module.state_dict(), "optimizer": update.state_dict()}, places.next())


if arguments.what == "train":
    for images, labels in data_loader(arguments, rank):
        step(images, labels)
        turns.made_step()
else:
    for images, labels in loader_of(arguments, FIRST_STEPS):
        step(images, labels)
if arguments.what == "evaluate":
    loader = evaluation_loader(arguments)
    turns.end(turns.repeat(arguments, lambda: evaluated(loader, model)))
else:
    if arguments.what == "save":
        places = Places(arguments, ".pt")
        turns.repeat(arguments, save)
    turns.end(final_loss(arguments, module))
if arguments.num_workers > 1:
    dist.destroy_process_group()
