"""What the test suites of the reference systems assert of their input, said of ours."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep as ls
from lockstep.augmentations.crops import Decode
from lockstep.data.prefetch import default_num_processes
from lockstep.errors import DataError, InputError
from lockstep.images.decode import EncodedImage


def encoded(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width, height, 0)).save(file, "PNG")
    return file.getvalue()


class Uneven:
    """Six examples, each with its own number of objects, and an image of its own size."""

    cost = "decode"
    sizes = ((3, 5), (4, 4), (9, 2), (1, 1), (6, 7), (2, 8))

    def __len__(self) -> int:
        return len(self.sizes)

    def read_batch(self, indices: Any) -> dict[str, Any]:
        numbers = indices.tolist()
        return {
            "image": [EncodedImage(encoded(*self.sizes[n]), f"{n}.png") for n in numbers],
            "boxes": [torch.full((n, 4), float(n)) for n in numbers],
            "label": torch.from_numpy(indices),
        }

    def example_id(self, index: int) -> str:
        return str(index)


@pytest.mark.process
@pytest.mark.parametrize("crew", [{"num_processes": 0}, {"num_processes": 2}, {"num_threads": 2}])
@pytest.mark.parametrize(("batch_size", "num_batches"), [(3, 2), (1, 6), (4, 1)])
def test_values_of_any_shape_arrive_as_they_are(crew: dict[str, int], batch_size: int, num_batches: int) -> None:
    loader = ls.data.Loader(Uneven(), batch_size=batch_size, order="sequential", augment=Decode(), **crew)
    batches = list(ls.batches(loader, until=ls.Epochs(1)))
    assert len(batches) == num_batches, "what does not fill a batch is not read"
    for start, batch in zip(range(0, 6, batch_size), batches, strict=False):
        assert batch["label"].tolist() == list(range(start, start + batch_size))
        for row, number in enumerate(batch["label"].tolist()):
            width, height = Uneven.sizes[number]
            assert batch["image"][row].shape == (3, height, width)
            assert batch["image"][row][0].unique().tolist() == [width]
            assert torch.equal(batch["boxes"][row], torch.full((number, 4), float(number)))


@pytest.mark.process
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_what_is_read_ahead_keeps_its_order_and_shapes(prefetch: int) -> None:
    loader = ls.data.Loader(
        Uneven(),
        batch_size=2,
        order="sequential",
        augment=ls.augmentations.Resize(4),
        num_processes=2,
        prefetch=prefetch,
    )
    stream = loader.batches(range(1), 1)
    found = list(islice(stream, 7))
    stream.close()
    assert [batch["label"].tolist() for batch in found] == [[0, 1], [2, 3], [4, 5]] * 2 + [[0, 1]]
    assert {tuple(batch["image"].shape) for batch in found} == {(2, 3, 4, 4)}
    assert all(0 <= batch.queue_fill <= 1 for batch in found)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Five files of two records each."""
    for shard in range(5):
        examples = (
            ls.records.serialize_example({"image_raw": [bytes(4)], "label": np.array([10 * shard + number])})
            for number in range(2)
        )
        ls.records.write_records(tmp_path / f"train-{shard:05d}-of-00005", examples)
    return f"{tmp_path}/train-*"


def labels(pattern: str, **arguments: Any) -> list[int]:
    fields = {"image": ls.records.Pixels("image_raw", (1, 2, 2)), "label": ls.records.Integer("label")}
    reader = ls.data.Records(pattern, fields)
    loader = ls.data.Loader(reader, batch_size=5, **arguments)
    return [label for batch in islice(loader.batches(range(1), 1), 4) for label in batch["label"].tolist()]


def test_unshuffled_files_are_read_in_their_order_again_and_again(shards: str) -> None:
    in_order = [10 * shard + number for shard in range(5) for number in range(2)]
    assert labels(shards, order="sequential") == in_order * 2


@pytest.mark.parametrize("order", ["shuffled", ls.data.BlockShuffled(block_size=2, window_blocks=2)])
def test_shuffled_files_come_in_another_order_each_epoch(shards: str, order: Any) -> None:
    found = labels(shards, order=order)
    in_order = labels(shards, order="sequential")
    assert sorted(found[:10]) == sorted(found[10:]) == sorted(in_order[:10])
    assert found[:10] != in_order[:10]
    assert found[:10] != found[10:]


def test_one_epoch_ends(shards: str) -> None:
    fields = {"label": ls.records.Integer("label")}
    loader = ls.data.Loader(ls.data.Records(shards, fields), batch_size=5)
    assert sum(1 for _ in ls.batches(loader, until=ls.Epochs(1))) == 2


def test_where_there_are_no_files_the_pattern_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/train-"):
        ls.data.Records(tmp_path / "train-*", {"label": ls.records.Integer("label")})


@pytest.mark.process
def test_more_readers_than_files_do_no_harm(shards: str) -> None:
    class Decoded(ls.data.Records):
        cost = "decode"

    loader = ls.data.Loader(
        Decoded(shards, {"label": ls.records.Integer("label")}), batch_size=5, order="sequential", num_processes=8
    )
    stream = loader.batches(range(1), 1)
    assert next(stream)["label"].tolist() == [0, 1, 10, 11, 20]
    stream.close()


def test_readers_follow_the_cores_and_none_is_refused_but_chosen() -> None:
    assert 0 <= default_num_processes(1) <= 8
    with pytest.raises(InputError, match="num_processes=-1"):
        ls.data.Loader(Uneven(), batch_size=1, num_processes=-1)
