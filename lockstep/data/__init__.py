"""Examples: readers, orders, and the loader that makes the exact stream of batches of them."""

from lockstep.data.each_example import EachExample, ExampleDraws, Seeded
from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.loader import Loader
from lockstep.data.order import BlockShuffled, Order, Sequential, Shuffled
from lockstep.data.weighted_orders import Balanced, Mixture, Weighted
from lockstep.readers.coco import Coco
from lockstep.readers.combine import Concatenated, OnlyFields, Subset, one_of, split
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords, Schema
from lockstep.readers.label_map import Label, LabelMap, read_label_map, read_labels, write_label_map
from lockstep.readers.mnist import mnist_reader, mnist_records
from lockstep.readers.open import open_source
from lockstep.readers.reader import Arrays, Reader, TorchDataset
from lockstep.readers.records import Records
from lockstep.readers.schemas import DetectionSchema, ImageNetSchema, MnistSchema
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.voc import Voc

__all__ = [
    "Arrays",
    "Balanced",
    "BlockShuffled",
    "Coco",
    "Concatenated",
    "DetectionSchema",
    "EachExample",
    "ExampleDraws",
    "ImageFolder",
    "ImageNetSchema",
    "ImageRecords",
    "IterableLoader",
    "Label",
    "LabelMap",
    "Loader",
    "Mixture",
    "MnistSchema",
    "OnlyFields",
    "Order",
    "Reader",
    "Records",
    "Schema",
    "Seeded",
    "Sequential",
    "Shuffled",
    "Subset",
    "TarShards",
    "TorchDataset",
    "Voc",
    "Weighted",
    "mnist_reader",
    "mnist_records",
    "one_of",
    "open_source",
    "read_label_map",
    "read_labels",
    "split",
    "write_label_map",
]
