"""Examples: readers, orders, and the loader that makes the exact stream of batches of them."""

from lockstep.data.each_example import EachExample
from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.loader import Loader
from lockstep.data.order import BlockShuffled
from lockstep.data.weighted_orders import Balanced, Mixture, Weighted
from lockstep.readers.coco import Coco
from lockstep.readers.combine import Concatenated
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.mnist import mnist_reader
from lockstep.readers.open import open_source
from lockstep.readers.reader import Arrays, Reader, TorchDataset
from lockstep.readers.records import Records
from lockstep.readers.schemas import ImageNetSchema
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.voc import Voc

__all__ = [
    "Arrays",
    "Balanced",
    "BlockShuffled",
    "Coco",
    "Concatenated",
    "EachExample",
    "ImageFolder",
    "ImageNetSchema",
    "ImageRecords",
    "IterableLoader",
    "Loader",
    "Mixture",
    "Reader",
    "Records",
    "TarShards",
    "TorchDataset",
    "Voc",
    "Weighted",
    "mnist_reader",
    "open_source",
]
