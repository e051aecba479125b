"""A small U-Net finds the pixels of a digit in noise, by cross entropy and Dice."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls


class NoisyDigits(Dataset):
    def __init__(self):
        self.digits = Digits()

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, _ = self.digits[index]
        return 0.5 * image + 0.5 * torch.rand_like(image), (image > 0.5).float()


def conv(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = conv(1, 8), conv(8, 16)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 8, 2, stride=2), conv(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        return self.head(self.up2(torch.cat([fine, self.up1(coarse)], 1)))


def dice_loss(logits, masks):
    probabilities = logits.sigmoid()
    overlap = 2 * (probabilities * masks).sum((1, 2, 3))
    return 1 - ((overlap + 1) / (probabilities.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)).mean()


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = UNet().to(device)
    state = ls.TrainState(model, ls.optim.Adam(lr=1e-3))
    loader = ls.data.Loader(ls.data.TorchDataset(NoisyDigits(), ("image", "mask")), batch_size=16)

    history = []

    def losses(model, batch):
        images, masks = batch["image"], batch["mask"]
        logits = model(images)
        loss = F.binary_cross_entropy_with_logits(logits, masks) + dice_loss(logits, masks)
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
