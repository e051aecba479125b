"""`lockstep inspect` as a user runs it, in this process."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lockstep.checkpoints.store import Store
from lockstep.cli.main import main
from lockstep.records.example import serialize_example, serialize_sequence_example
from lockstep.records.tfrecord import write_records
from lockstep.storage.remote_path import RemotePath

FIXTURES = Path(__file__).parent.parent / "fixtures"
RESNET = FIXTURES / "weights" / "resnet20-12fca82f.th"


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Any:
    """The lines that the command writes."""

    def run(*words: str | Path, code: int = 0) -> list[str]:
        assert main(["inspect", *map(str, words)]) == code
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def read(inspect: Any) -> Any:
    """What the command writes as JSON."""
    return lambda *words, code=0: json.loads("\n".join(inspect(*words, "--json", code=code)))


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    store = Store(tmp_path / "run" / "checkpoints")
    for step in (10, 20):
        sections = {
            "parameters": {"w": torch.tensor([3.0, 4.0])},
            "buffers": {},
            "slots": {"momentum/w": torch.zeros(2)},
            "average": {"w": torch.ones(2)},
        }
        store.write(step, sections, {"step": step})
    return tmp_path / "run"


def records(path: Path, count: int = 3) -> Path:
    features = {"label": np.array([7]), "image": [b"\xff" * 2000], "name": [b"cat"], "scores": np.float32([0.5, 1])}
    write_records(path, [serialize_example(features)] * count)
    return path


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_tensors_are_listed_with_totals(inspect: Any) -> None:
    lines = inspect(RESNET)
    assert lines[0] == f"{RESNET}: torch file"
    assert lines[1] == "  best_prec1: 91.78000183105469"
    assert lines[2].split() == ["module.conv1.weight", "(16,", "3,", "3,", "3)", "float32", "1.7", "kB"]
    assert lines[-1] == "97 tensors, 271,098 values, 1.1 MB"
    assert len(lines) == 100


def test_norms(inspect: Any, read: Any, tmp_path: Path) -> None:
    tensors = {
        "f": torch.tensor([3.0, -4.0]),
        "i": torch.tensor([5, 12]),
        "b": torch.tensor([True]),
        "h": torch.full((3, 3), 200.0, dtype=torch.float16),
        "n": torch.tensor([torch.nan]),
        "e": torch.empty(0),
    }
    save_file(tensors, tmp_path / "weights")
    found = {each["name"]: each["norm"] for each in read(tmp_path / "weights", "--norms")["tensors"]}
    assert found == {"f": 5.0, "i": 13.0, "b": 1.0, "h": 600.0, "n": "nan", "e": 0.0}
    assert any(line.endswith("norm 13") for line in inspect(tmp_path / "weights", "--norms"))
    assert {each["norm"] for each in read(tmp_path / "weights")["tensors"]} == {None}


def test_the_step_of_a_tensorflow_checkpoint(inspect: Any, read: Any) -> None:
    path = FIXTURES / "tf_ckpt/made/saver"
    assert inspect(path)[0] == f"{path / 'model.ckpt-2'}: TensorFlow checkpoint (V2), step 2"
    assert read(path / "model.ckpt-1")["step"] == 1


def test_the_step_of_a_torch_file(read: Any, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "step": 7}, tmp_path / "weights")
    found = read(tmp_path / "weights")
    assert found["step"] == 7
    assert found["beside"] == {"step": 7}


def test_strings_are_listed(read: Any) -> None:
    tensors = read(FIXTURES / "tf_ckpt/made/objects")["tensors"]
    assert tensors[0]["name"] == "_CHECKPOINTABLE_OBJECT_GRAPH"
    assert tensors[0]["dtype"] == "DT_STRING"


def test_a_run(inspect: Any, read: Any, workdir: Path) -> None:
    lines = inspect(workdir, "--norms")
    assert lines[0] == f"{workdir / 'checkpoints/step-00000020'}: Lockstep checkpoint, step 20"
    assert [line.split()[0] for line in lines[1:4]] == ["w", "w/ExponentialMovingAverage", "momentum/w"]
    assert lines[1].endswith("norm 5")
    assert lines[4] == "3 tensors, 6 values, 24 bytes"
    assert [line.rpartition(" ")[2] for line in lines[5:]] == ["intact", "intact"]
    assert read(f"{workdir}@10")["step"] == 10
    assert [each["step"] for each in read(f"{workdir}@10")["checkpoints"]] == [10, 20]


@pytest.mark.parametrize("name", ["slots.safetensors", "values.json", "parameters.safetensors"])
def test_a_damaged_file_of_a_run_is_named(inspect: Any, read: Any, workdir: Path, name: str) -> None:
    damaged = workdir / "checkpoints/step-00000010" / name
    flip(damaged, -2)
    lines = inspect(workdir, code=1)
    assert lines[-2] == "damaged:"
    assert lines[-1].startswith(f"  {damaged} is damaged. Given: sha256 ")
    assert len(read(f"{workdir}@10", code=1)["problems"]) == 1


def test_a_damaged_tensor_is_named(inspect: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5), "b": torch.zeros(2)}, tmp_path / "weights")
    flip(tmp_path / "weights", (tmp_path / "weights").read_bytes().index(torch.ones(5).numpy().tobytes()))
    lines = inspect(tmp_path / "weights", code=1)
    assert lines[1].endswith("damaged")
    assert "Bad CRC-32" in lines[-1]


def test_a_missing_file_of_values_is_named_once_and_nothing_is_called_damaged(
    inspect: Any, read: Any, tmp_path: Path
) -> None:
    index = FIXTURES / "tf_ckpt" / "mtcnn" / "PNet-18.index"
    (tmp_path / index.name).write_bytes(index.read_bytes())
    lines = inspect(tmp_path / "PNet-18", code=1)
    assert lines[-2] == "31 tensors, 13,925 values, 55.7 kB"
    assert lines[-1] == (
        f"The checkpoint {tmp_path / 'PNet-18'} is not whole. "
        "Given: no file PNet-18.data-00000-of-00001; expected: its file of values."
    )
    assert "damaged" not in "".join(lines)
    assert read(tmp_path / "PNet-18", code=1)["problems"] == [lines[-1]]


def test_values(inspect: Any, read: Any, tmp_path: Path) -> None:
    save_file({"a": torch.tensor([[1.0, torch.inf], [-2.0, 0.5]]), "c": torch.tensor([1 + 2j])}, tmp_path / "weights")
    lines = inspect(tmp_path / "weights", "--values", "a")
    assert lines[0] == "a: (2, 2) float32"
    assert lines[1] == "from -2 to inf, mean inf, norm inf"
    assert lines[2:] == ["[[ 1.   inf]", " [-2.   0.5]]"]
    assert read(tmp_path / "weights", "--values", "a")["values"] == [[1.0, "inf"], [-2.0, 0.5]]
    assert read(tmp_path / "weights", "--values", "c")["values"] == [[1.0, 2.0]]
    inspect(tmp_path / "weights", "--values", "b", code=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float8_e5m2], ids=str)
def test_values_of_every_kind(inspect: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2).to(dtype), "empty": torch.empty(0).to(dtype)}, tmp_path / "weights")
    assert inspect(tmp_path / "weights", "--values", "a")[1] == "from 1 to 1, mean 1, norm 1.41421"
    assert inspect(tmp_path / "weights", "--values", "empty")[1:] == ["[]"]


def test_a_difference(inspect: Any, read: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    same = torch.tensor([1.0, torch.nan, torch.inf])
    save_file(
        {"same": same, "shape": torch.ones(2), "changed": torch.tensor([1.0, 2.0, 4.0]), "gone": torch.ones(1)}, one
    )
    save_file(
        {"same": same, "shape": torch.ones(3), "changed": torch.tensor([1.0, 2.5, 4.0]), "new": torch.ones(1)}, two
    )
    assert inspect(one, "--diff", two, code=1) == [
        f"only in {one}:",
        "  gone",
        f"only in {two}:",
        "  new",
        "of another shape or dtype:",
        "  shape: (2,) float32, (3,) float32",
        "with other values (largest difference, absolute and relative):",
        "  changed  0.5  0.2  1 of 3 values",
        "1 tensors are equal, 1 have other values",
    ]
    found = read(one, "--diff", two, code=1)
    assert found["changes"][0]["largest_relative"] == 0.2
    assert found["only_first"] == ["gone"]


@pytest.mark.parametrize(
    ("one", "other", "absolute", "count"),
    [
        ([1.0, torch.nan], [1.0, 2.0], "inf", 1),
        ([torch.inf], [-torch.inf], "inf", 1),
        ([0.0], [-0.0], None, 0),
        ([torch.nan], [torch.nan], None, 0),
        ([2**60], [2**60 + 1], 0.0, 1),
        ([1 + 1j, 2], [1 + 2j, 2], 1.0, 1),
        ([True, False], [True, True], 1.0, 1),
    ],
)
def test_values_that_differ(
    read: Any, tmp_path: Path, one: list[Any], other: list[Any], absolute: object, count: int
) -> None:
    for name, values in (("one", one), ("other", other)):
        save_file({"a": torch.tensor(values)}, tmp_path / name)
    found = read(tmp_path / "one", "--diff", tmp_path / "other", code=int(count > 0))
    assert [(each["largest_absolute"], each["num_different"]) for each in found["changes"]] == [
        (absolute, count)
    ] * bool(count)
    assert found["num_equal"] == (not count)


def test_two_checkpoints_of_a_run(inspect: Any, workdir: Path) -> None:
    assert inspect(f"{workdir}@10", "--diff", f"{workdir}@20") == ["3 tensors are equal, 0 have other values"]


def test_records(inspect: Any, read: Any, tmp_path: Path) -> None:
    path = records(tmp_path / "a.tfrecord")
    lines = inspect(path)
    assert lines[0] == f"{path}: records"
    assert lines[1].startswith(f"  {path}: 3 records, 2.1 kB to 2.1 kB each, 6.")
    assert lines[2:7] == [
        "features of the first record:",
        "  image   bytes[1]: 2.0 kB",
        "  label   int64[1]: 7",
        "  name    bytes[1]: 'cat'",
        "  scores  float32[2]: 0.5, 1",
    ]
    assert lines[7].startswith("1 file, 3 records, 6.")
    found = read(path)
    assert found["files"][0]["num_records"] == 3
    assert found["features"]["label"] == "int64[1]: 7"


def test_sequence_examples_and_other_records(inspect: Any, tmp_path: Path) -> None:
    example = serialize_sequence_example({"id": np.array([1])}, {"frames": [np.array([1, 2]), np.array([3])]})
    write_records(tmp_path / "sequences", [example])
    assert "  frames  2 steps, the first of int64[2]: 1, 2" in inspect(tmp_path / "sequences")
    write_records(tmp_path / "others", [b"no example"])
    assert "the first record is no tf.train.Example" in inspect(tmp_path / "others")


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_compressed_records(read: Any, tmp_path: Path, compression: Any) -> None:
    write_records(tmp_path / "a", [b"one", b"three"], compression)
    (file,) = read(tmp_path / "a")["files"]
    assert (file["compression"], file["num_records"], file["smallest"], file["largest"]) == (compression, 2, 3, 5)


def test_a_set_of_shards_by_pattern_and_folder(inspect: Any, read: Any, tmp_path: Path) -> None:
    for number in range(2):
        records(tmp_path / f"train-{number:05}-of-00002", 2 + number)
    (tmp_path / "labels.txt").write_text("cat")
    for path in (tmp_path, tmp_path / "train-*"):
        assert [file["num_records"] for file in read(path)["files"]] == [2, 3]
    assert inspect(tmp_path)[-1].startswith("2 files, 5 records")
    (tmp_path / "train-00000-of-00002").unlink()
    inspect(tmp_path / "train-*", code=2)


def test_truncated_records_are_named_by_number_and_byte(inspect: Any, read: Any, tmp_path: Path) -> None:
    path = records(tmp_path / "a")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    lines = inspect(path, code=1)
    assert lines[1].startswith(f"  {path}: 2 records")
    assert lines[-2] == "damaged:"
    assert lines[-1].startswith(f"  {path} is cut short: record 2, at byte {size // 3 * 2}, is not whole.")
    assert len(read(path, code=1)["problems"]) == 1


def test_a_flipped_bit_in_a_record_is_named(inspect: Any, tmp_path: Path) -> None:
    path = records(tmp_path / "a")
    flip(path, path.stat().st_size // 2)
    assert inspect(path, code=1)[-1].startswith(f"  Record 1 of {path}, at byte {path.stat().st_size // 3}, is damaged")


@pytest.mark.parametrize("flag", ["--diff", "--values"])
def test_records_have_no_tensors(inspect: Any, tmp_path: Path, flag: str) -> None:
    inspect(records(tmp_path / "a"), flag, "a", code=2)


def test_what_cannot_be_inspected(inspect: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    inspect(tmp_path / "text", code=2)
    inspect(tmp_path / "none", code=2)
    inspect("hdfs://bucket/weights", code=2)
    inspect(RESNET, "--diff", "gs://bucket/weights", code=2)


def test_what_is_in_an_object_store_is_inspected(
    inspect: Any, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = RemotePath(f"memory://{uuid.uuid4().hex}")
    (bucket / "train-0").upload(records(tmp_path / "train-0"))
    (bucket / "weights" / "resnet.th").upload(RESNET)
    assert read(f"{bucket}/train-*")["files"][0]["num_records"] == read(tmp_path / "train-0")["files"][0]["num_records"]
    assert read(bucket)["files"][0]["path"] == f"{bucket}/train-0"
    assert read(f"{bucket}/weights/resnet.th")["tensors"] == read(RESNET)["tensors"]
    inspect(f"{bucket}/weights/none.th", code=2)


def test_one_thing_is_shown_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "bccd", "--anchors", "--diff", "other.npz"])
    assert "--diff: not allowed with argument --anchors" in capsys.readouterr().err
