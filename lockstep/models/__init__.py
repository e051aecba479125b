"""Models, and the values by which a recipe names them."""

from lockstep.models.inception_v3 import InceptionLogits, InceptionV3, InceptionV3Net
from lockstep.models.lenet import LeNet, LeNetNet
from lockstep.models.mnist import Mnist, MnistNet
from lockstep.models.squeezenet import SqueezeNet, SqueezeNetNet
from lockstep.models.torchvision_models import Timm, Torchvision

__all__ = [
    "InceptionLogits",
    "InceptionV3",
    "InceptionV3Net",
    "LeNet",
    "LeNetNet",
    "Mnist",
    "MnistNet",
    "SqueezeNet",
    "SqueezeNetNet",
    "Timm",
    "Torchvision",
]
