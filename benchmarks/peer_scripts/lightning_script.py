"""Lightning's Trainer, without what it writes: no logger, no checkpoints, no progress bar."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch_parts import data_loader, evaluation_loader, final_loss, loader_of, loss, net, optimizer
from turns import FIRST_STEPS, Places, Turns, parsed

arguments = parsed()
module = net(arguments)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = module

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return loss(self.net, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(arguments, self.net)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        if arguments.what != "train":
            return loader_of(arguments, FIRST_STEPS)
        return data_loader(arguments, self.trainer.global_rank)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", loss(self.net, *batch), batch_size=len(batch[0]))

    def on_train_start(self) -> None:
        if arguments.what == "train":
            self.begin()

    def begin(self) -> None:
        self.turns = Turns(is_chief=self.trainer.is_global_zero)
        self.turns.begin(lightning=lightning.__version__, torch=torch.__version__)

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        if arguments.what == "train":
            self.turns.made_step()


strategy = DDPStrategy(gradient_as_bucket_view=True) if arguments.num_workers > 1 else "auto"
trainer = lightning.Trainer(
    accelerator="cpu", devices=arguments.num_workers, strategy=strategy,
    precision="bf16-mixed" if arguments.precision == "bf16" else "32-true",
    max_steps=arguments.steps if arguments.what == "train" else FIRST_STEPS,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)  # fmt: skip
assert trainer.world_size == arguments.num_workers
trained = Module()
trainer.fit(trained)
if arguments.what != "train":
    trained.begin()
if arguments.what == "evaluate":
    loader = evaluation_loader(arguments)
    found = trained.turns.repeat(arguments, lambda: trainer.validate(trained, loader, verbose=False))
    trained.turns.end(found[0]["loss"])
else:
    if arguments.what == "save":
        places = Places(arguments, ".ckpt")
        trained.turns.repeat(arguments, lambda: trainer.save_checkpoint(places.next()))
    trained.turns.end(final_loss(arguments, module))
