"""Metric learning: an image is nearer to one of its class than to one of another."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls


class Triplets(Dataset):
    def __init__(self):
        self.digits = Digits()
        self.labels = torch.tensor(self.digits.labels)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        anchor, label = self.digits[index]
        positive = self.pick(self.labels == label)
        negative = self.pick(self.labels != label)
        return anchor, positive, negative

    def pick(self, suitable):
        places = suitable.nonzero().flatten()
        return self.digits[places[torch.randint(len(places), ())]][0]


def embedder():
    layers = [nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, 16))


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = embedder().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(ls.data.TorchDataset(Triplets(), ("anchor", "positive", "negative")), batch_size=16)

    history = []

    def losses(model, batch):
        anchor, positive, negative = batch["anchor"], batch["positive"], batch["negative"]
        loss = F.triplet_margin_loss(model(anchor), model(positive), model(negative), margin=1.0)
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
