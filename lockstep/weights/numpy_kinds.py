"""NumPy's kinds of numbers, and those of torch's that are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def torch_name(dtype: np.dtype[Any]) -> str | None:
    """What torch calls numbers of this kind, in either byte order; None where it has none."""
    try:
        same = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None
    return str(same).removeprefix("torch.")


def tensor_of(array: npt.NDArray[Any]) -> Tensor:
    """A tensor of its own: a copy, contiguous and in the byte order of this machine."""
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
