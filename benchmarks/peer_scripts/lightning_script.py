"""Lightning's Trainer, without what it writes: no logger, no checkpoints, no progress bar."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch_parts import data_loader, final_loss, loss, net, optimizer
from turns import Turns, parsed

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
        return data_loader(arguments, self.trainer.global_rank)

    def on_train_start(self) -> None:
        self.turns = Turns(is_chief=self.trainer.is_global_zero)
        self.turns.begin(lightning=lightning.__version__, torch=torch.__version__)

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        self.turns.made_step()


strategy = DDPStrategy(gradient_as_bucket_view=True) if arguments.num_workers > 1 else "auto"
trainer = lightning.Trainer(
    accelerator="cpu", devices=arguments.num_workers, strategy=strategy,
    precision="bf16-mixed" if arguments.precision == "bf16" else "32-true", max_steps=arguments.steps,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)  # fmt: skip
assert trainer.world_size == arguments.num_workers
trained = Module()
trainer.fit(trained)
trained.turns.end(final_loss(arguments, module))
