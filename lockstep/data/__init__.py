"""Examples: readers, augmentations, and the loader that makes the exact stream of batches of them."""

from lockstep.data.augment import Augment, RandomShift
from lockstep.data.loader import Loader
from lockstep.data.mnist import mnist_reader
from lockstep.data.readers import Arrays, Reader, TorchDataset
from lockstep.data.records import Records
from lockstep.data.template import Integer, Pixels

__all__ = [
    "Arrays",
    "Augment",
    "Integer",
    "Loader",
    "Pixels",
    "RandomShift",
    "Reader",
    "Records",
    "TorchDataset",
    "mnist_reader",
]
