"""SimCLR: two views of an image are each other's nearest among all views of the batch."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self):
        self.digits = Digits()

    def __len__(self):
        return len(self.digits)

    def view(self, image):
        top, left = torch.randint(0, 5, (2,)).tolist()
        return image[:, top : top + 24, left : left + 24] * (0.5 + torch.rand(1))

    def __getitem__(self, index):
        image, _ = self.digits[index]
        return self.view(image), self.view(image)


def encoder():
    layers = [nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 32))


def nt_xent(codes1, codes2, temperature=0.5):
    codes = F.normalize(torch.cat([codes1, codes2]), dim=1)
    similarities = codes @ codes.T / temperature
    similarities.fill_diagonal_(float("-inf"))
    partners = torch.arange(len(codes), device=codes.device).roll(len(codes1))
    return F.cross_entropy(similarities, partners)


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = encoder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TwoViews(), batch_size=16, shuffle=True, drop_last=True)

    history = []
    for _ in range(epochs):
        for first, second in loader:
            first, second = first.to(device), second.to(device)
            loss = nt_xent(model(first), model(second))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
