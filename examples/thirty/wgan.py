"""A Wasserstein GAN with a gradient penalty, whose critic makes two updates for each of the generator."""

import torch
from common import Digits
from torch import nn
from torch.utils.data import DataLoader

NUM_CODES, CRITIC_UPDATES = 32, 2


def gradient_penalty(critic, reals, fakes):
    share = torch.rand(len(reals), 1, device=reals.device)
    between = (share * reals + (1 - share) * fakes).requires_grad_()
    (gradients,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradients.norm(dim=1) - 1) ** 2).mean()


def main(epochs=2):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = nn.Sequential(nn.Linear(NUM_CODES, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid()).to(device)
    critic = nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    loader = DataLoader(Digits(), batch_size=16, shuffle=True)

    history = []
    for _ in range(epochs):
        for number, (images, _) in enumerate(loader):
            reals = images.to(device).flatten(1)
            fakes = generator(torch.randn(len(reals), NUM_CODES, device=reals.device)).detach()
            c_loss = critic(fakes).mean() - critic(reals).mean() + 10 * gradient_penalty(critic, reals, fakes)
            c_optimizer.zero_grad()
            c_loss.backward()
            c_optimizer.step()
            history.append(c_loss.item())
            if number % CRITIC_UPDATES == 1:
                g_loss = -critic(generator(torch.randn(len(reals), NUM_CODES, device=reals.device))).mean()
                g_optimizer.zero_grad()
                g_loss.backward()
                g_optimizer.step()
                print(f"step {len(history)}: critic {c_loss.item():.4f}, generator {g_loss.item():.4f}")
    return history


if __name__ == "__main__":
    main()
