"""Models, and the values by which a recipe names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.models.mnist import MnistNet as MnistNet
    from lockstep.models.torchvision_models import Timm as Timm
    from lockstep.models.torchvision_models import Torchvision as Torchvision
    from lockstep.models.values import InceptionV3 as InceptionV3
    from lockstep.models.values import LeNet as LeNet
    from lockstep.models.values import Mnist as Mnist
    from lockstep.models.values import SqueezeNet as SqueezeNet
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
