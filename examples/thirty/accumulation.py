"""Gradients of four small batches make one update."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader

ACCUMULATE = 4


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Digits(), batch_size=4, shuffle=True)

    history, total = [], 0.0
    for _ in range(epochs):
        for number, (images, labels) in enumerate(loader, start=1):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels) / ACCUMULATE
            loss.backward()
            total += loss.item()
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                history.append(total)
                total = 0.0
                if len(history) % 10 == 0:
                    print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
