"""Examples: readers, orders, augmentations, and the loader that makes the exact stream of batches of them."""

from lockstep.data.block_order import BlockShuffled
from lockstep.data.combine import Concatenated, Subset, one_of, split
from lockstep.data.image_folder import ImageFolder
from lockstep.data.label_map import Label, LabelMap, read_label_map, read_labels, write_label_map
from lockstep.data.loader import Loader
from lockstep.data.mixture import Mixture
from lockstep.data.mnist import mnist_reader
from lockstep.data.order import Sequential, Shuffled
from lockstep.data.readers import Arrays, Reader, TorchDataset
from lockstep.data.records import Records
from lockstep.data.repeating_orders import Balanced, Weighted
from lockstep.images.augment import Augment, RandomShift
from lockstep.images.colour import FAST_ORDERS, INCEPTION_ORDERS, SLIM_ORDERS, ColourDraws, centred, distort, scaled
from lockstep.images.crops import CentralCrop, DistortedCrop, RandomResizedCrop, Resize
from lockstep.images.decode import Decoding, Region
from lockstep.images.encoded import EncodedImage
from lockstep.images.flips import HorizontalFlip
from lockstep.records.example import parse_example, serialize_example
from lockstep.records.sequence_example import (
    SequenceExample,
    parse_sequence_example,
    serialize_sequence_example,
)
from lockstep.records.shards import find_shards
from lockstep.records.template import Integer, Pixels
from lockstep.records.tfrecord import RecordFiles, read_all, write_records

__all__ = [
    "FAST_ORDERS",
    "INCEPTION_ORDERS",
    "SLIM_ORDERS",
    "Arrays",
    "Augment",
    "Balanced",
    "BlockShuffled",
    "CentralCrop",
    "ColourDraws",
    "Concatenated",
    "Decoding",
    "DistortedCrop",
    "EncodedImage",
    "HorizontalFlip",
    "ImageFolder",
    "Integer",
    "Label",
    "LabelMap",
    "Loader",
    "Mixture",
    "Pixels",
    "RandomResizedCrop",
    "RandomShift",
    "Reader",
    "RecordFiles",
    "Records",
    "Region",
    "Resize",
    "SequenceExample",
    "Sequential",
    "Shuffled",
    "Subset",
    "TorchDataset",
    "Weighted",
    "centred",
    "distort",
    "find_shards",
    "mnist_reader",
    "one_of",
    "parse_example",
    "parse_sequence_example",
    "read_all",
    "read_label_map",
    "read_labels",
    "scaled",
    "serialize_example",
    "serialize_sequence_example",
    "split",
    "write_label_map",
    "write_records",
]
