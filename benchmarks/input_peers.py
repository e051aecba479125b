"""The pipelines that input.py compares, each in a process of its own, which reads batches when it is told to.

    python benchmarks/input_peers.py NAME FOLDER NUM_PROCESSES BATCH_SIZE

Lines of standard input are numbers of batches; each is answered by an empty line once they were read. The first line of
output tells what the pipeline is made of, and what its first batch looks like. Nothing but the pipeline's own libraries
is imported, so that each may live in another environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SIZE = 224
JITTER = 0.4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHUFFLED_AMONG = 512
"""For those that cannot shuffle all examples."""


class Pipeline(NamedTuple):
    batches: Iterator[Any]
    made_of: str
    pixels: Callable[[Any], Any]
    """The images of a batch, as an array of numpy or a tensor of torch."""


def main() -> None:
    name, folder, num_processes, batch_size = sys.argv[1:]
    pipeline = PEERS[name](Path(folder), int(num_processes), int(batch_size))
    pixels = pipeline.pixels(next(pipeline.batches))
    about = {"made_of": pipeline.made_of, "shape": list(pixels.shape), "dtype": str(pixels.dtype).split(".")[-1]}
    answer(json.dumps({**about, "mean": round(float(pixels.astype("f8").mean()), 3)}))
    for line in sys.stdin:
        for _ in range(int(line)):
            next(pipeline.batches)
        answer("")


def answer(line: str) -> None:
    print(line, flush=True)


# Ours ---------------------------------------------------------------------------------------------------------------


def ours(
    folder: Path,
    num_processes: int,
    batch_size: int,
    *,
    decoder: str,
    threads: bool = False,
    coloured: bool = False,
) -> Pipeline:
    import torch

    import lockstep as ls

    decoding = ls.images.Decoding(decoder)
    reader = ls.data.ImageRecords(folder / "train-*-of-*", ls.data.ImageNetSchema(), decoding=decoding)
    draws = ls.augmentations.JitterDraws(brightness=JITTER, contrast=JITTER, saturation=JITTER)
    augment: list[Any] = [ls.augmentations.RandomResizedCrop(SIZE), ls.augmentations.HorizontalFlip()]
    augment += [draws] if coloured else []
    who = {"num_threads" if threads else "num_processes": num_processes}
    loader = ls.data.Loader(reader, batch_size=batch_size, augment=augment, **who)

    def batches() -> Iterator[Any]:
        for batch in loader.batches(range(1), 1):
            images = batch["image"]
            if coloured:
                images = ls.images.normalize(draws.apply(batch), MEAN, STD)
            yield images

    return Pipeline(batches(), f"lockstep; torch {torch.__version__}; {decoding.chosen}", lambda images: images.numpy())


def ours_by(**options: Any) -> Callable[[Path, int, int], Pipeline]:
    return lambda folder, num_processes, batch_size: ours(folder, num_processes, batch_size, **options)


# Torchvision --------------------------------------------------------------------------------------------------------


def torchvision_pil(folder: Path, num_processes: int, batch_size: int, *, coloured: bool = False) -> Pipeline:
    """As its examples train on ImageNet: files, Pillow, and one image at a time."""
    import PIL
    import torchvision
    from torchvision import transforms

    colour = [transforms.ColorJitter(JITTER, JITTER, JITTER), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    ending = colour if coloured else [transforms.PILToTensor()]
    geometry = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    dataset = torchvision.datasets.ImageFolder(str(folder / "files"), transforms.Compose([*geometry, *ending]))
    return data_loader(dataset, num_processes, batch_size, f"pillow {PIL.__version__}")


def torchvision_tensors(folder: Path, num_processes: int, batch_size: int, *, coloured: bool = False) -> Pipeline:
    """Its transforms v2 on tensors, which torchcodec decodes."""
    import torch
    import torchcodec
    import torchvision
    from torchcodec.decoders import decode_image
    from torchvision.transforms import v2

    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    ending = [v2.ColorJitter(JITTER, JITTER, JITTER), *normalise] if coloured else []
    geometry = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    transform = v2.Compose([*geometry, *ending])
    dataset = torchvision.datasets.ImageFolder(str(folder / "files"), transform, loader=decode_image)
    return data_loader(dataset, num_processes, batch_size, f"torchcodec {torchcodec.__version__}")


def data_loader(dataset: Any, num_processes: int, batch_size: int, decoder: str) -> Pipeline:
    import torch
    import torchvision
    from torch.utils.data import DataLoader, RandomSampler

    # One long epoch: the loader would run empty at the end of each.
    sampler = RandomSampler(dataset, num_samples=10**8)
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=num_processes)
    made_of = f"torchvision {torchvision.__version__}; torch {torch.__version__}; {decoder}"
    return Pipeline((images for images, _ in loader), made_of, lambda images: images.numpy())


# tf.data ------------------------------------------------------------------------------------------------------------


def tf_data(folder: Path, num_processes: int, batch_size: int, *, antialias: bool = True) -> Pipeline:
    """The crop is decoded alone, by the law of TensorFlow's own sampler, which is that of its examples."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(num_processes)
    tf.config.threading.set_intra_op_parallelism_threads(1)

    def image_of(record: Any) -> Any:
        data = tf.io.parse_single_example(record, {"image/encoded": tf.io.FixedLenFeature([], tf.string)})
        encoded = data["image/encoded"]
        shape = tf.image.extract_jpeg_shape(encoded)
        box = tf.zeros([1, 0, 4])
        scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape, box, area_range=scale, aspect_ratio_range=ratio, max_attempts=10,
            min_object_covered=0.0, use_image_if_no_bounding_boxes=True,
        )  # fmt: skip
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        image = tf.image.resize(image, (SIZE, SIZE), antialias=antialias)
        return tf.cast(tf.image.random_flip_left_right(image) + 0.5, tf.uint8)

    files = sorted(map(str, folder.glob("train-*-of-*")))
    records = tf.data.TFRecordDataset(files).repeat().shuffle(SHUFFLED_AMONG)
    dataset = records.map(image_of, num_processes, deterministic=True).batch(batch_size).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = num_processes
    options.threading.max_intra_op_parallelism = 1
    batches = iter(dataset.with_options(options))
    return Pipeline(batches, f"tensorflow {tf.__version__}", lambda images: images.numpy())


