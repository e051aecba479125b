"""Models, and the values by which a recipe names them."""

from lockstep.models.inception_v3 import InceptionV3
from lockstep.models.lenet import LeNet
from lockstep.models.mnist import Mnist, MnistNet
from lockstep.models.squeezenet import SqueezeNet
from lockstep.models.torchvision_models import Timm, Torchvision

__all__ = ["InceptionV3", "LeNet", "Mnist", "MnistNet", "SqueezeNet", "Timm", "Torchvision"]
