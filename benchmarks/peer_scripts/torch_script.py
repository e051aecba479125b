"""Plain PyTorch: the loop of its tutorials; with several workers run by torchrun, with DDP."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_parts import data_loader, final_loss, loss, net, optimizer
from turns import Turns, parsed

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
for images, labels in data_loader(arguments, rank):
    update.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if arguments.precision == "bf16" else nullcontext():
        value = loss(model, images, labels)
    value.backward()
    update.step()
    turns.made_step()
turns.end(final_loss(arguments, module))
if arguments.num_workers > 1:
    dist.destroy_process_group()
