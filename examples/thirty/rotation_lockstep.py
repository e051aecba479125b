"""Self-supervised: a network learns what digits look like by saying how they were turned."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def network():
    layers = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 4))


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = network().to(device)
    state = ls.TrainState(model, ls.optim.SGD(lr=0.05, momentum=0.9))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def losses(model, batch):
        images = batch["image"]
        turned = torch.cat([images.rot90(turns, (2, 3)) for turns in range(4)])
        turns = torch.arange(4, device=images.device).repeat_interleave(len(images))
        loss = F.cross_entropy(model(turned), turns)
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
