"""Classes that are rare weigh more in the loss, by the inverse of their number."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def class_weights(labels):
    counts = torch.tensor(labels).bincount(minlength=10).clamp(min=1)
    return len(labels) / (10 * counts)


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    state = ls.TrainState(model, ls.optim.FromTorch(torch.optim.NAdam, lr=1e-3))
    digits = Digits()
    weights = class_weights(digits.labels).to(device)
    loader = ls.data.Loader(digits, batch_size=16)

    history = []

    def losses(model, batch):
        images, labels = batch["image"], batch["label"]
        loss = F.cross_entropy(model(images), labels, weight=weights, reduction="sum")
        return {"loss": loss}

    def counts(batch):
        return {"loss": weights[batch["label"]].sum()}

    for report in ls.train_steps(state, losses, loader, counts=counts, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
