"""Each image is mixed with another one of its batch, and so are their labels."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def network():
    layers = [nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 10))


def mixup_loss(model, images, labels, alpha=0.2):
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    partner = torch.randperm(len(images), device=images.device)
    scores = model(share * images + (1 - share) * images[partner])
    return share * F.cross_entropy(scores, labels) + (1 - share) * F.cross_entropy(scores, labels[partner])


def losses(model, batch):
    return {"loss": mixup_loss(model, batch["image"], batch["label"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = network().to(device)
    state = ls.TrainState(model, ls.optim.SGD(lr=0.1, momentum=0.9))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
