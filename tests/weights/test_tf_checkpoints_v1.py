from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tf_files import extents, field, shape, table, varint
from tf_fuzz import MADE, check_damage, cut, flip_a_bit

from lockstep.errors import CheckpointError
from lockstep.weights.tf_checkpoints import TensorTables
from lockstep.weights.tf_table import Table
from lockstep.weights.tf_tensors import slice_key

FLOAT, INT32, UINT8, BOOL, BFLOAT16 = 1, 3, 4, 10, 14
FLOATS, INTS, BOOLS = 5, 7, 11
WHOLE = ((0, -1),)
HUGE = 1 << 50


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.ckpt-7"


def described(name: str, dtype: int, sizes: list[int], slices: tuple[tuple[tuple[int, int], ...], ...]) -> bytes:
    """A SavedSliceMeta."""
    parts = b"".join(field(4, extents(*part)) for part in slices)
    return field(1, name.encode()) + field(2, shape(*sizes)) + field(3, dtype) + parts


def saved(values: bytes, name: str = "w") -> bytes:
    """A SavedTensorSlices with the values of one slice, which are a TensorProto."""
    return field(2, field(1, name.encode()) + field(3, values))


def written(path: Path, tensors: list[bytes], entries: dict[bytes, bytes], per_block: int = 9) -> TensorTables:
    meta = b"".join(field(1, tensor) for tensor in tensors)
    path.write_bytes(table(sorted({b"": field(1, meta), **entries}.items()), per_block=per_block))
    return TensorTables(path, [path])


def one(path: Path, dtype: int, sizes: list[int], values: bytes) -> TensorTables:
    """A file with one tensor, whole."""
    return written(path, [described("w", dtype, sizes, (WHOLE,))], {slice_key("w", WHOLE): saved(values)})


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def test_opening_reads_no_values(path: Path) -> None:
    source = TensorTables(MADE / "v1_kinds", [MADE / "v1_kinds"])
    assert source.kind == "TensorFlow checkpoint (V1)"
    assert source.path == MADE / "v1_kinds"
    assert source.tensors["deep"].num_bytes == 256
    tensors = [described(name, FLOAT, [2], (WHOLE,)) for name in "uvw"]
    values = {name: saved(field(FLOATS, bytes(8)), name) for name in "uvw"}
    written(path, tensors, {slice_key(name, WHOLE): value for name, value in values.items()}, per_block=2)
    path.write_bytes(path.read_bytes().replace(values["w"], values["v"]))
    damaged = TensorTables(path, [path])
    assert damaged.read("u").tolist() == [0, 0]
    error = refusal(lambda: damaged.read("w"))
    assert error.what == f"The tensor 'w' of {path} is damaged."
    assert error.given.startswith("a block with the checksum 0x")


@pytest.mark.parametrize("name", ["kinds/qint8", "kinds/quint8", "kinds/qint32", "kinds/string"])
def test_what_is_no_number_of_torchs_is_listed_and_refused(name: str) -> None:
    source = TensorTables(MADE / "v1_kinds", [MADE / "v1_kinds"])
    assert source.tensors[name].dtype == f"DT_{name.removeprefix('kinds/').upper()}"
    error = refusal(lambda: source.read(name))
    assert error.what == f"The tensor {name!r} of {MADE / 'v1_kinds'} holds what torch has no kind for."


def test_a_name_that_is_not_there_is_refused() -> None:
    error = refusal(lambda: TensorTables(MADE / "v1_kinds", [MADE / "v1_kinds"]).read("w"))
    assert error.what == f"{MADE / 'v1_kinds'} has no tensor 'w'."
    assert error.expected == "the name of one of its 23 tensors"


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (INT32, field(INTS, varint(7) + varint(-7)), [7, -7]),
        (INT32, field(INTS, 7) + field(INTS, -7), [7, -7]),
        (UINT8, field(INTS, varint(0) + varint(255)), [0, 255]),
        (BOOL, field(BOOLS, b"\0\1"), [False, True]),
        (FLOAT, varint(FLOATS << 3 | 5) + b"\0\0\x80?" + varint(FLOATS << 3 | 5) + b"\0\0\0@", [1.0, 2.0]),
    ],
    ids=["packed", "one by one", "bytes", "booleans", "floats one by one"],
)
def test_values_packed_or_not_are_read(path: Path, dtype: int, values: bytes, expected: list[object]) -> None:
    assert one(path, dtype, [2], values).read("w").tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "sizes", "values", "given"),
    [
        (FLOAT, [3], field(FLOATS, bytes(8)), "2 values in a slice of 3"),
        (FLOAT, [HUGE, HUGE], field(FLOATS, bytes(8)), f"2 values in a slice of {HUGE * HUGE}"),
        (FLOAT, [2], field(FLOATS, bytes(7)), "7 bytes of 4 each at byte 9 of a slice"),
        (INT32, [2], field(INTS, b"\1\xff"), "a number without an end at byte 10 of a slice"),
        (FLOAT, [2], field(INTS, b"\1\1"), "0 values in a slice of 2"),
        (BFLOAT16, [2], field(13, b"\1\1"), "torch.bfloat16, which version 1 does not have, at byte 0 of a slice"),
    ],
    ids=["too few", "shape lies", "part of one", "no number", "of another field", "of a later kind"],
)
def test_values_that_are_not_the_tensors_are_refused(
    path: Path, dtype: int, sizes: list[int], values: bytes, given: str
) -> None:
    slices = (((0, -1),) * len(sizes),)
    tensors = [described("w", dtype, sizes, slices)]
    source = written(path, tensors, {slice_key("w", slices[0]): saved(values)})
    error = refusal(lambda: source.read("w"))
    assert error.what == f"The tensor 'w' of {path} is damaged."
    assert error.given == given
    assert error.expected == "slices that make it whole, each with its values"


