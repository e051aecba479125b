"""A small vision transformer: patches, attention, label smoothing, a warm-up of the rate."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls

WARMUP_STEPS = 20


class VisionTransformer(nn.Module):
    def __init__(self, width=32, patch=7):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = VisionTransformer().to(device)
    state = ls.TrainState(
        model, ls.optim.AdamW(lambda step: 1e-3 * min(1.0, (step + 1) / WARMUP_STEPS), weight_decay=0.05)
    )
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
