"""A perceptron with dropout, whose learning rate falls at the end of each epoch that a list names."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def main(epochs=3):
    torch.manual_seed(0)
    device = ls.join().device
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)).to(device)
    state = ls.TrainState(
        model, ls.optim.SGD(ls.optim.PiecewiseConstant((ls.Epochs(1), ls.Epochs(2)), (0.1, 0.01, 0.001)))
    )
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
