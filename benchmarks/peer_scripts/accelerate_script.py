"""Hugging Face Accelerate: several workers are started by torchrun, as on CPUs `accelerate launch` starts one."""

import accelerate
import torch
from torch_parts import data_loader, final_loss, loss, net, optimizer
from turns import Turns, parsed

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
for images, labels in data_loader(arguments, accelerator.process_index):
    update.zero_grad()
    with accelerator.autocast():
        value = loss(model, images, labels)
    accelerator.backward(value)
    update.step()
    turns.made_step()
turns.end(final_loss(arguments, module))
accelerator.end_training()
