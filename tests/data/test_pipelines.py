"""Pipelines of torchvision: exact draws, and objects that go with their image."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.augmentations.turns import HorizontalFlip
from lockstep.data.loader import Loader
from lockstep.data.pipelines import TorchvisionTransforms
from lockstep.errors import InputError, LockstepError
from lockstep.models.torchvision_models import imported
from lockstep.ragged import Ragged
from lockstep.randomness import Draws


def loads(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None and imported(module) is not None
    except LockstepError:
        return False


pytestmark = pytest.mark.skipif(not loads("torchvision.transforms.v2"), reason="torchvision is not there")
SIZES = ((20, 30), (16, 16), (40, 24))
COUNTS = (2, 0, 3)


class Photos:
    """Three images of several sizes, with objects that have boxes, masks and names."""

    cost = "decode"

    def __len__(self) -> int:
        return 3

    def example_id(self, index: int) -> str:
        return f"photo {index}"

    def read_batch(self, indices: Any) -> dict[str, Any]:
        rows = [photo(index) for index in indices.tolist()]
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        for name in ("boxes", "labels", "area"):
            columns[name] = Ragged.of(columns[name])
        return columns


def photo(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    (height, width), count = SIZES[index], COUNTS[index]
    corners = 0.1 + 0.35 * torch.rand(count, 2, 2, generator=generator)
    boxes = torch.cat([corners[:, 0], corners[:, 0] + corners[:, 1]], dim=1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (top, left, bottom, right) in zip(masks, boxes.tolist(), strict=True):
        mask[round(top * height) : round(bottom * height), round(left * width) : round(right * width)] = 1
    sides = boxes[:, 2:] - boxes[:, :2]
    return {
        "image": torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8),
        "boxes": boxes,
        "labels": torch.arange(1, count + 1),
        "area": sides.prod(1) * height * width,
        "masks": masks,
        "class_text": [f"kind {place}" for place in range(count)],
    }


def batch() -> dict[str, Any]:
    return Photos().read_batch(torch.arange(3))


def draws() -> Draws:
    return Draws(3, np.arange(7, 10))


def pipeline(flip: float, crop: int | None = None) -> TorchvisionTransforms:
    """A flip, and a crop at a random place."""
    from torchvision.transforms import v2

    cut = [v2.RandomCrop(crop), v2.SanitizeBoundingBoxes()] if crop else []
    return TorchvisionTransforms(v2.Compose([v2.RandomHorizontalFlip(flip), *cut]))


def close(found: Any, expected: Any, atol: float = 0.0) -> None:
    values, other = (each.values if isinstance(each, Ragged) else each for each in (found, expected))
    if isinstance(expected, Ragged):
        assert found.lengths.tolist() == expected.lengths.tolist()
    torch.testing.assert_close(values, other, rtol=0, atol=atol, equal_nan=True)


def test_a_flip_is_that_of_lockstep() -> None:
    made = pipeline(1.0)
    found, expected = (
        made(batch(), draws()),
        HorizontalFlip(1.0)(batch(), draws()),
    )
    for name in ("labels", "class_text"):
        assert str(found[name]) == str(expected[name])
    close(found["boxes"], expected["boxes"], 1e-6)
    close(found["area"], expected["area"], 1e-3)
    for one, two in zip(found["image"], expected["image"], strict=True):
        assert torch.equal(one, two)
    for one, two in zip(found["masks"], expected["masks"], strict=True):
        assert torch.equal(torch.as_tensor(one), two if isinstance(two, Tensor) else two.decode())


def test_what_a_crop_drops_is_dropped_from_all_fields() -> None:
    made = pipeline(0.0, 8)
    before = batch()
    found = made(before, draws())
    assert found["image"].shape == (3, 3, 8, 8)
    lengths = found["boxes"].lengths.tolist()
    assert 0 < sum(lengths) < sum(COUNTS), "some are seen, some are not"
    for name in ("labels", "area"):
        assert found[name].lengths.tolist() == lengths
    assert [len(each) for each in found["class_text"]] == [len(each) for each in found["masks"]] == lengths
    for labels, texts in zip(found["labels"], found["class_text"], strict=True):
        assert [f"kind {label - 1}" for label in labels.tolist()] == texts
    assert ((found["boxes"].values >= -1e-6) & (found["boxes"].values <= 1 + 1e-6)).all()


def stream(augment: Any, **arguments: Any) -> list[Any]:
    loader = Loader(Photos(), batch_size=3, seed=3, augment=[augment], **arguments)
    batches = loader.batches(range(1), 1)
    found = list(islice(batches, 4))
    batches.close()
    return found


@pytest.mark.process
def test_whoever_reads_an_example_draws_the_same() -> None:
    made = pipeline(0.5, 8)
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate()
    alone = stream(made, num_processes=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not torch.equal(alone[0]["image"].sort(0)[0], alone[1]["image"].sort(0)[0]), "each epoch is cut elsewhere"
    for mine, theirs in zip(alone, stream(made, num_processes=2), strict=True):
        assert torch.equal(mine["image"], theirs["image"])
        assert torch.equal(mine["boxes"].values, theirs["boxes"].values)


def test_threads_do_not_run_what_draws_globally() -> None:
    with pytest.raises(InputError, match="TorchvisionTransforms"):
        stream(pipeline(0.5), num_threads=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v2: TorchvisionTransforms(3), r"transform is of the wrong type.*\n.*int\n.*a pipeline"),  # type: ignore[arg-type]
        (
            lambda v2: TorchvisionTransforms(lambda sample: 1 / 0),
            r"pipeline of TorchvisionTransforms fails for the example at position 7 .*\n.*ZeroDivisionError",
        ),
        (
            lambda v2: TorchvisionTransforms(lambda sample: {**sample, "labels": sample["labels"][1:]}),
            r"at position 7(.|\n)*2 (boxes|masks) for 1 objects",
        ),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused(make: Callable[[Any], Any], message: str) -> None:
    from torchvision.transforms import v2

    with pytest.raises(LockstepError, match=message):
        make(v2)(batch(), draws())


def test_labels_of_images_without_places_stay() -> None:
    labels = Ragged.of([torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int64), torch.tensor([3])])
    found = pipeline(1.0)({"image": batch()["image"], "labels": labels}, draws())
    assert found["labels"].lengths.tolist() == [2, 0, 1]
    assert found["labels"].values.tolist() == [1, 2, 3]


def test_keypoints_are_refused() -> None:
    points = Ragged.of([torch.zeros(count, 4, 2) for count in COUNTS])
    with pytest.raises(InputError, match=r"mirror keypoints by whole pixels(.|\n)*HorizontalFlip"):
        pipeline(1.0)({**batch(), "keypoints": points}, draws())
