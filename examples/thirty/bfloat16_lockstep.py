"""Mixed precision: the model computes in bfloat16, and its weights stay float32."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def losses(model, batch):
    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"])}


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    state = ls.TrainState(model, ls.optim.SGD(lr=0.1, momentum=0.9))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []
    for report in ls.train_steps(state, losses, loader, ls.Towers(precision="bf16"), until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
