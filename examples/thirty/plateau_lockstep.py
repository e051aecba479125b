"""The learning rate falls when the loss on examples that were held out does not."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def score(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")}


def main(epochs=4):
    torch.manual_seed(0)
    device = ls.join().device
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model.register_buffer("rate", torch.tensor(1.0, device=device))
    state = ls.TrainState(model, ls.optim.SGD(lr=lambda step: model.rate.item()))
    loader = ls.data.Loader(Digits(), batch_size=16)
    held_out = ls.data.Loader(Digits("t10k"), batch_size=16)

    history, best = [], float("inf")
    for epoch in range(epochs):
        for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epoch + 1)):
            history.append(report.total)
        validation_loss = ls.evaluate(state, score, held_out)["loss"]
        if validation_loss >= best:
            model.rate.mul_(0.5)
        best = min(best, validation_loss)
        print(f"step {len(history)}: validation loss {validation_loss:.4f}")
    return history


if __name__ == "__main__":
    main()
