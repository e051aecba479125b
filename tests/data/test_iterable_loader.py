from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lockstep as ls
from lockstep.data.iterable_loader import IterableLoader
from lockstep.errors import DataError, InputError, WorkerError
from lockstep.randomness import Draws
from lockstep.readers.reader import TorchDataset

WARNING = (
    "The stream goes on at position {} with the first item of Numbers: an iterable dataset cannot be entered in the "
    "middle, so some examples come again and others later, and this is not exactly the run that was saved. For an "
    "exact one give ls.data.Loader a map-style dataset, with __len__ and __getitem__."
)


class Numbers(IterableDataset[Any]):
    """The numbers below `size`; in the place of one an error."""

    def __init__(self, size: int = 10, bad: int | None = None, error: Exception | None = None) -> None:
        self.size, self.bad, self.error = size, bad, error
        self.passes = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.passes += 1
        for number in range(self.size):
            if number == self.bad:
                raise self.error or ValueError("torn")
            yield {"number": number}


class AddDraws:
    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return {**batch, "draw": torch.from_numpy(draws.integers("draw", 0, 2**40))}


def loader(size: int = 10, batch_size: int = 4, **arguments: Any) -> IterableLoader:
    return IterableLoader(Numbers(size), batch_size=batch_size, **arguments)


def numbers(batch: dict[str, Any]) -> list[int]:
    return batch["number"].tolist()


def read(stream: IterableLoader, count: int, towers: range = range(1), num_towers: int = 1) -> list[list[int]]:
    """The numbers in the next batches, each of which is attempted."""
    found = []
    for batch in islice(stream.batches(towers, num_towers), count):
        found.append(numbers(batch))
        stream.commit(batch)
    return found


def make_state() -> ls.TrainState:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return ls.TrainState(model, ls.optim.SGD(0.01))


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    number = batch["number"].float()[:, None] / 10
    return {"square": (model(number) - 1).square().mean()}


def train(stream: ls.data.Loader, state: ls.TrainState, until: int, num_towers: int = 1) -> list[float]:
    steps = ls.train_steps(state, losses, stream, ls.Towers(num_towers), until=ls.Steps(until))
    return [report.total for report in steps]


def test_batches_are_full_and_the_dataset_starts_again_where_it_ends() -> None:
    stream = loader()
    batches = list(islice(stream.batches(range(1), 1), 4))
    assert [numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert [batch.position for batch in batches] == [0, 4, 8, 12]
    assert stream.example_ids(11, 3) == ["item 11", "item 12", "item 13"]
    assert numbers(next(loader(3, batch_size=8).batches(range(1), 1))) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_nothing_is_read_before_it_is_due() -> None:
    dataset = Numbers(4)
    batches = IterableLoader(dataset, batch_size=4).batches(range(1), 1)
    assert dataset.passes == 0
    next(batches)
    assert dataset.passes == 1


def test_a_worker_takes_the_rows_of_its_towers() -> None:
    parts = [read(loader(), 3, towers, 4) for towers in (range(2), range(2, 3), range(3, 4))]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2], [6], [0]], [[3], [7], [1]]]


def test_pairs_become_images_and_labels() -> None:
    stream = IterableLoader([(torch.zeros(2), 0), (torch.ones(2), 1)], batch_size=3)
    batch = next(stream.batches(range(1), 1))
    assert (batch["image"].tolist(), batch["label"].tolist()) == ([[0, 0], [1, 1], [0, 0]], [0, 1, 0])


def test_a_dataloader_of_single_items_is_a_dataset() -> None:
    stream = IterableLoader(DataLoader(Numbers(3), batch_size=None), batch_size=2)
    assert read(stream, 3) == [[0, 1], [2, 0], [1, 2]]


