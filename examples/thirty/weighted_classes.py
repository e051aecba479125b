"""Classes that are rare weigh more in the loss, by the inverse of their number."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader


def class_weights(labels):
    counts = torch.tensor(labels).bincount(minlength=10).clamp(min=1)
    return len(labels) / (10 * counts)


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    digits = Digits()
    weights = class_weights(digits.labels).to(device)
    loader = DataLoader(digits, batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels, weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