@pytest.mark.parametrize(
    ("slices", "value", "given"),
    [
        ((WHOLE, WHOLE), saved(field(FLOATS, bytes(8))), "slices with 4 values together, where it has 2"),
        ((((0, 1),),), saved(field(FLOATS, bytes(8))), "slices with 1 values together, where it has 2"),
        ((((0, 2),),), saved(field(FLOATS, bytes(8))), "no slice with starts and lengths ((0, 2),)"),
        ((WHOLE,), saved(field(FLOATS, bytes(8)), "v"), "a slice of 'v' in its place"),
        ((WHOLE,), b"\x12\x7f", "a field longer than its message at byte 0 of a slice"),
    ],
    ids=["twice", "not all", "absent", "of another", "malformed"],
)
def test_slices_that_are_not_the_tensors_are_refused(
    path: Path, slices: tuple[tuple[tuple[int, int], ...], ...], value: bytes, given: str
) -> None:
    source = written(path, [described("w", FLOAT, [2], slices)], {slice_key("w", WHOLE): value})
    error = refusal(lambda: source.read("w"))
    assert error.what == f"The tensor 'w' of {path} is damaged."
    assert error.given == given


def test_two_files_that_disagree_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, sizes in zip(paths, ([2], [3]), strict=True):
        written(path, [described("w", FLOAT, sizes, (WHOLE,))], {})
    error = refusal(lambda: TensorTables(tmp_path, paths))
    assert error.what == f"The tensor 'w' of {paths[1]} is damaged."
    assert error.given == "float32 of the shape (3,)"
    assert error.expected == "float32 of the shape (2,), as the files before have it"


@pytest.mark.parametrize(
    ("entries", "what", "given"),
    [
        ([(b"w", b"")], "is no checkpoint of version 1", "a table without contents"),
        ([(b"", b"\x0a\x7f")], "is damaged", "a field longer than its message"),
        ([(b"", field(1, field(1, described("w", FLOAT, [-1], ()))))], "is damaged", "the shape (-1,)"),
        (
            [(b"", field(1, field(2, field(2, 2))))],
            "is of a later version of the format",
            "a file for readers of version 2 or later",
        ),
    ],
    ids=["no contents", "malformed", "shape", "version"],
)
def test_contents_that_cannot_be_are_refused(
    path: Path, entries: list[tuple[bytes, bytes]], what: str, given: str
) -> None:
    path.write_bytes(table(entries))
    error = refusal(lambda: TensorTables(path, [path]))
    assert error.what == f"{path} {what}."
    assert error.given == given


def test_an_index_of_version_2_is_no_file_of_version_1() -> None:
    error = refusal(lambda: TensorTables(MADE / "merged", [MADE / "merged.index"]))
    assert error.what == f"{MADE / 'merged.index'} is no checkpoint of version 1."


@pytest.mark.parametrize("damage", [flip_a_bit, cut])
@pytest.mark.parametrize("name", ["v1_kinds", "v1_shards", "saver_v1.ckpt"])
def test_a_damaged_checkpoint_gives_the_exact_tensors_or_an_error(
    tmp_path: Path, name: str, damage: Callable[[random.Random, bytes], bytes]
) -> None:
    check_damage(MADE / name, tmp_path, 60, damage)


def test_a_table_that_lies_under_true_checksums_is_refused_or_read(path: Path) -> None:
    generator = random.Random(1)
    true = {key: bytes(value) for key, value in Table(MADE / "v1_kinds").items()}
    num_skipped = 0
    for _ in range(200):
        key = generator.choice([b"", *true])
        path.write_bytes(table((true | {key: flip_a_bit(generator, true[key])}).items()))
        try:
            source = TensorTables(path, [path])
        except CheckpointError:
            num_skipped += 1
            continue
        for name, info in source.tensors.items():
            try:
                assert tuple(source.read(name).shape) == info.shape
            except CheckpointError:
                num_skipped += not info.dtype.startswith("DT_")
    assert num_skipped > 30
