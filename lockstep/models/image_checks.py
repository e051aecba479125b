"""Images that a net cannot use are refused in words, before its first layer."""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import InputError


def check_images(net: str, images: Tensor, *, channels: int, smallest: int, values: str) -> None:
    """Refuse what is no batch of floating-point images of that many channels, with sides of at least `smallest` pixels.

    Args:
        net: its name, for the message.
        images: shape (batch, channels, height, width).
        channels: what the net takes.
        smallest: least height and width.
        values: what the pixels should be, for the message.

    Raises:
        InputError: naming what was given, and what is expected.
    """
    if images.ndim == 4 and images.shape[1] == channels and images.is_floating_point():
        if min(images.shape[2:]) >= smallest:
            return
        mend = f"make the images larger, as with image_size={smallest} or more"
    elif images.ndim == 4 and images.shape[1] == channels:
        mend = f"give {values}, as floating-point numbers"
    else:
        mend = "put the channels second, as images.permute(0, 3, 1, 2) does, and give as many as the net has"
    raise InputError(
        f"{net} cannot use these images.",
        given=f"shape {tuple(images.shape)}, {images.dtype}",
        expected=f"shape (batch, {channels}, height, width), each side {smallest} or more, floating point, {values}",
        mend=mend,
    )
