"""What TensorFlow made of some images, and draws that give the numbers it was given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.randomness import Draws

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "pixels_golden.npz")
IMAGES = torch.from_numpy(GOLDEN["images"]).permute(0, 3, 1, 2)


class GivenDraws(Draws):
    """Draws of which some columns are given."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        super().__init__(0, np.arange(len(IMAGES)))
        self.columns = columns

    def uniform(self, column: str) -> npt.NDArray[np.float64]:
        name = self.columns.get(column)
        return np.asarray(GOLDEN[f"uniform {name}"], np.float64) if name else super().uniform(column)


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name]).permute(0, 3, 1, 2).float()


def some_draws(count: int, seed: int = 3) -> Draws:
    return Draws(seed, np.arange(count))
