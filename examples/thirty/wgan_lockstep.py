"""A Wasserstein GAN with a gradient penalty, whose critic makes two updates for each of the generator."""

import torch
from common import Digits
from torch import nn

import lockstep as ls

NUM_CODES, CRITIC_UPDATES = 32, 2


def gradient_penalty(critic, reals, fakes):
    share = torch.rand(len(reals), 1, device=reals.device)
    between = (share * reals + (1 - share) * fakes).requires_grad_()
    (gradients,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradients.norm(dim=1) - 1) ** 2).mean()


def main(epochs=2):
    torch.manual_seed(0)
    device = ls.join().device
    generator = nn.Sequential(nn.Linear(NUM_CODES, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid()).to(device)
    critic = nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
    g_state = ls.TrainState(generator, ls.optim.Adam(lr=1e-4, betas=(0.0, 0.9)), name="generator")
    c_state = ls.TrainState(critic, ls.optim.Adam(lr=1e-4, betas=(0.0, 0.9)), name="critic")
    loader = ls.data.Loader(Digits(), batch_size=16)

    history = []

    def c_losses(critic, batch):
        reals = batch["image"].flatten(1)
        fakes = generator(torch.randn(len(reals), NUM_CODES, device=reals.device)).detach()
        c_loss = critic(fakes).mean() - critic(reals).mean() + 10 * gradient_penalty(critic, reals, fakes)
        return {"loss": c_loss}

    def g_losses(generator, batch):
        reals = batch["image"]
        g_loss = -critic(generator(torch.randn(len(reals), NUM_CODES, device=reals.device))).mean()
        return {"loss": g_loss}

    for number, batch in enumerate(ls.batches(loader, until=ls.Epochs(epochs))):
        c_report = ls.train_step(c_state, c_losses, batch)
        history.append(c_report.total)
        if number % CRITIC_UPDATES == 1:
            g_report = ls.train_step(g_state, g_losses, batch)
            print(f"step {len(history)}: critic {c_report.total:.4f}, generator {g_report.total:.4f}")
    return history


if __name__ == "__main__":
    main()