def test_augmentations_draw_by_seed_and_position() -> None:
    first, other = (next(loader(seed=seed, augment=AddDraws()).batches(range(1), 1))["draw"] for seed in (0, 1))
    again = next(loader(augment=[AddDraws()]).batches(range(1, 2), 2))["draw"]
    assert first[2:].tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_batches_go_on_where_the_last_ones_ended() -> None:
    stream = loader()
    assert read(stream, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read(stream, 1) == [[8, 9, 0, 1]]
    tower = loader()
    assert read(tower, 1, range(1), 2) + read(tower, 1, range(1), 2) == [[0, 1], [4, 5]]


def test_a_batch_that_is_skipped_is_passed_over() -> None:
    stream = loader()
    stream.skip(4)
    assert read(stream, 2) == [[0, 1, 2, 3], [8, 9, 0, 1]]
    assert stream.state()["skipped"] == [4]


def test_a_look_ahead_leaves_the_stream_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    stream = loader()
    for _ in range(2):
        batches = stream.batches(range(1), 1)
        assert numbers(next(batches)) == [0, 1, 2, 3]
        batches.close()
    assert read(stream, 1) == [[0, 1, 2, 3]]
    assert caplog.messages == []


def test_what_was_read_and_not_attempted_is_lost_and_said(caplog: pytest.LogCaptureFixture) -> None:
    stream = loader()
    read(stream, 1)
    next(stream.batches(range(1), 1))
    assert read(stream, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (stream.position, caplog.messages) == (12, [WARNING.format(4)])


def test_a_copy_reads_from_the_start_and_disturbs_nothing() -> None:
    stream = loader()
    batches = stream.batches(range(1), 1)
    stream.commit(next(batches))
    other = copy.copy(stream)
    other.position = 0
    assert read(other, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numbers(next(batches)) == [4, 5, 6, 7]


def test_two_loops_over_one_walk_are_refused() -> None:
    stream = loader()
    first, second = stream.batches(range(1), 1), stream.batches(range(1), 1)
    next(second)
    with pytest.raises(InputError) as caught:
        next(first)
    assert caught.value.what == "An iterable dataset cannot go back."
    assert caught.value.given == "item 0 asked for after item 3"
    assert caught.value.hint == "close the other one, or give each loop an IterableLoader of its own"


def test_a_state_says_that_it_is_not_exact_and_goes_on_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    stream = loader(seed=3, epoch_size=10)
    read(stream, 3)
    state = json.loads(json.dumps(stream.state()))
    assert (state["exact"], state["position"], state["seed"], state["epoch_size"]) == (False, 12, 3, 10)
    resumed = loader(seed=3, epoch_size=10)
    resumed.load_state(state)
    due = list(islice(resumed.batches(range(1), 1), 2))
    assert [(batch.position, numbers(batch)) for batch in due] == [(12, [0, 1, 2, 3]), (16, [4, 5, 6, 7])]
    assert resumed.example_ids(12, 1) == ["item 12"]
    assert caplog.messages == [WARNING.format(12)]


def test_a_state_of_the_start_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    stream = loader()
    saved = stream.state()
    read(stream, 1)
    stream.load_state(saved)
    assert read(stream, 1) == [[0, 1, 2, 3]]
    assert caplog.messages == []


def test_the_state_of_another_stream_is_refused() -> None:
    with pytest.raises(InputError, match="The saved stream had another seed"):
        loader().load_state(loader(seed=1).state())


def test_a_model_trains_the_same_as_from_examples_with_an_index() -> None:
    class Indexed(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"number": index}

    exact = ls.data.Loader(TorchDataset(Indexed()), batch_size=4, order="sequential", num_processes=0)
    assert train(loader(), make_state(), 6) == train(exact, make_state(), 6)


def test_a_run_that_is_resumed_says_so_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, stream = make_state(), loader()
    train(stream, state, 3)
    ls.save(state, stream, tmp_path)
    resumed, again = make_state(), loader()
    assert ls.resume(resumed, again, tmp_path) == 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [WARNING.format(12)]
    reports = list(ls.train_steps(resumed, losses, again, until=ls.Steps(5)))
    assert [(report.step, report.progress.position) for report in reports] == [(4, 16), (5, 20)]
    assert not any(report.skipped for report in reports)


def trained_by_towers() -> list[float]:
    return train(loader(), make_state(), 4, num_towers=2)


@pytest.mark.process
def test_towers_train_the_same_on_one_worker_and_on_two(run_workers: Callable[..., list[Any]]) -> None:
    alone = trained_by_towers()
    assert alone == pytest.approx(train(loader(), make_state(), 4))
    assert run_workers(trained_by_towers, 2) == [alone, alone]


def test_an_end_in_epochs_counts_those_of_the_epoch_size() -> None:
    stream = loader(epoch_size=8)
    reports = list(ls.train_steps(make_state(), losses, stream, until=ls.Epochs(2)))
    assert [report.progress.epochs for report in reports] == [0.5, 1, 1.5, 2]


def test_an_item_that_raises_is_named_by_its_number() -> None:
    stream = IterableLoader(Numbers(10, bad=6), batch_size=4)
    batches = stream.batches(range(1), 2)
    stream.commit(next(batches))
    stream.commit(next(batches))  # it takes items 4 and 5
    with pytest.raises(DataError) as caught:
        next(batches)
    assert caught.value.what == "Item 6 of Numbers cannot be used."
    assert caught.value.given == "ValueError: torn"
    assert caught.value.hint == "fix __iter__ of the dataset, or leave the item out"


def test_an_error_of_ours_is_passed_on() -> None:
    error = WorkerError("x", given="", expected="", hint="")
    with pytest.raises(WorkerError) as caught:
        read(IterableLoader(Numbers(bad=0, error=error), batch_size=2), 1)
    assert caught.value is error


def test_a_dataset_without_items_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        read(loader(0), 1)
    assert caught.value.what == "Numbers ends without any item."
    assert caught.value.given == "nothing where item 0 was due, at the start of a pass"
    assert "__iter__ begins from the start" in caught.value.hint


def test_a_dataset_that_cannot_start_again_is_refused_when_it_should() -> None:
    class Once:
        def __init__(self) -> None:
            self.items = iter([{"number": 1}])

        def __iter__(self) -> Iterator[Any]:
            return self.items

    with pytest.raises(DataError, match=r"Once ends without any item\.\n.*where item 1 was due"):
        read(IterableLoader(Once(), batch_size=2), 1)


def test_what_can_be_walked_only_once_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        IterableLoader((item for item in [1]), batch_size=1)
    assert caught.value.what == "A generator can be walked only once."
    assert caught.value.expected == "an iterable that starts again when it has ended"
    assert caught.value.hint.startswith("give a dataset whose __iter__ begins anew each time")


@pytest.mark.parametrize("dataset", [7, Numbers], ids=["number", "class"])
def test_what_cannot_be_walked_is_refused(dataset: Any) -> None:
    with pytest.raises(InputError, match=r"dataset is of the wrong type[\s\S]*ls\.data\.TorchDataset\(dataset\)"):
        IterableLoader(dataset, batch_size=1)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"epoch_size": 0}, {"epoch_size": 2.5}], ids=str)
def test_sizes_are_whole_numbers_above_0(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(InputError, match=name):
        loader(**arguments)


def test_an_evaluation_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        ls.evaluate(make_state(), lambda model, batch: {}, loader())
    assert caught.value.what.startswith("An iterable dataset cannot be evaluated: each example has to be scored once")
    assert caught.value.given == "an IterableLoader of Numbers"
    assert caught.value.hint.startswith("give a map-style dataset: ls.data.Loader(ls.data.TorchDataset(dataset)")


def test_a_map_style_reader_tells_of_this_loader() -> None:
    with pytest.raises(InputError, match=r"hint: .*ls\.data\.IterableLoader\(dataset, \.\.\.\)"):
        TorchDataset(Numbers())
