"""A detector of one stage: which cell of a grid holds the centre of a digit, its class, and its box."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls

SIZE, CELLS = 64, 8


class Scenes(Dataset):
    def __init__(self):
        self.digits = Digits()

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        digit, label = self.digits[index]
        image = torch.zeros(1, SIZE, SIZE)
        top, left = torch.randint(0, SIZE - 28, (2,)).tolist()
        image[:, top : top + 28, left : left + 28] = digit
        rows, columns = (image[0] > 0.5).nonzero().T
        box = torch.stack([rows.min(), columns.min(), rows.max() + 1, columns.max() + 1]) / SIZE
        row, column = ((box[:2] + box[2:]) / 2 * CELLS).long().tolist()
        return {"image": image, "box": box, "label": label, "cell": row * CELLS + column}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(32, 1 + 10 + 4, 3, padding=1)

    def forward(self, x):
        return self.head(self.backbone(x)).flatten(2).transpose(1, 2)


def detection_loss(outputs, batch):
    centres = F.one_hot(batch["cell"], CELLS * CELLS).float()
    found = outputs[torch.arange(len(outputs), device=outputs.device), batch["cell"]]
    objectness = F.binary_cross_entropy_with_logits(outputs[:, :, 0], centres)
    return objectness + F.cross_entropy(found[:, 1:11], batch["label"]) + F.smooth_l1_loss(found[:, 11:], batch["box"])


def losses(model, batch):
    return {"loss": detection_loss(model(batch["image"]), batch)}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = Detector().to(device)
    state = ls.TrainState(model, ls.optim.AdamW(lr=1e-3))
    loader = ls.data.Loader(Scenes(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
