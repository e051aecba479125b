from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import assert_consistent, sections_of, unfinished, write
from safetensors.torch import load_file

from lockstep.checkpoints import Retention, Store
from lockstep.checkpoints.manifest import RunningHash
from lockstep.checkpoints.store import Digests, digests_of
from lockstep.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs" / "mine" / "checkpoints")


def test_making_and_asking_touch_nothing(store: Store, tmp_path: Path) -> None:
    assert store.steps() == []
    assert store.newest() is None
    assert store.read() is None
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_read(store: Store) -> None:
    path = store.write(20, sections_of(20), {"step": 20})
    write(store, 3)
    assert path == store.path(20) == store.folder / "step-00000020"
    assert (store.steps(), store.newest()) == ([3, 20], 20)
    assert assert_consistent(store.read()) == 20
    assert assert_consistent(store.read(3)) == 3
    assert unfinished(store.folder) == []


def test_steps_may_outgrow_their_digits(store: Store) -> None:
    write(store, 99_999_999, 100_000_000)
    assert store.steps() == [99_999_999, 100_000_000]
    assert assert_consistent(store.read()) == 100_000_000


def test_what_is_read_is_nobody_elses(store: Store) -> None:
    write(store, 1)
    first = store.read(1)
    assert first is not None
    first.tensors["parameters"]["conv.weight"].zero_()
    assert_consistent(store.read(1))


def test_strangers_in_the_folder_are_left_alone(store: Store) -> None:
    write(store, 1)
    (store.folder / "notes").mkdir()
    (store.folder / "step-12").mkdir()
    (store.folder / "step-00000009").write_text("a file")
    write(store, 2)
    assert store.steps() == [1, 2]
    assert unfinished(store.folder) == ["notes"]
    assert (store.folder / "step-12").is_dir()


