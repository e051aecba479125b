"""Models, and the values by which a recipe names them."""

from lockstep.models.inception_v3 import InceptionLogits, InceptionV3, InceptionV3Net
from lockstep.models.mnist import Mnist, MnistNet

__all__ = ["InceptionLogits", "InceptionV3", "InceptionV3Net", "Mnist", "MnistNet"]
