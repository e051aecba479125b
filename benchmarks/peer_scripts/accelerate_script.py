"""Hugging Face Accelerate: several workers are started by torchrun, as on CPUs `accelerate launch` starts one."""

import accelerate
import torch
from torch_parts import data_loader, evaluation_loader, final_loss, loader_of, loss, net, optimizer
from turns import FIRST_STEPS, Places, Turns, parsed

arguments = parsed()
accelerator = accelerate.Accelerator(
    cpu=True,
    mixed_precision="bf16" if arguments.precision == "bf16" else "no",
    kwargs_handlers=[accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
)
assert accelerator.num_processes == arguments.num_workers
module = net(arguments)
# The loader has this worker's batches alone, in order: it is not to be split again.
model, update = accelerator.prepare(module, optimizer(arguments, module))
turns = Turns(is_chief=accelerator.is_main_process)
turns.begin(accelerate=accelerate.__version__, torch=torch.__version__)


def step(images: torch.Tensor, labels: torch.Tensor) -> None:
    update.zero_grad()
    with accelerator.autocast():
        value = loss(model, images, labels)
    accelerator.backward(value)
    update.step()


def evaluated() -> float:
    model.eval()
    values = []
    for images, labels in evaluation_loader(arguments):
        with torch.no_grad():
            value = loss(model, images, labels)
        values.append(accelerator.gather_for_metrics(value).mean().item())
    return sum(values) / len(values)


if arguments.what == "train":
    for images, labels in data_loader(arguments, accelerator.process_index):
        step(images, labels)
        turns.made_step()
else:
    for images, labels in loader_of(arguments, FIRST_STEPS):
        step(images, labels)
if arguments.what == "evaluate":
    turns.end(turns.repeat(arguments, evaluated))
else:
    if arguments.what == "save":
        places = Places(arguments)
        turns.repeat(arguments, lambda: accelerator.save_state(str(places.next())))
    turns.end(final_loss(arguments, module))
accelerator.end_training()
