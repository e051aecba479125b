"""Metric learning: an image is nearer to one of its class than to one of another."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = embedder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Triplets(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for anchor, positive, negative in loader:
            anchor, positive, negative = anchor.to(device), positive.to(device), negative.to(device)
            loss = F.triplet_margin_loss(model(anchor), model(positive), model(negative), margin=1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