# DALI ---------------------------------------------------------------------------------------------------------------


def dali(folder: Path, num_processes: int, batch_size: int) -> Pipeline:
    """Its operators for CPUs; the crop is decoded alone. As many threads as the others have processes."""
    import nvidia.dali as dali
    from nvidia.dali import fn, pipeline_def, tfrecord, types

    files = sorted(folder.glob("train-*-of-*"))

    @pipeline_def(batch_size=batch_size, num_threads=num_processes, device_id=None, seed=1)
    def pipeline() -> Any:
        records = fn.readers.tfrecord(
            path=[str(file) for file in files],
            index_path=[str(folder / f"{file.name}.idx".replace("train", "index")) for file in files],
            features={"image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, "")},
            random_shuffle=True,
            initial_fill=SHUFFLED_AMONG,
            name="reader",
        )
        images = fn.decoders.image_random_crop(
            records["image/encoded"],
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
        )
        images = fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    built = pipeline()
    built.build()
    batches = iter(lambda: built.run()[0], None)
    return Pipeline(batches, f"DALI {dali.__version__}", lambda images: images.as_array())


PEERS: dict[str, Callable[[Path, int, int], Pipeline]] = {
    "ours": ours_by(decoder="simplejpeg"),
    "ours, threads": ours_by(decoder="simplejpeg", threads=True),
    "DALI": dali,
    "tf.data": tf_data,
    "tf.data, aliased": lambda *where: tf_data(*where, antialias=False),
    "torchvision": torchvision_pil,
    "ours, coloured": ours_by(decoder="simplejpeg", coloured=True),
    "torchvision, coloured": lambda *where: torchvision_pil(*where, coloured=True),
    "ours, Pillow": ours_by(decoder="pillow"),
    "ours, torchcodec": ours_by(decoder="torchcodec"),
    "ours, crop decode": ours_by(decoder="turbojpeg"),
    "ours, crop decode, threads": ours_by(decoder="turbojpeg", threads=True),
    "torchvision, tensors": torchvision_tensors,
    "torchvision, tensors, coloured": lambda *where: torchvision_tensors(*where, coloured=True),
}
"""First what an installation without further libraries gives, beside others."""


if __name__ == "__main__":
    main()
