"""Examples: readers, orders, and the loader that makes the exact stream of batches of them."""

from lockstep.data.block_order import BlockShuffled
from lockstep.data.coco import Coco
from lockstep.data.combine import Concatenated, OnlyFields, Subset, one_of, split
from lockstep.data.detection_schema import DetectionSchema
from lockstep.data.each_example import EachExample, ExampleDraws, Seeded
from lockstep.data.image_folder import ImageFolder
from lockstep.data.image_records import ImageRecords
from lockstep.data.imagenet_schema import ImageNetSchema
from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.label_map import Label, LabelMap, read_label_map, read_labels, write_label_map
from lockstep.data.loader import Loader
from lockstep.data.mixture import Mixture
from lockstep.data.mnist import mnist_reader
from lockstep.data.mnist_schema import MnistSchema, mnist_records
from lockstep.data.opening import open_source
from lockstep.data.order import Order, Sequential, Shuffled
from lockstep.data.readers import Arrays, Reader, TorchDataset
from lockstep.data.records import Records
from lockstep.data.repeating_orders import Balanced, Weighted
from lockstep.data.schema import Schema
from lockstep.data.tar_shards import TarShards
from lockstep.data.voc import Voc

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
