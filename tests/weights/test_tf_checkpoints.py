from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tf_files import entry, extents, field, header, table, write_bundle
from tf_fuzz import MADE, check_damage, cut, flip_a_bit

from lockstep.errors import CheckpointError
from lockstep.weights.tf_checkpoints import TensorBundle
from lockstep.weights.tf_table import Table
from lockstep.weights.tf_tensors import slice_key

FLOAT, INT8, BOOL, BFLOAT16 = 1, 6, 10, 14
HUGE = 1 << 50


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "model.ckpt-7"


def refusal(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def test_opening_needs_no_data_and_a_tensor_only_its_own(tmp_path: Path) -> None:
    index = tmp_path / "merged.index"
    index.write_bytes((MADE / "merged.index").read_bytes())
    source = TensorBundle(tmp_path / "merged")
    assert source.kind == "TensorFlow checkpoint (V2)"
    assert source.path == tmp_path / "merged"
    assert source.tensors["whole"].shape == (100, 70)
    assert source.tensors["whole"].num_bytes == 14_000
    files = {path.name for path in MADE.glob("merged.data-*")}
    assert len(files) == 4
    present = tmp_path / "merged.data-00001-of-00004"
    present.write_bytes((MADE / present.name).read_bytes())
    assert source.read("device1") == 1
    error = refusal(lambda: source.read("whole"))
    assert error.what == f"The checkpoint {tmp_path / 'merged'} is not whole."
    assert error.given == "no file merged.data-00000-of-00004"
    assert error.expected == "all of its 4 files of values"
    assert error.hint == "copy what is missing from where the checkpoint was written"


@pytest.mark.parametrize(
    ("checkpoint", "name", "dtype", "num_bytes"),
    [
        ("objects/ckpt-1", "_CHECKPOINTABLE_OBJECT_GRAPH", "DT_STRING", None),
        ("kinds", "kinds/string", "DT_STRING", 22),
        ("kinds", "kinds/qint8", "DT_QINT8", 2),
        ("kinds", "kinds/quint8", "DT_QUINT8", 2),
        ("kinds", "kinds/qint32", "DT_QINT32", 8),
    ],
)
def test_what_is_no_number_of_torchs_is_listed_and_refused(
    checkpoint: str, name: str, dtype: str, num_bytes: int | None
) -> None:
    source = TensorBundle(MADE / checkpoint)
    assert source.tensors[name].dtype == dtype
    assert num_bytes in (source.tensors[name].num_bytes, None)
    error = refusal(lambda: source.read(name))
    assert error.what == f"The tensor {name!r} of {MADE / checkpoint}.index holds what torch has no kind for."
    assert error.given == f"values of type {dtype}"
    assert error.expected == "floating-point numbers, integers, complex numbers or booleans"


def test_a_kind_of_a_later_tensorflow_is_named_by_its_number(prefix: Path) -> None:
    source = TensorBundle(write_bundle(prefix, {b"w": entry(99, [2], data=b"ab")}, b"ab"))
    assert source.tensors["w"].dtype == "DataType(99)"
    assert refusal(lambda: source.read("w")).given == "values of type DataType(99)"


def test_a_name_that_is_not_there_is_refused() -> None:
    source = TensorBundle(MADE / "merged")
    error = refusal(lambda: source.read("hole"))
    assert error.what == f"{MADE / 'merged'}.index has no tensor 'hole'."
    assert error.expected == "the name of one of its 5 tensors"
    assert error.hint == "list its tensors, and name one of these"


def test_a_boolean_is_true_for_any_other_byte(prefix: Path) -> None:
    source = TensorBundle(write_bundle(prefix, {b"flags": entry(BOOL, [4], data=b"\0\1\2\xff")}, b"\0\1\2\xff"))
    assert source.read("flags").tolist() == [False, True, True, True]


def test_each_read_is_a_tensor_of_its_own() -> None:
    source = TensorBundle(MADE / "kinds")
    source.read("deep").zero_()
    assert source.read("deep").sum() == 63 * 32


@pytest.mark.parametrize("dtype", [1, 2, 3, 4, 5, 6, 8, 9, 10, 14, 17, 18, 19, 22, 23, 24, 25, 26, 28])
def test_a_tensor_of_any_kind_may_be_empty(prefix: Path, dtype: int) -> None:
    source = TensorBundle(write_bundle(prefix, {b"w": entry(dtype, [0, 2])}))
    assert str(source.read("w").dtype) == f"torch.{source.tensors['w'].dtype}"
    assert source.read("w").shape == (0, 2)


@pytest.mark.parametrize("sizes", [(1 << 62, 0), (0, 1 << 62, 1 << 62), (1,) * 100], ids=str)
def test_large_sizes_of_nothing_and_many_of_one_are_no_fault(prefix: Path, sizes: tuple[int, ...]) -> None:
    data = b"\7" * (0 not in sizes)
    source = TensorBundle(write_bundle(prefix, {b"w": entry(INT8, sizes, data=data)}, data))
    assert source.read("w").shape == sizes


@pytest.mark.parametrize(
    ("stored", "file", "given", "expected"),
    [
        (entry(FLOAT, [3], data=b"12345678"), ".index", "8 bytes", "12 for torch.float32 of the shape (3,)"),
        (entry(FLOAT, [HUGE]), ".index", "0 bytes", f"{4 * HUGE} for torch.float32 of the shape ({HUGE},)"),
        (entry(INT8, [HUGE], size=HUGE), ".data-00000-of-00001", "a file of 8 bytes", f"at least {HUGE} bytes"),
        (entry(INT8, [2], size=2, offset=7), ".data-00000-of-00001", "a file of 8 bytes", "at least 9 bytes"),
        (entry(INT8, [2], size=2, shard=1), ".index", "file 1", "one of 1 files, counted from 0"),
        (
            entry(INT8, [8], data=b"87654321"),
            ".data-00000-of-00001",
            "8 bytes at byte 0 with the checksum 0x",
            "which the index has for them",
        ),
    ],
    ids=["short", "shape lies", "size lies", "beyond the file", "no such file", "checksum"],
)
def test_what_lies_about_a_tensor_is_refused(prefix: Path, stored: bytes, file: str, given: str, expected: str) -> None:
    source = TensorBundle(write_bundle(prefix, {b"w": stored, b"v": entry(INT8, [8], data=b"12345678")}, b"12345678"))
    error = refusal(lambda: source.read("w"))
    assert error.what == f"The tensor 'w' of {prefix}{file} is damaged."
    assert given in error.given
    assert expected in error.expected
    assert error.hint == "copy the checkpoint again, or leave this tensor out"
    assert source.read("v").tolist() == list(b"12345678")


HALVES = [extents((0, 4)), extents((4, 4))]
KEYS = [slice_key("w", ((0, 4),)), slice_key("w", ((4, 4),))]


@pytest.mark.parametrize(
    ("entries", "given"),
    [
        ({b"w": entry(INT8, [8], slices=HALVES), KEYS[0]: entry(INT8, [4], size=4)}, "a slice that is absent"),
        ({b"w": entry(INT8, [8], slices=HALVES[:1])}, "slices with 4 values together, where it has 8"),
        ({b"w": entry(INT8, [8], slices=HALVES[:1] * 2)}, "slice 2 of 2 overlaps with another"),
        (
            {b"w": entry(INT8, [8], slices=HALVES)} | dict.fromkeys(KEYS, entry(BFLOAT16, [4])),
            "a slice that is of bfloat16 and the shape (4,)",
        ),
        (
            {b"w": entry(INT8, [8], slices=HALVES)} | dict.fromkeys(KEYS, entry(INT8, [3], size=3)),
            "a slice that is of int8 and the shape (3,)",
        ),
        (
            {
                b"w": entry(INT8, [2 * HUGE], slices=[extents((0, HUGE)), extents((HUGE, HUGE))]),
                slice_key("w", ((0, HUGE),)): entry(INT8, [HUGE], size=0),
                slice_key("w", ((HUGE, HUGE),)): entry(INT8, [HUGE], size=HUGE),
            },
            f"{2 * HUGE} bytes in slices",
        ),
    ],
    ids=["absent", "not all", "twice", "of another kind", "of another shape", "huge"],
)
def test_slices_that_are_not_the_tensors_are_refused(prefix: Path, entries: dict[bytes, bytes], given: str) -> None:
    source = TensorBundle(write_bundle(prefix, entries, b"12345678"))
    assert list(source.tensors) == ["w"]
    error = refusal(lambda: source.read("w"))
    assert error.what == f"The tensor 'w' of {prefix}.index is damaged."
    assert error.given == given


def test_slices_that_claim_the_same_bytes_are_one_after_the_other(prefix: Path) -> None:
    entries = {b"w": entry(INT8, [8], slices=HALVES)} | dict.fromkeys(KEYS, entry(INT8, [4], data=b"1234"))
    source = TensorBundle(write_bundle(prefix, entries, b"12341234"))
    assert source.read("w").tolist() == list(b"12341234")
    write_bundle(prefix, entries, b"1234")
    assert refusal(lambda: source.read("w")).given == "8 bytes in slices"


@pytest.mark.parametrize(
    ("head", "entries", "what", "given"),
    [
        (None, {b"w": b"\x0a"}, "is damaged", "a number without an end"),
        (None, {b"w": entry(FLOAT, [3, -1])}, "is damaged", "the shape (3, -1)"),
        (None, {b"w": entry(FLOAT, [1] * 255)}, "is damaged", "the shape (1, 1, 1, 1, 1, 1, 1, 1)"),
        (None, {b"w": field(2, field(3, 1))}, "is damaged", "the shape ()"),
        (None, {b"w": entry(FLOAT, [3], offset=-1)}, "is damaged", "shard 0, offset -1 and size 0"),
        (b"\xff", {}, "is damaged", "a number without an end"),
        (
            header(least_version=2),
            {},
            "is of a later version of the format",
            "a file for readers of version 2 or later",
        ),
    ],
    ids=["entry", "negative size", "dimensions", "unknown rank", "negative place", "header", "version"],
)
def test_an_index_that_cannot_be_is_refused(
    prefix: Path, head: bytes | None, entries: dict[bytes, bytes], what: str, given: str
) -> None:
    write_bundle(prefix, entries, head=head)
    error = refusal(lambda: TensorBundle(prefix))
    assert error.what == f"{prefix}.index {what}."
    assert error.given == given


@pytest.mark.parametrize(
    "content", [table([(b"w", entry(FLOAT, []))]), (MADE / "v1_kinds").read_bytes()], ids=["no header", "version 1"]
)
def test_another_table_is_no_index(prefix: Path, content: bytes) -> None:
    Path(f"{prefix}.index").write_bytes(content)
    error = refusal(lambda: TensorBundle(prefix))
    assert error.what == f"{prefix}.index is no index of a checkpoint of version 2."
    assert error.given == "a table without a header"
    assert error.expected == "the number of files in an entry with an empty key"


@pytest.mark.parametrize("damage", [flip_a_bit, cut])
@pytest.mark.parametrize("name", ["kinds", "merged", "big_endian", "snappy"])
def test_a_damaged_checkpoint_gives_the_exact_tensors_or_an_error(
    tmp_path: Path, name: str, damage: Callable[[random.Random, bytes], bytes]
) -> None:
    check_damage(MADE / name, tmp_path, 60, damage)


@pytest.mark.parametrize("name", ["kinds", "merged"])
def test_an_index_that_lies_under_true_checksums_is_refused_or_read(tmp_path: Path, name: str) -> None:
    generator = random.Random(name)
    true = {key: bytes(value) for key, value in Table(MADE / f"{name}.index").items()}
    for path in MADE.glob(f"{name}.data-*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    num_skipped = 0
    for _ in range(100):
        key = generator.choice(list(true))
        lies = true | {key: flip_a_bit(generator, true[key])}
        (tmp_path / f"{name}.index").write_bytes(table(lies.items()))
        try:
            source = TensorBundle(tmp_path / name)
        except CheckpointError:
            num_skipped += 1
            continue
        for tensor, info in source.tensors.items():
            try:
                assert tuple(source.read(tensor).shape) == info.shape
            except CheckpointError:
                num_skipped += not info.dtype.startswith("DT_")
    assert num_skipped > 30


def test_two_names_that_are_one_as_text_are_refused(prefix: Path) -> None:
    write_bundle(prefix, {b"\xff": entry(FLOAT, (0,)), b"\\xff": entry(FLOAT, (0,))})
    error = refusal(lambda: TensorBundle(prefix))
    assert error.what == f"{prefix}.index has two tensors of one name."
    assert error.given == r"""b'\\xff' and b'\xff', both '\\xff' as text"""
    assert error.expected == "names that are UTF-8, as TensorFlow writes them"
