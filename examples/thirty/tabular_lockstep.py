"""Numbers and a category in a table, with an embedding of the category."""

import common
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls


def table(rows):
    numbers, category = torch.randn(rows, 8), torch.randint(5, (rows,))
    return TensorDataset(numbers, category, (numbers[:, 0] + category > 2).float())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.Sequential(nn.Linear(11, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers, category):
        return self.layers(torch.cat([numbers, self.embedding(category)], 1)).squeeze(1)


def losses(model, batch):
    return {"loss": F.binary_cross_entropy_with_logits(model(batch["numbers"], batch["category"]), batch["target"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = Net().to(device)
    state = ls.TrainState(model, ls.optim.Adagrad(lr=0.05))
    loader = ls.data.Loader(
        ls.data.TorchDataset(table(common.EXAMPLES), ("numbers", "category", "target")), batch_size=16
    )

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
