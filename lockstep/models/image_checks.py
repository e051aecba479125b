"""Images that a net cannot use are refused in words, before its first layer."""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import InputError


def check_images(net: str, images: Tensor, *, channels: int, smallest: int, largest: int | None = None) -> None:
    """Refuse what is no batch of floating-point images with that many channels, and sides in a range.

    Args:
        net: its name, for the message.
        images: shape (batch, channels, height, width).
        channels: what the net takes.
        smallest: least height and width, in pixels.
        largest: most height and width, in pixels; any where none is given.

    Raises:
        InputError: naming what was given, and what is expected.
    """
    fit = images.ndim == 4 and images.shape[1] == channels
    sides = images.shape[2:] if fit else ()
    if fit and images.is_floating_point() and min(sides) >= smallest and (largest is None or max(sides) <= largest):
        return
    wanted = (
        f"(batch, {channels}, {smallest}, {smallest})" if smallest == largest else f"(batch, {channels}, height, width)"
    )
    least = "" if smallest == largest else f", each side {smallest} pixels or more"
    raise InputError(
        f"{net} cannot use these images.",
        given=f"shape {tuple(images.shape)}, {images.dtype}",
        expected=f"shape {wanted}{least}, floating point",
        hint=_hint(fit, images, smallest),
    )


def _hint(fit: bool, images: Tensor, smallest: int) -> str:
    if not fit:
        return "put the channels second, as images.permute(0, 3, 1, 2) does, and give as many as the net has"
    if not images.is_floating_point():
        return "scale the pixels as the net was trained, for instance to -1 to 1 with images / 127.5 - 1"
    return f"resize or crop the images, for instance with image_size={smallest}"
