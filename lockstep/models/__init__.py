"""Models, and the values by which a recipe names them."""

from lockstep.models.mnist import Mnist, MnistNet

__all__ = ["Mnist", "MnistNet"]
