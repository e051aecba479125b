"""The pipelines that detection_input.py compares, each in a process of its own with one thread, told what to read.

    python benchmarks/detection_input_peers.py NAME FOLDER BATCH_SIZE

FOLDER has annotations.json as COCO's, with paths of images as file names. Lines of standard input are numbers of
batches; each is answered by the seconds of processor time that they took. The first line of output tells what the
pipeline is made of. Only the pipeline's own libraries are imported, so that each may live in another environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

SIZE = 300
MEAN = (123, 117, 104)


class Pipeline(NamedTuple):
    batches: Iterator[Any]
    made_of: str


def main() -> None:
    import torch

    name, folder, batch_size = sys.argv[1:]
    torch.set_num_threads(1)
    pipeline = PEERS[name](Path(folder), int(batch_size))
    next(pipeline.batches)
    answer(json.dumps({"made_of": pipeline.made_of}))
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            next(pipeline.batches)
        answer(str(time.process_time() - began))


def answer(line: str) -> None:
    print(line, flush=True)


# Ours ---------------------------------------------------------------------------------------------------------------


def ours(folder: Path, batch_size: int, *, zoom: bool = False, masks: bool = False) -> Pipeline:
    """Boxes, and masks, moved with their images; colours at the size of the network, as recipes of detectors do."""
    import torch

    from lockstep.augmentations.colours import RandomDistortColor
    from lockstep.augmentations.lists import DeferredColours
    from lockstep.augmentations.resizers import FixedShapeResizer
    from lockstep.augmentations.turns import HorizontalFlip
    from lockstep.augmentations.zoom import RandomIoUCrop, RandomZoomOut
    from lockstep.data.loader import Loader
    from lockstep.readers.coco import Coco

    reader = Coco(folder / "annotations.json", "/", masks=masks)
    zoomed = [RandomZoomOut()] if zoom else []
    colours = DeferredColours((RandomDistortColor(),), (0,))
    resizer = FixedShapeResizer(SIZE, SIZE, "antialiased")
    augment = [*zoomed, RandomIoUCrop(), HorizontalFlip(), resizer, colours]
    loader = Loader(reader, batch_size=batch_size, num_processes=0, augment=augment)

    def batches() -> Iterator[Any]:
        for batch in loader.batches(range(1), 1):
            decoded = [each.decode() for each in batch["masks"]] if masks else []
            yield colours.apply(batch), batch["boxes"], batch["labels"], decoded

    return Pipeline(batches(), f"lockstep; torch {torch.__version__}; {reader.decoder}")


def ours_packed(folder: Path, batch_size: int, *, objects: bool) -> Pipeline:
    """What a loader process does: read, decode, crop, flip, and lay the batch into shared memory."""
    import torch

    from lockstep.augmentations.crops import RandomResizedCrop
    from lockstep.augmentations.turns import HorizontalFlip
    from lockstep.data.loader import Loader
    from lockstep.data.shared_memory import SentMemories
    from lockstep.readers.coco import Coco
    from lockstep.readers.combine import OnlyFields

    coco = Coco(folder / "annotations.json", "/")
    fields = ["image", "source_id", *(["boxes", "labels", "is_crowd", "area"] if objects else [])]
    augment = [RandomResizedCrop(SIZE), HorizontalFlip()]
    loader = Loader(OnlyFields(coco, fields), batch_size=batch_size, num_processes=0, augment=augment)
    sent = SentMemories()

    def batches() -> Iterator[Any]:
        for batch in loader.batches(range(1), 1):
            parcel, _ = sent.packed({name: batch[name] for name in batch})
            sent.use_again([parcel.memory] if parcel.memory is not None else [])
            yield parcel

    return Pipeline(batches(), f"lockstep; torch {torch.__version__}; {coco.decoder}")


# Torchvision --------------------------------------------------------------------------------------------------------


def torchvision(
    folder: Path, batch_size: int, *, pil: bool = False, zoom: bool = False, masks: bool = False
) -> Pipeline:
    """The preset "ssd" of its reference scripts, by transforms v2, and the resizing that its model does."""
    import PIL
    import torch
    import torchvision
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    torch.manual_seed(0)
    examples = cycle(torchvision_examples(folder, pil=pil, masks=masks))
    fill = {tv_tensors.Image: MEAN, PIL.Image.Image: MEAN, tv_tensors.Mask: 0}
    transform = v2.Compose([
        v2.RandomPhotometricDistort(),
        *([v2.RandomZoomOut(fill=fill)] if zoom else []),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(),
        v2.Resize((SIZE, SIZE), antialias=True),
        *([v2.PILToTensor()] if pil else []),
        v2.ToDtype(torch.float32, scale=True),
        v2.ToPureTensor(),
    ])  # fmt: skip

    def batches() -> Iterator[Any]:
        while True:
            images, targets = zip(*(transform(*load()) for load in islice(examples, batch_size)), strict=True)
            yield torch.stack(images), targets

    decoder = f"pillow {PIL.__version__}" if pil else "torchvision.io.decode_jpeg"
    return Pipeline(batches(), f"torchvision {torchvision.__version__}; torch {torch.__version__}; {decoder}")


def torchvision_examples(folder: Path, *, pil: bool, masks: bool) -> list[Callable[[], tuple[Any, dict[str, Any]]]]:
    """A function for each image that reads it, with its target as the reference scripts make it of COCO."""
    import torch
    from PIL import Image
    from torchvision import io, tv_tensors

    document = json.loads((folder / "annotations.json").read_text())
    objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in document["images"]}
    for annotation in document["annotations"]:
        objects[annotation["image_id"]].append(annotation)

    def example(image: dict[str, Any]) -> Callable[[], tuple[Any, dict[str, Any]]]:
        own, sides = objects[image["id"]], (image["height"], image["width"])
        corners = [(x, y, x + width, y + height) for x, y, width, height in (each["bbox"] for each in own)]

        def load() -> tuple[Any, dict[str, Any]]:
            path = "/" + image["file_name"]
            pixels = (
                Image.open(path).convert("RGB")
                if pil
                else tv_tensors.Image(io.decode_jpeg(io.read_file(path), mode=io.ImageReadMode.RGB))
            )
            boxes = tv_tensors.BoundingBoxes(torch.tensor(corners).view(-1, 4), format="XYXY", canvas_size=sides)
            target = {"boxes": boxes, "labels": torch.tensor([each["category_id"] for each in own])}
            if masks:
                target["masks"] = tv_tensors.Mask(drawn([each["segmentation"] for each in own], *sides))
            return pixels, target

        return load

    return [example(image) for image in document["images"]]


def drawn(segmentations: list[Any], height: int, width: int) -> Any:
    """Masks of polygons and runs, as `convert_coco_poly_to_mask` of the reference scripts draws them."""
    import torch
    from pycocotools import mask

    masks = [
        mask.decode(mask.merge(mask.frPyObjects(each, height, width)) if isinstance(each, list) else each)
        for each in segmentations
    ]
    return torch.stack([torch.as_tensor(each, dtype=torch.uint8) for each in masks])


def of(make: Callable[..., Pipeline], **options: bool) -> Callable[[Path, int], Pipeline]:
    return lambda folder, batch_size: make(folder, batch_size, **options)


PEERS: dict[str, Callable[[Path, int], Pipeline]] = {
    "ours": ours,
    "ours, and zoom out": of(ours, zoom=True),
    "torchvision, the same steps": torchvision,
    "torchvision, Pillow, the same steps": of(torchvision, pil=True),
    "torchvision, the preset": of(torchvision, zoom=True),
    "torchvision, Pillow, the preset": of(torchvision, zoom=True, pil=True),
    "ours, masks": of(ours, masks=True),
    "torchvision, masks": of(torchvision, masks=True),
    "ours, packed": of(ours_packed, objects=True),
    "ours, packed, images alone": of(ours_packed, objects=False),
}

if __name__ == "__main__":
    main()
