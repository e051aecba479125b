"""The learning rate falls when the loss on examples that were held out does not."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    total = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        total += F.cross_entropy(model(images), labels, reduction="sum").item()
    model.train()
    return total / len(loader.dataset)


def main(epochs=4):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)
    loader = DataLoader(Digits(), batch_size=16, shuffle=True)
    held_out = DataLoader(Digits("t10k"), batch_size=16)

    history = []
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        validation_loss = validate(model, held_out, device)
        scheduler.step(validation_loss)
        print(f"step {len(history)}: validation loss {validation_loss:.4f}")
    return history


if __name__ == "__main__":
    main()
