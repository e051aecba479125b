"""A linear layer is trained on what pretrained layers see, which stay as they are."""

import torch
import torch.nn.functional as F
from common import Digits, pretrained_features
from torch import nn
from torch.utils.data import DataLoader


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = pretrained_features()
        self.head = nn.Linear(128, 10)
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        x = F.interpolate(x, size=(48, 48)).expand(-1, 3, -1, -1)
        return self.head(self.backbone(x).mean((2, 3)))


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Probe().to(device)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
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
