"""A small student learns from the labels and from the scores of a large teacher."""

import torch
import torch.nn.functional as F
from common import Digits
from torch import nn

import lockstep as ls


def perceptron(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def distillation_loss(scores, teacher_scores, labels, temperature=4.0, share=0.7):
    soft = F.kl_div(
        F.log_softmax(scores / temperature, 1),
        F.log_softmax(teacher_scores / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )
    return share * temperature**2 * soft + (1 - share) * F.cross_entropy(scores, labels)


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    teacher = perceptron(256).to(device).eval()  # load its weights here
    model = perceptron(16).to(device)
    state = ls.TrainState(model, ls.optim.SGD(lr=0.05, momentum=0.9))
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def losses(model, batch):
        images, labels = batch["image"], batch["label"]
        with torch.no_grad():
            teacher_scores = teacher(images)
        loss = distillation_loss(model(images), teacher_scores, labels)
        return {"loss": loss}

    for report in ls.train_steps(state, losses, loader, until=ls.Epochs(epochs)):
        history.append(report.total)
        if len(history) % 10 == 0:
            print(f"step {len(history)}: loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
