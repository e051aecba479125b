"""Lightning Fabric: a loop of one's own."""

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from torch_parts import data_loader, evaluated, evaluation_loader, final_loss, loader_of, loss, net, optimizer
from turns import FIRST_STEPS, Places, Turns, parsed

arguments = parsed()
strategy = DDPStrategy(gradient_as_bucket_view=True) if arguments.num_workers > 1 else "auto"
fabric = lightning.Fabric(
    accelerator="cpu", devices=arguments.num_workers, strategy=strategy,
    precision="bf16-mixed" if arguments.precision == "bf16" else "32-true",
)  # fmt: skip
fabric.launch()
assert fabric.world_size == arguments.num_workers
module = net(arguments)
model, update = fabric.setup(module, optimizer(arguments, module))
loader = fabric.setup_dataloaders(data_loader(arguments, fabric.global_rank), use_distributed_sampler=False)
turns = Turns(is_chief=fabric.is_global_zero)
turns.begin(lightning=lightning.__version__, torch=torch.__version__)


def step(images: torch.Tensor, labels: torch.Tensor) -> None:
    update.zero_grad()
    fabric.backward(loss(model, images, labels))
    update.step()


if arguments.what == "train":
    for images, labels in loader:
        step(images, labels)
        turns.made_step()
else:
    for images, labels in loader_of(arguments, FIRST_STEPS):
        step(images, labels)
if arguments.what == "evaluate":
    scored = fabric.setup_dataloaders(evaluation_loader(arguments), use_distributed_sampler=False)
    turns.end(turns.repeat(arguments, lambda: evaluated(scored, model)))
else:
    if arguments.what == "save":
        places = Places(arguments, ".ckpt")
        turns.repeat(arguments, lambda: fabric.save(places.next(), {"model": model, "optimizer": update}))
    turns.end(final_loss(arguments, module))
