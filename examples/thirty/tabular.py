"""Numbers and a category in a table, with an embedding of the category."""

import common
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def table(rows):
    numbers, category = torch.randn(rows, 8), torch.randint(5, (rows,))
    return TensorDataset(numbers, category, (numbers[:, 0] + category > 2).float())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.Sequential(nn.Linear(11, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers, category):
        return self.layers(torch.cat([numbers, self.embedding(category)], 1)).squeeze(1)


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Net().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = DataLoader(table(common.EXAMPLES), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for numbers, category, target in loader:
            numbers, category, target = numbers.to(device), category.to(device), target.to(device)
            loss = F.binary_cross_entropy_with_logits(model(numbers, category), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if len(history) % 10 == 0:
                print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
