"""Sparse gradients of embeddings: dense on the way through the exchange, with a mark at each row that is meant.

Whoever adds up gradients needs to know nothing of them, and the order of addition stays that of the tree. What the
update sees is again rows alone, so that the others keep their slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sparse_parameters(model: nn.Module) -> list[str]:
    """The trained parameters whose gradients are sparse: weights of embeddings that were built with sparse=True."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) in sparse]


def densified(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient as a dense tensor, and 1 at each of its rows that it has values for, shape (rows,)."""
    if gradient.layout == torch.strided:
        return gradient, torch.ones(len(gradient), dtype=gradient.dtype, device=gradient.device)
    rows = gradient.coalesce()
    marks = torch.zeros(len(gradient), dtype=gradient.dtype, device=gradient.device)
    marks[rows.indices()[0]] = 1.0
    return rows.to_dense(), marks


def rows_of(gradient: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are meant, and the gradient's values there."""
    rows = marks.nonzero()[:, 0]
    return rows, gradient[rows]
