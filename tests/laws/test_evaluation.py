"""The law of evaluation: each example once, and the same bits for every number of workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.readers.reader import Arrays

SIZE = 101


def make_state() -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    return ls.TrainState(model, ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.5, dynamic=False))


def make_loader(batch_size: int = 16) -> Loader:
    generator = torch.Generator().manual_seed(1)
    fields = {"x": torch.randn(SIZE, 6, generator=generator), "y": torch.randint(0, 4, (SIZE,), generator=generator)}
    return Loader(Arrays(fields), batch_size=batch_size)


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    logits = model(batch["x"])
    right = (logits.argmax(1) == batch["y"]).float()
    return {"top1": right, "loss": F.cross_entropy(logits, batch["y"], reduction="none"), "one": torch.ones_like(right)}


def evaluated(micro_batch: int) -> dict[str, str]:
    """The sums in hexadecimal: every bit of them."""
    result = ls.evaluate(make_state(), score, make_loader(), micro_batch=micro_batch)
    return {"examples": str(result.num_examples), **{name: total.hex() for name, total in result.sums.items()}}


@pytest.mark.process
@pytest.mark.parametrize("micro_batch", [16, pytest.param(40, marks=pytest.mark.slow), 200])
def test_the_same_bits_for_every_number_of_workers(run_workers: Callable[..., list[Any]], micro_batch: int) -> None:
    alone = evaluated(micro_batch)
    assert alone["one"] == float(SIZE).hex()
    assert alone["examples"] == str(SIZE)
    for num_workers in (2, 3):
        assert run_workers(evaluated, num_workers, micro_batch) == [alone] * num_workers


class Seen:
    """A metric that tells every bit of what it was shown, and in which order."""

    def reset(self) -> None:
        self.updates: list[str] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        assert len(logits) == len(labels)
        assert not logits.is_inference()
        self.updates.append(f"{len(labels)} {labels.tolist()} {logits.numpy().tobytes().hex()}")

    def compute(self) -> list[str]:
        return self.updates


def seen(micro_batch: int, *, drop_last: bool = False) -> list[Any]:
    """What a metric sees."""

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"one": torch.ones(micro_batch), "seen": (model(batch["x"]), batch["y"])}

    state, loader, metrics = make_state(), make_loader(), {"seen": Seen()}
    result = ls.evaluate(state, score, loader, micro_batch=micro_batch, drop_last=drop_last, metrics=metrics)
    return [result["one"], result.computed["seen"]]


@pytest.mark.process
@pytest.mark.parametrize(
    ("micro_batch", "drop_last", "num_workers"), [(16, False, 2), (16, False, 3), (40, True, 3), (200, False, 2)]
)
def test_metrics_see_the_same_bits_in_the_same_order_for_every_number_of_workers(
    run_workers: Callable[..., list[Any]], micro_batch: int, drop_last: bool, num_workers: int
) -> None:
    alone = seen(micro_batch, drop_last=drop_last)
    sizes = [int(update.split()[0]) for update in alone[1]]
    labels = [json.loads(update[update.index("[") : update.index("]") + 1]) for update in alone[1]]
    num_examples = SIZE // micro_batch * micro_batch if drop_last else SIZE
    assert sizes == [min(micro_batch, num_examples - start) for start in range(0, num_examples, micro_batch)]
    everything = make_loader().reader.read_batch(np.arange(num_examples))
    assert [label for some in labels for label in some] == everything["y"].tolist()
    assert run_workers(partial(seen, drop_last=drop_last), num_workers, micro_batch) == [alone] * num_workers


class Objects(Arrays):
    """Of the image i its i % 4 objects, so that every fourth has none. Two of the images cannot be read."""

    cost = "decode"

    def read_batch(self, indices: Any) -> dict[str, Any]:
        if found := {8, 30}.intersection(indices.tolist()):
            raise ls.errors.DataError(f"Image {min(found)} is torn.", given="half", expected="a whole", hint="none")
        boxes = [torch.full((index % 4, 4), index + 0.1, dtype=torch.float64) for index in indices.tolist()]
        names = [f"image {index}" for index in indices.tolist()]
        return {**super().read_batch(indices), "truth": ls.Ragged.of(boxes), "name": names}


class Matched:
    """A metric that matches boxes with objects image by image, and tells every bit of what arrives."""

    def reset(self) -> None:
        self.found: list[str] = []

    def prepare(self, boxes: ls.Ragged, truth: ls.Ragged, names: list[str]) -> tuple[Any, ...]:
        assert len(boxes) == len(truth) == len(names)
        overlaps = [(mine.sum() + its.sum()).reshape(1) for mine, its in zip(boxes, truth, strict=True)]
        numbers = torch.tensor([int(name.split()[1]) for name in names])
        return boxes, ls.Ragged.of(overlaps), truth, numbers

    def update(self, boxes: ls.Ragged, overlaps: ls.Ragged, truth: ls.Ragged, numbers: Tensor) -> None:
        for row, number in enumerate(numbers.tolist()):
            rows = [column[row].numpy().tobytes().hex() for column in (boxes, overlaps, truth)]
            self.found.append(" ".join([str(number), *rows]))

    def compute(self) -> dict[str, Any]:
        return {"num_images": len(self.found), "found": self.found, "no_number": float("nan")}


def detect(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    """Find as many boxes as the class of an example says; in padding, too."""
    boxes = [batch["x"][row, :4].double().expand(int(label), 4) for row, label in enumerate(batch["y"])]
    return {"one": torch.ones(len(boxes)), "coco": (ls.Ragged.of(boxes), batch["truth"], batch["name"])}


def matched(micro_batch: int) -> list[Any]:
    """What the metric has seen, and what is said of it; a NaN as text, for it does not equal itself."""
    fields = make_loader().reader.read_batch(np.arange(SIZE))
    loader = Loader(Objects(fields), batch_size=16, bad_examples="skip", num_processes=1)
    result = ls.evaluate(make_state(), detect, loader, micro_batch=micro_batch, metrics={"coco": Matched()})
    bad = [each.position for each in result.bad]
    return [result.computed["coco"]["found"], str(result), repr(result["coco/no_number"]), bad]


@pytest.mark.process
def test_ragged_metrics_have_the_same_bits_for_every_number_of_workers_and_any_micro_batch(
    run_workers: Callable[..., list[Any]],
) -> None:
    alone = matched(7)
    images = [int(line.split()[0]) for line in alone[0]]
    assert images == [index for index in range(SIZE) if index not in (8, 30)]
    assert alone[1:] == [
        "one 1.0000, coco/num_images 99.0000, coco/no_number nan over 99 examples, 2 bad ones left out",
        "nan",
        [8, 30],
    ]
    for num_workers, micro_batch in [(1, 200), (2, 16), (3, 1), (4, 40)]:
        assert run_workers(matched, num_workers, micro_batch) == [alone] * num_workers


def test_an_evaluation_equals_a_hand_written_loop() -> None:
    state, fields = make_state(), make_loader().reader.read_batch(np.arange(SIZE))
    result = ls.evaluate(state, score, make_loader())
    model = state.model.eval()
    with torch.no_grad():
        logits = model(fields["x"])
    assert result.sums["top1"] == float((logits.argmax(1) == fields["y"]).sum())
    assert result["loss"] == pytest.approx(float(F.cross_entropy(logits, fields["y"])), abs=1e-5)


def test_the_size_of_a_micro_batch_changes_no_count() -> None:
    small, large = (ls.evaluate(make_state(), score, make_loader(), micro_batch=size) for size in (7, 64))
    assert small.sums["top1"] == large.sums["top1"]
    assert small["loss"] == pytest.approx(large["loss"], abs=1e-5)


def test_the_model_under_training_is_left_alone() -> None:
    state = make_state()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    ls.evaluate(state, score, make_loader(), weights="average")
    assert state.model.training
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())


def test_averaged_weights_are_scored() -> None:
    state = make_state()
    raw = ls.evaluate(state, score, make_loader())["loss"]
    for average in state.averaged().values():
        average.mul_(3.0)
    assert ls.evaluate(state, score, make_loader())["loss"] == raw
    assert ls.evaluate(state, score, make_loader(), weights="average")["loss"] != raw


def test_a_score_that_is_already_a_mean_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"'top1' is not one number an example.*\n.*shape \(\)"):
        ls.evaluate(make_state(), lambda m, b: {"top1": score(m, b)["top1"].mean()}, make_loader())


def test_what_does_not_fill_a_micro_batch_may_be_dropped() -> None:
    result = ls.evaluate(make_state(), score, make_loader(), micro_batch=16, drop_last=True)
    assert result.num_examples == result.sums["one"] == 96
    with pytest.raises(ls.errors.InputError) as caught:
        ls.evaluate(make_state(), score, make_loader(), micro_batch=102, drop_last=True)
    assert str(caught.value) == (
        "There is no full micro-batch to score.\n"
        "  given:    101 examples, micro-batches of 102, the last one dropped\n"
        "  expected: one full micro-batch or more\n"
        "  hint:     lower the micro-batch, or keep the last one (drop_last=False, or evaluate.drop_last=false)"
    )


class Torn(Arrays):
    """Two of the examples cannot be read."""

    cost = "decode"

    def read_batch(self, indices: Any) -> dict[str, Any]:
        if found := {7, 100}.intersection(indices.tolist()):
            raise ls.errors.DataError(f"Row {min(found)} is torn.", given="half", expected="a whole", hint="none")
        return super().read_batch(indices)


def torn_score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    return {**score(model, batch), "seen": (batch["x"][:, 0], batch["y"])}


def evaluated_torn() -> list[Any]:
    whole = make_loader().reader.read_batch(np.arange(SIZE))
    loader = Loader(Torn(whole), batch_size=16, bad_examples="skip", num_processes=1)
    result = ls.evaluate(make_state(), torn_score, loader, micro_batch=10, metrics={"seen": Seen()})
    num_seen = sum(int(update.split()[0]) for update in result.computed["seen"])
    return [str(result), [list(bad) for bad in result.bad], num_seen]


@pytest.mark.process
def test_bad_examples_are_left_out_and_named(run_workers: Callable[..., list[Any]]) -> None:
    said, bad, num_seen = evaluated_torn()
    assert said.endswith("one 1.0000 over 99 examples, 2 bad ones left out")
    assert bad == [[7, "7", "Row 7 is torn. half", "", ""], [100, "100", "Row 100 is torn. half", "", ""]]
    assert num_seen == 99
    assert run_workers(evaluated_torn, 2) == [[said, bad, num_seen]] * 2
