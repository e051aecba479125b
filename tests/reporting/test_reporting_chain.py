"""The chain of a run: each line follows from the one before, whatever happens to the run."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import WorkdirError
from lockstep.reporting import chain as chains
from lockstep.reporting.chain import CHAIN, ChainFile, read_chain


def attempt(step: int, loss: float = 0.1, *, refused: bool = False, position: int | None = None) -> dict[str, Any]:
    place = 8 * step if position is None else position
    return {"step": step, "position": place, "losses": {"l": loss}, "refused": refused, "in_metrics": False}


def event(step: int, name: str = "start", **facts: Any) -> dict[str, Any]:
    return {"step": step, "event": name, "recipe": "a = 1", "workers": 2, **facts}


def chain(path: Path, *facts: dict[str, Any], from_position: int = 0) -> Path:
    file = ChainFile(path / CHAIN, from_position=from_position)
    for each in facts:
        (file.write_event if "event" in each else file.write)(each)
    file.close()
    return path / CHAIN


def test_it_reads_back_what_was_written_with_links_that_fit(tmp_path: Path) -> None:
    scores = {"step": 1, "evaluation": "validation", "scores": {"top1": 0.5}}
    path = chain(tmp_path, event(0), attempt(1, 0.1 + 0.2), scores, attempt(2, math.nan))
    lines = list(read_chain(path))
    assert all(line.fits for line in lines)
    assert [line.number for line in lines] == [1, 2, 3, 4]
    assert lines[0].facts == event(0)
    assert lines[1].facts == attempt(1, 0.1 + 0.2)
    assert lines[2].facts == scores
    assert lines[3].facts["losses"] == {"l": "nan"}
    assert len({line.link for line in lines}) == 4


def test_the_same_lines_have_the_same_bytes_and_each_bit_of_a_number_counts(tmp_path: Path) -> None:
    made = []
    for name, loss in [("a", 0.1), ("b", 0.1), ("c", math.nextafter(0.1, 1))]:
        (tmp_path / name).mkdir()
        made.append(chain(tmp_path / name, event(0), attempt(1, loss)).read_bytes())
    assert made[0] == made[1] != made[2]


def test_an_event_holds_what_is_not_as_in_the_event_before(tmp_path: Path) -> None:
    path = chain(tmp_path, event(0), attempt(1), event(1, "stage", workers=3), attempt(2), event(2, "end", workers=3))
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sorted(each.keys() - {"link"}) for each in written if "event" in each] == [
        ["event", "recipe", "step", "workers"],
        ["event", "step", "workers"],
        ["event", "step"],
    ]
    assert [line.facts["recipe"] for line in read_chain(path) if "event" in line.facts] == ["a = 1"] * 3


def test_it_is_cut_back_to_where_a_run_goes_on_from(tmp_path: Path) -> None:
    scores = {"step": 2, "evaluation": "validation", "scores": {}}
    path = chain(tmp_path, event(0), attempt(1), attempt(2), scores)
    whole = path.read_bytes()
    chain(tmp_path, attempt(3), event(3, "end"), from_position=16)
    with path.open("ab") as file:
        file.write(b'{"step": 4, "posi')
    again = ChainFile(path, from_position=16)
    assert again.last_attempt == attempt(2)
    assert path.read_bytes() == whole
    again.write(scores)  # stands there already
    assert path.read_bytes() == whole
    again.write(attempt(3))
    again.write_event(event(3, "resume"))
    again.close()
    lines = list(read_chain(path))
    assert all(line.fits for line in lines)
    assert lines[-1].facts["recipe"] == "a = 1"
    assert len(lines) == 6


def test_it_is_opened_without_parsing_the_attempts_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chain(tmp_path, event(0), *map(attempt, range(1, 50)), event(49, "stage", workers=3))
    chain(tmp_path, *map(attempt, range(50, 100)), from_position=8 * 49)
    whole, parsed, parse = path.read_bytes(), [], chains._parsed
    monkeypatch.setattr(chains, "_parsed", lambda line: parsed.append(line) or parse(line))
    file = ChainFile(path, from_position=8 * 90)
    assert [json.loads(line)["step"] for line in parsed] == [0, 49, 49, 90, 91]
    assert file.last_attempt == attempt(90)
    for step in range(91, 100):
        file.write(attempt(step))
    assert path.read_bytes() == whole
    file.write_event(event(99, "end", workers=3))
    file.close()
    assert json.loads(path.read_bytes().splitlines()[-1]).keys() == {"step", "event", "link"}


def test_an_event_of_a_later_place_is_cut_off_too(tmp_path: Path) -> None:
    path = chain(tmp_path, event(12, from_position=96), attempt(13), event(13, "end"), from_position=96)
    whole = path.read_bytes()
    ChainFile(path, from_position=104).close()
    assert path.read_bytes() == whole
    ChainFile(path, from_position=64).close()
    assert path.read_bytes() == b""


def test_the_first_scores_of_an_evaluation_stand(tmp_path: Path) -> None:
    scores = {"step": 1, "evaluation": "validation", "scores": {"top1": 0.5}}
    path = chain(tmp_path, event(0), attempt(1), scores)
    again = [scores | {"scores": {"top1": 0.5000001}}, scores | {"evaluation": "test"}, scores | {"step": 2}]
    chain(tmp_path, again[0], again[1], attempt(2), again[2], from_position=8)
    assert [line.facts for line in read_chain(path) if "evaluation" in line.facts] == [scores, *again[1:]]


def digests(step: int, name: str = "w") -> dict[str, Any]:
    return {"step": step, "at": 8 * step, "digests": {"parameters": {name: "0123456789abcdef"}}, "values": "ab"}


def test_digests_that_come_late_stay_where_later_attempts_are_cut_off(tmp_path: Path) -> None:
    path = chain(tmp_path, event(0), attempt(1), attempt(2), digests(1), attempt(3), digests(2), attempt(4), digests(4))
    chain(tmp_path, digests(2), event(2, "resume"), attempt(3), from_position=16)
    lines = list(read_chain(path))
    assert all(line.fits for line in lines)
    kept = [event(0), attempt(1), attempt(2), digests(1), digests(2), event(2, "resume"), attempt(3)]
    assert [line.facts for line in lines] == kept
    assert [each.name for each in tmp_path.iterdir()] == [CHAIN]


def test_late_digests_that_were_changed_go_with_the_attempts_around_them(tmp_path: Path) -> None:
    path = chain(tmp_path, event(0), attempt(1), attempt(2), digests(1))
    path.write_bytes(path.read_bytes().replace(b"0123456789abcdef", b"0123456789abcdee"))
    chain(tmp_path, from_position=8)
    assert [line.facts for line in read_chain(path)] == [event(0), attempt(1)]


def test_where_it_cannot_be_replaced_it_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chain(tmp_path, event(0), attempt(1), attempt(2), digests(1))
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(WorkdirError, match=r"chain.jsonl cannot be written"):
        chain(tmp_path, from_position=8)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [CHAIN]


def test_two_threads_write_lines_that_follow_from_each_other(tmp_path: Path) -> None:
    file = ChainFile(tmp_path / CHAIN, from_position=0)
    writers = [
        threading.Thread(target=lambda: [file.write(attempt(step)) for step in range(1, 300)]),
        threading.Thread(target=lambda: [file.write(digests(step)) for step in range(1, 300)]),
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    file.close()
    lines = list(read_chain(tmp_path / CHAIN))
    assert len(lines) == 598
    assert all(line.fits for line in lines)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("how", ["edited", "removed", "twice", "swapped"])
def test_a_line_that_was_touched_does_not_fit(tmp_path: Path, number: int, how: str) -> None:
    path = chain(tmp_path, event(0), *map(attempt, range(1, 6)))
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "edited":
        lines[number] = lines[number].replace(b'"step": ', b'"step": 1', 1)
    elif how == "removed":
        del lines[number]
    elif how == "twice":
        lines.insert(number, lines[number])
    else:
        lines[number : number + 2] = lines[number : number + 2][::-1]
    path.write_bytes(b"".join(lines))
    assert not all(line.fits for line in read_chain(path))


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"step": 1}\n',
        b'{"step": 1, "link": "ab"}\n',
        b'{"step": true, "evaluation": "v", "link": "ab"}\n',
        b'{"step": 1, "position": "8", "losses": {}, "refused": false, "in_metrics": true, "link": "ab"}\n',
        b'{"step": 1, "event": "start", "from_position": "8", "link": "ab"}\n',
        b'{"step": 1, "event": "start", "skipped": ["8"], "link": "ab"}\n',
        b'{"step": 1, "at": 8, "digests": {"parameters": 3}, "link": "ab"}\n',
        b'{"step": 1, "at": 8, "digests": {}, "evaluation": [], "link": "ab"}\n',
        b'{"step": 1, "at": "8", "digests": {}, "link": "ab"}\n',
        b'{"step": 1, "event": "start", "workers": 0, "link": "ab"}\n',
        b'{"step": 1, "result": 3, "link": "ab"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_line_of_a_chain(tmp_path: Path, line: bytes) -> None:
    path = chain(tmp_path, event(0), attempt(1))
    with path.open("ab") as file:
        file.write(line)
    _, second, third = path.read_bytes().splitlines(keepends=True)
    before = path.read_bytes()
    assert [(bool(each.facts), each.fits) for each in read_chain(path)] == [(True, True), (True, True), (False, False)]
    with pytest.raises(WorkdirError, match=r"chain.jsonl, line 3 is not a line of a chain") as caught:
        ChainFile(path, from_position=8)
    assert "nothing was changed" in str(caught.value)
    assert path.read_bytes() == before
    path.write_bytes(second * 3 + third + second * 2)
    with pytest.raises(WorkdirError, match=r"chain.jsonl, line 4 is not a line of a chain"):
        ChainFile(path, from_position=8)
