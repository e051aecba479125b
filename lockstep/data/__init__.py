"""Examples: readers, orders, and the loader that makes the exact stream of batches of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.data.each_example import EachExample as EachExample
    from lockstep.data.iterable_loader import IterableLoader as IterableLoader
    from lockstep.data.loader import Loader as Loader
    from lockstep.data.order import Balanced as Balanced
    from lockstep.data.order import BlockShuffled as BlockShuffled
    from lockstep.data.order import Mixture as Mixture
    from lockstep.data.order import Repeated as Repeated
    from lockstep.data.order import Weighted as Weighted
    from lockstep.data.pipelines import TorchvisionTransforms as TorchvisionTransforms
    from lockstep.readers.coco import Coco as Coco
    from lockstep.readers.combine import Concatenated as Concatenated
    from lockstep.readers.detection import DetectionReader as DetectionReader
    from lockstep.readers.image_folder import ImageFolder as ImageFolder
    from lockstep.readers.image_records import ImageRecords as ImageRecords
    from lockstep.readers.image_tables import DetectionTable as DetectionTable
    from lockstep.readers.image_tables import ImageTable as ImageTable
    from lockstep.readers.mnist import mnist_reader as mnist_reader
    from lockstep.readers.open import open_source as open_source
    from lockstep.readers.reader import Arrays as Arrays
    from lockstep.readers.reader import Reader as Reader
    from lockstep.readers.reader import TorchDataset as TorchDataset
    from lockstep.readers.records import Records as Records
    from lockstep.readers.schemas import ImageNetSchema as ImageNetSchema
    from lockstep.readers.tar_shards import TarShards as TarShards
    from lockstep.readers.tfds import TfdsRecords as TfdsRecords
    from lockstep.readers.voc import Voc as Voc
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
