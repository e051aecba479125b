"""Pretrained layers are fine-tuned at a low rate, and a new head is trained at a high one."""

import torch
import torch.nn.functional as F
from common import Digits, pretrained_features
from torch import nn
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = pretrained_features()
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = F.interpolate(x, size=(48, 48)).expand(-1, 3, -1, -1)
        return self.head(self.features(x).mean((2, 3)))


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.features.parameters(), "lr": 1e-4},
            {"params": model.head.parameters(), "lr": 1e-3},
        ],
    )
    loader = DataLoader(Digits(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