def test_files_are_those_of_the_format(store: Store) -> None:
    """Two lines read the weights; the manifest's hashes are those of any other tool."""
    before = int(time.time())
    path = store.write(7, sections_of(7), {"step": 7})

    weights = load_file(path / "parameters.safetensors")
    assert weights["conv.weight"].tolist() == [7.0] * 64

    names = ["parameters.safetensors", "buffers.safetensors", "average.safetensors", "values.json"]
    assert sorted(file.name for file in path.iterdir()) == sorted([*names, "manifest.json"])
    manifest = json.loads((path / "manifest.json").read_text())
    own_hash = manifest.pop("sha256")
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert own_hash == hashlib.sha256(compact.encode()).hexdigest()
    assert before <= manifest.pop("saved_unix_seconds") <= time.time()
    assert manifest == {
        "format": 1,
        "step": 7,
        "files": [
            {"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name in names
            for data in [(path / name).read_bytes()]
        ],
        "scores": {},
        "best_by": None,
    }
    assert json.loads((path / "values.json").read_text()) == {"step": 7}


def test_each_byte_is_hashed_once_for_manifest_and_digests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest is what the file's own hash was after the tensor; the checkpoint has no name yet when they are told."""
    told: list[tuple[Digests, str, bool]] = []
    hashed: list[int] = []
    update = RunningHash.update
    monkeypatch.setattr(RunningHash, "update", lambda self, part: (hashed.append(len(part)), update(self, part))[1])
    sections = sections_of(3)
    for _ in range(2):  # the second one finds it there
        path = store.write(3, sections, {}, before_commit=lambda *told_: told.append((*told_, store.path(3).exists())))
        if len(told) == 1:
            assert sum(hashed) == sum(file.stat().st_size for file in path.iterdir())
    digests, values, _ = told[0]
    assert told == [(digests, values, False), (digests, values, True)]
    assert values == hashlib.sha256((path / "values.json").read_bytes()).hexdigest()
    for section, members in digests_of(sections).items():
        data = (path / f"{section}.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        places = {name: each["data_offsets"][1] for name, each in json.loads(data[8:start]).items()}
        wanted = {name: hashlib.sha256(data[: start + end]).hexdigest()[:16] for name, end in places.items()}
        assert digests[section] == members == wanted


def test_what_is_told_before_a_checkpoint_has_its_name_may_fail(store: Store) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointError("No.", given="a full disk", expected="room", hint="make room")

    with pytest.raises(CheckpointError, match=r"No\."):
        store.write(3, sections_of(3), {}, before_commit=refuse)
    assert (store.steps(), unfinished(store.folder)) == ([], [])


def test_an_intact_checkpoint_is_not_written_again(store: Store) -> None:
    path = store.write(5, sections_of(5), {"step": 5})
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert store.write(5, sections_of(5), {"step": 5}) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert assert_consistent(store.read()) == 5


def test_one_of_other_tensors_is_replaced(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    path = store.write(5, sections_of(5), {"step": 5})
    assert store.write(5, sections_of(6), {"step": 6}) == path
    found = store.read(5)
    assert found is not None
    assert all((tensor == 6).all() for tensors in found.tensors.values() for tensor in tensors.values())
    assert caplog.messages == [f"{path} holds other tensors than are to be saved now. It is replaced."]


@pytest.mark.parametrize("name", ["parameters.safetensors", "values.json", "manifest.json"])
def test_a_damaged_one_is_replaced(store: Store, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write(store, 4, 5)
    (store.path(5) / name).write_bytes(b"{}")
    write(store, 5)
    (message,) = caplog.messages
    assert message.startswith(f"{store.path(5) / name} is damaged. Given: ")
    assert message.endswith("It is replaced.")
    assert assert_consistent(store.read()) == 5
    assert unfinished(store.folder) == []


def test_the_newest_are_kept(store: Store) -> None:
    write(store, *range(0, 80, 10))
    assert store.steps() == [30, 40, 50, 60, 70]
    assert unfinished(store.folder) == []


def test_one_every_few_hours_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.retention = Retention(newest=2, every_hours=2.0)
    now = time.time()
    for i in range(8):
        monkeypatch.setattr(time, "time", lambda i=i: now + 3601 * i)
        write(store, i)
    assert store.steps() == [0, 2, 4, 6, 7]


@pytest.mark.parametrize(("every_hours", "left"), [(None, [30]), (1.0, [10, 20, 30])])
def test_an_old_one_that_cannot_say_when_it_was_saved(store: Store, every_hours: float | None, left: list[int]) -> None:
    write(store, 10, 20)
    (store.path(20) / "manifest.json").write_bytes(b"{}")
    store.retention = Retention(newest=1, every_hours=every_hours)
    write(store, 30)
    assert store.steps() == left


def test_a_run_that_fell_back_keeps_what_it_writes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The damaged checkpoint of a later step does not count as the newest, and is replaced in passing."""
    store.retention = Retention(newest=1)
    write(store, 10)
    store.retention = Retention(newest=2)
    write(store, 20)
    (store.path(20) / "values.json").unlink()
    store.retention = Retention(newest=1)
    write(store, 15)
    assert store.steps() == [15, 20]
    assert assert_consistent(store.read()) == 15
    write(store, 20)
    assert store.steps() == [20]
    assert assert_consistent(store.read()) == 20


def test_an_old_one_that_will_not_go_does_not_end_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.retention = Retention(newest=1)
    write(store, 1)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == store.path(1):
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    write(store, 2)
    assert store.steps() == [1, 2]
    assert caplog.messages == [f"the old checkpoint {store.path(1)} cannot be deleted: Permission denied"]


def test_a_reader_that_meets_a_deletion_reads_the_newer_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.retention = Retention(newest=1)
    write(store, 1)
    stale = [store.steps(), [2]]
    write(store, 2)
    monkeypatch.setattr(store, "steps", lambda: stale.pop(0))
    assert assert_consistent(store.read()) == 2


def test_missing_step(store: Store) -> None:
    write(store, 10, 20)
    with pytest.raises(CheckpointError) as raised:
        store.read(15)
    assert str(raised.value) == (
        f"{store.folder} has no checkpoint of step 15.\n"
        "  given:    step 15\n"
        "  expected: one of the steps there are: 10, 20\n"
        "  hint:     ask for one of these, or for no step to get the newest that is intact"
    )


def test_missing_step_of_an_empty_store(store: Store) -> None:
    with pytest.raises(CheckpointError, match="one of the steps there are: none"):
        store.read(0)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError) as raised:
        Store(tmp_path / "notes.txt").steps()
    assert str(raised.value) == (
        f"The checkpoints in {tmp_path / 'notes.txt'} cannot be listed: Not a directory.\n"
        f"  given:    {tmp_path / 'notes.txt'} (Not a directory)\n"
        "  expected: a folder that can be read\n"
        "  hint:     give the workdir of a run, and let this user read it"
    )


@pytest.mark.parametrize(
    ("tensors", "values", "what"),
    [
        ({"../evil": {}}, {}, "'../evil' cannot be a section"),
        ({"parameters": {"w": torch.eye(2).to_sparse()}}, {}, "The tensor 'w' of 'parameters' is of a kind"),
        ({}, {"loader": (1,)}, "The value 'loader' cannot be saved as JSON"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_disk_is_touched(store: Store, tensors, values, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        store.write(1, tensors, values)
    assert not store.folder.exists()


def test_writing_is_quiet(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lockstep"):
        write(store, *range(8))
        store.read()
    assert caplog.messages == []
