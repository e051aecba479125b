from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lockstep.data.bad_examples import BadExample
from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.loader import Loader
from lockstep.errors import InputError
from lockstep.readers.combine import Concatenated, split
from lockstep.readers.reader import Arrays


def arrays(*values: int) -> Arrays:
    return Arrays({"number": torch.tensor(values)})


def loader(*values: int, **more: Any) -> Loader:
    return Loader(arrays(*values), batch_size=2, **more)


def saved(stream: Loader) -> dict[str, Any]:
    """Its state, as it comes back from a file."""
    for batch in stream.batches(range(1), 1, stop=lambda position: position >= 4):
        stream.commit(batch)
    state: dict[str, Any] = json.loads(json.dumps(stream.state()))
    return state


def test_a_loader_of_the_same_data_goes_on_at_its_position() -> None:
    again = loader(1, 2, 3)
    assert again.load_state(saved(loader(1, 2, 3))) == []
    assert again.position == 4


def test_other_data_is_refused_and_nothing_has_changed() -> None:
    state, other = saved(loader(1, 2, 3)), loader(1, 2, 4)
    with pytest.raises(InputError) as caught:
        other.load_state(state)
    was, now = (arrays(*values).fingerprint()["number"] for values in ((1, 2, 3), (1, 2, 4)))
    assert was != now
    assert str(caught.value) == (
        "The training data is not what it was when the run was saved.\n"
        f"  given:    number was {was}, and is {now}\n"
        "  expected: the data of the run, as it was at position 4\n"
        "  hint:     put the data back as it was, or start a new run; to go on with the data as it is now, give "
        "accept_data_change=True (lockstep train: --accept-data-change)"
    )
    assert other.position == 0


def test_other_data_that_is_accepted_is_the_data_from_then_on() -> None:
    other = loader(1, 2, 4)
    (line,) = other.load_state(saved(loader(1, 2, 3)), accept_data_change=True)
    assert line.startswith("number was torch.int64 of shape (3,), crc32c ")
    assert other.position == 4
    assert loader(1, 2, 4).load_state(other.state()) == []


def test_more_examples_are_refused_even_so_and_what_else_has_changed_is_named() -> None:
    with pytest.raises(InputError) as caught:
        loader(1, 2, 3, 4).load_state(saved(loader(1, 2, 3)), accept_data_change=True)
    assert caught.value.what == "The saved stream had another num_examples."
    assert str(caught.value.given).startswith("num_examples 4; number was torch.int64 of shape (3,), crc32c ")


def test_a_state_that_says_nothing_of_its_data_goes_on() -> None:
    state = saved(loader(1, 2, 3))
    del state["data"]
    assert loader(1, 2, 4).load_state(state) == []


def test_what_was_bad_in_the_data_before_is_forgotten_with_it() -> None:
    stream = loader(1, 2, 3, bad_examples="skip")
    stream.quarantine.add({1: BadExample(0, "1", "torn", "2")})
    state = json.loads(json.dumps(stream.state()))
    same, other = loader(1, 2, 3, bad_examples="skip"), loader(1, 2, 4, bad_examples="skip")
    same.load_state(state)
    other.load_state(state, accept_data_change=True)
    assert (same.quarantine.reasons, other.quarantine.reasons) == ({1: "torn"}, {})


def test_sources_that_change_places_are_noticed() -> None:
    one, other = arrays(1, 2), arrays(3, 4)
    state = Loader(Concatenated({"a": one, "b": other}), batch_size=2).state()
    again = Loader(Concatenated({"a": other, "b": one}), batch_size=2)
    assert [line.split(" was ")[0] for line in again.load_state(state, accept_data_change=True)] == [
        "a: number",
        "b: number",
    ]


def test_the_part_of_another_split_is_noticed() -> None:
    reader, fractions = arrays(*range(100)), {"train": 0.5, "test": 0.5}
    train, test = split(reader, fractions).values()
    state = Loader(train, batch_size=2).state()
    assert Loader(split(reader, fractions)["train"], batch_size=2).load_state(state) == []
    same_size = {**state, "num_examples": len(test), "epoch_size": len(test)}
    with pytest.raises(InputError, match=r"given: +indices was \d+, crc32c"):
        Loader(test, batch_size=2).load_state(same_size)


class Counted:
    """A reader that counts how often it is asked what it is made of."""

    cost = "memory"
    asked = 0

    def __len__(self) -> int:
        return 3

    def read(self, index: int) -> Any:
        return {"number": index}

    def fingerprint(self) -> str:
        self.asked += 1
        return "three numbers"


def test_a_reader_is_asked_once_and_not_for_an_evaluation() -> None:
    reader = Counted()
    stream = Loader(reader, batch_size=2)
    list(stream.evaluation_batches(2))
    assert reader.asked == 0
    stream.load_state(saved(stream))
    assert (reader.asked, stream.fingerprint) == (1, {"source": "three numbers"})


class Walked:
    """An iterable dataset of some version."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __iter__(self) -> Any:
        return iter([{"number": number} for number in range(3)])

    def fingerprint(self) -> int:
        return self.version


def test_an_iterable_dataset_says_what_it_is_made_of() -> None:
    state = IterableLoader(Walked(1), batch_size=2).state()
    other = IterableLoader(Walked(2), batch_size=2)
    with pytest.raises(InputError, match="source was 1, and is 2"):
        other.load_state(state)
    assert other.load_state(state, accept_data_change=True) == ["source was 1, and is 2"]


@pytest.mark.parametrize(
    ("changed", "what", "given"),
    [
        ({"position": "x"}, "position is of the wrong type.", "position is str"),
        ({"position": None}, "position is of the wrong type.", "position is NoneType"),
        ({"position": 1.5}, "position is of the wrong type.", "position is float"),
        ({"position": -5}, "position is out of range.", "position=-5"),
        ({"position": 10**30}, "position is out of range.", f"position={10**30}"),
        ({"seed": "x"}, "seed is of the wrong type.", "seed is str"),
        ({"epoch_size": []}, "epoch_size is of the wrong type.", "epoch_size is list"),
        ({"data": 3}, "data is of the wrong type.", "data is int"),
        ({"skipped": 3}, "skipped is of the wrong type.", "skipped is int"),
        ({"skipped": [-1]}, "skipped[0] is out of range.", "skipped[0]=-1"),
        ({"quarantine": {"x": ""}}, "quarantine['x'] is of the wrong type.", "quarantine['x'] is str"),
    ],
)
def test_what_no_loader_has_saved_is_refused_and_nothing_has_changed(
    changed: dict[str, Any], what: str, given: str
) -> None:
    again = loader(1, 2, 3)
    with pytest.raises(InputError) as refusal:
        again.load_state(saved(loader(1, 2, 3)) | changed)
    assert (refusal.value.what, refusal.value.given) == (what, given)
    assert refusal.value.hint == "resume from another checkpoint: this one was changed by hand or by another program"
    assert (again.position, again.skipped) == (0, [])


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="state is of the wrong type"):
        loader(1).load_state([])  # type: ignore[arg-type]
