"""Rows of Parquet and Arrow files, by whatever their writer chose, beside what was written."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from object_server import FaultyProxy

from lockstep.errors import DataError
from lockstep.records import tables
from lockstep.records.parquet_pages import PageError, Pages
from lockstep.records.tables import Kept, TableFile, open_table
from lockstep.storage.remote_path import RemotePath

LEAF = ("image", "bytes")


def values(count: int = 24, most: int = 90_000) -> list[bytes | None]:
    """Byte strings of all lengths, some of them null or there twice, of which a page holds some."""
    random = np.random.default_rng(7)
    made = [random.bytes(int(random.integers(0, most))) for _ in range(count)]
    made[1], made[9] = b"", made[3]
    return [None if number % 7 == 5 else value for number, value in enumerate(made)]


def table_of(rows: list[bytes | None]) -> pa.Table:
    images = [None if number % 11 == 6 else {"bytes": row, "path": "a.png"} for number, row in enumerate(rows)]
    return pa.table({"image": pa.array(images), "plain": pa.array(rows, pa.binary()), "label": range(len(rows))})


def expected(rows: list[bytes | None]) -> list[bytes | None]:
    return [None if number % 11 == 6 else row for number, row in enumerate(rows)]


def all_of(table: TableFile, leaf: tuple[str, ...] = LEAF) -> list[bytes | None]:
    return [table.value(leaf, row) for row in range(len(table))]


def paged(table: TableFile) -> bool:
    return any(isinstance(value, Pages) for value, _ in table.kept.sizes())


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4"])
def test_any_way_of_writing_parquet_gives_the_rows_that_were_written(tmp_path: Path, compression: str) -> None:
    rows = values()
    for use_dictionary, version, checksums in itertools.product((True, False), ("1.0", "2.0"), (True, False)):
        pq.write_table(
            table_of(rows),
            tmp_path / "a.parquet",
            row_group_size=10,
            compression=compression,
            use_dictionary=use_dictionary,
            data_page_version=version,
            write_page_checksum=checksums,
            data_page_size=100_000,
        )
        table = open_table(tmp_path / "a.parquet", Kept())
        assert table.starts == [0, 10, 20, 24]
        assert all_of(table) == expected(rows)
        assert all_of(table, ("plain",)) == rows
        assert paged(table) == (compression != "lz4")
        assert table.column(("label",)).to_pylist() == [*range(24)]


@pytest.mark.parametrize("refused", ["__init__", "values"])
def test_pages_that_we_do_not_know_are_left_to_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    rows = values()
    pq.write_table(table_of(rows), tmp_path / "a.parquet", row_group_size=10)
    asked = []

    def refuse(*given: Any) -> None:
        asked.append(given)
        raise PageError("unknown")

    monkeypatch.setattr(Pages, refused, refuse)
    table = open_table(tmp_path / "a.parquet", Kept())
    assert [all_of(table) for _ in range(2)] == [expected(rows)] * 2
    assert len(asked) == 3, "each is tried once"


def test_small_values_by_a_dictionary_of_many(tmp_path: Path) -> None:
    rows: list[bytes | None] = [None if n % 3 == 0 else f"{n % 300}".encode() for n in range(2000)]
    pq.write_table(pa.table({"a": rows}), tmp_path / "a.parquet")
    table = open_table(tmp_path / "a.parquet", Kept())
    assert (all_of(table, ("a",)), paged(table)) == (rows, True)


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_files_of_arrow(tmp_path: Path, compression: str) -> None:
    rows = values()
    feather.write_feather(table_of(rows), tmp_path / "a.feather", compression=compression, chunksize=10)
    table = open_table(tmp_path / "a.feather", Kept())
    assert (table.starts, all_of(table)) == ([0, 10, 20, 24], expected(rows))
    assert bool(table.bytes_read_for(LEAF)) == (compression != "uncompressed")
    assert table.column(("label",)).to_pylist() == [*range(24)]


@pytest.mark.parametrize("compression", ["uncompressed", "lz4"])
def test_what_is_mapped_takes_nothing_of_what_may_be_kept(tmp_path: Path, compression: str) -> None:
    rows = values()
    feather.write_feather(table_of(rows), tmp_path / "a.feather", compression=compression, chunksize=2)
    table: Any = open_table(tmp_path / "a.feather", Kept(100_000))
    opened, read = [], table._opened
    table._opened = lambda leaf: opened.append(leaf) or read(leaf)
    assert [all_of(table) for _ in range(3)] == [expected(rows)] * 3
    assert (len(opened) == 12) == (compression == "uncompressed")
    assert all_of(pickle.loads(pickle.dumps(open_table(tmp_path / "a.feather", Kept())))) == expected(rows)
    size = sum(size for _, size in table.kept.sizes())
    assert size < 15_000 if compression == "uncompressed" else size > 50_000


def stream(path: Path, table: pa.Table, **options: Any) -> Path:
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=written) as writer:
        writer.write_table(table, max_chunksize=10)
    return path


def test_streams_of_arrow_are_mapped(tmp_path: Path) -> None:
    rows = values()
    before = pa.total_allocated_bytes()
    table = open_table(stream(tmp_path / "a.arrow", table_of(rows)), Kept())
    assert table.starts == [0, 10, 20, 24]
    assert pa.total_allocated_bytes() - before < 10_000
    assert all_of(table) == expected(rows)
    assert table.column(("label",)).to_pylist() == [*range(24)]


@pytest.mark.parametrize(
    ("compression", "version", "most"), [("none", "1.0", 0), ("snappy", "1.0", 2), ("snappy", "2.0", 2)]
)
def test_of_a_large_page_no_more_is_read_than_a_row(tmp_path: Path, compression: str, version: str, most: int) -> None:
    rows: list[bytes | None] = [np.random.default_rng(n).bytes(150_000) for n in range(30)]
    pq.write_table(
        pa.table({"a": rows}),
        tmp_path / "a.parquet",
        compression=compression,
        data_page_version=version,
    )
    table: Any = open_table(tmp_path / "a.parquet", Kept())
    assert table.value(("a",), 0) == rows[0]
    read, asked = table._files.read, []
    table._files.read = lambda *given: asked.append(given[2]) or read(*given)
    assert [table.value(("a",), row) for row in (20, 7)] == [rows[20], rows[7]]
    assert 300_000 <= sum(asked) <= 300_000 + most * (2 << 16)
    assert table.bytes_read_for(("a",)) == 0
    assert sum(size for _, size in table.kept.sizes()) < 2000, "places are kept, not what is there"


def test_what_is_kept_has_a_bound() -> None:
    kept = Kept(100)
    made = []

    def get(key: str, size: int) -> Any:
        return kept.get(key, lambda: (made.append(key) or key, size))

    assert [get(*each) for each in (("a", 40), ("b", 50), ("a", 40), ("c", 30))] == ["a", "b", "a", "c"]
    assert made == ["a", "b", "c"]
    assert get("a", 40) == "a", "b was used longest ago"
    assert made == ["a", "b", "c"]
    assert get("b", 50) == "b"
    assert get("large", 1000) == "large"
    assert kept.sizes() == [("large", 1000)]
    assert pickle.loads(pickle.dumps(kept)).sizes() == []


def test_threads_that_ask_for_one_key_wait_for_it_and_it_is_made_once() -> None:
    kept, go = Kept(100), threading.Event()
    made: list[bool] = []

    def make() -> tuple[Any, int]:
        made.append(go.wait(60))
        return "value", 60

    def fail() -> tuple[Any, int]:
        raise DataError("failed", given="", expected="", hint="")

    with pytest.raises(DataError, match="failed"):
        kept.get("key", fail)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(kept.get, "key", make) for _ in range(4)]
        time.sleep(0.1)  # all have asked; one that has not will find it made
        go.set()
    assert [future.result() for future in found] == ["value"] * 4
    assert made == [True]
    assert kept.sizes() == [("value", 60)]


@pytest.mark.process
def test_forked_while_a_key_is_made() -> None:
    kept, started, go = Kept(100), threading.Event(), threading.Event()
    kept.get("other", lambda: ("other", 10))
    thread = threading.Thread(target=lambda: kept.get("key", lambda: (started.set() or go.wait(60), 10)))
    thread.start()
    try:
        assert started.wait(20)
        context = multiprocessing.get_context("fork")
        found = context.SimpleQueue()
        child = context.Process(target=lambda: found.put([kept.get("key", lambda: ("of the child", 10)), kept.sizes()]))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert found.get() == ["of the child", [("of the child", 10)]]
    finally:
        go.set()
        thread.join()
        if child.is_alive():
            child.kill()
    assert [value for value, _ in kept.sizes()] == ["other", True]


@pytest.mark.parametrize(
    "write", [lambda p, t: pq.write_table(t, p, row_group_size=10), stream], ids=["pages", "mapped"]
)
def test_pickled_and_read_by_threads(tmp_path: Path, write: Callable[[Path, pa.Table], Any]) -> None:
    rows = values()
    write(tmp_path / "a", table_of(rows))
    table = open_table(tmp_path / "a", Kept(100_000))
    assert all_of(pickle.loads(pickle.dumps(table))) == expected(rows)
    found: list[list[bytes | None]] = []
    threads = [threading.Thread(target=lambda: found.append(all_of(table))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected(rows)] * 4


@pytest.mark.process
def test_forked(tmp_path: Path) -> None:
    rows = values()
    pq.write_table(table_of(rows), tmp_path / "a.parquet", row_group_size=10, compression="lz4")
    table = open_table(tmp_path / "a.parquet", Kept())
    table.value(LEAF, 3)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(all_of, (table,)) == expected(rows)


def test_objects_of_a_store_are_read_by_ranges(tmp_path: Path) -> None:
    rows = values()
    for name, write in (
        ("a.parquet", lambda file: pq.write_table(table_of(rows), file, row_group_size=10)),
        ("a.feather", lambda file: feather.write_feather(table_of(rows), file, chunksize=10)),
    ):
        write(tmp_path / name)
        remote = RemotePath(f"memory://tables/{name}")
        remote.write_bytes((tmp_path / name).read_bytes())
        table = open_table(remote, Kept())
        assert all_of(table) == expected(rows)
        assert table.summary == open_table(tmp_path / name, Kept()).summary
    remote = RemotePath("memory://tables/a.arrow")
    remote.write_bytes(stream(tmp_path / "a.arrow", table_of(rows)).read_bytes())
    with pytest.raises(DataError, match="a stream of Arrow's, which is read where it can be mapped"):
        open_table(remote, Kept())


@pytest.mark.parametrize(("has_index", "most", "most_bytes"), [(True, 4, 200_000), (False, 7, 2_000_000)])
def test_pages_of_objects_are_found_by_few_requests(
    tmp_path: Path, bucket: RemotePath, object_store: FaultyProxy, has_index: bool, most: int, most_bytes: int
) -> None:
    rows: list[bytes | None] = [np.random.default_rng(n).bytes(20_000) for n in range(80)]
    file = tmp_path / "a.parquet"
    pages: dict[str, Any] = {"data_page_size": 20_000, "write_batch_size": 1, "use_dictionary": ["label"]}
    pq.write_table(table_of(rows), file, row_group_size=80, write_page_index=has_index, **pages)
    (bucket / "a.parquet").write_bytes(file.read_bytes())
    table = open_table(bucket / "a.parquet", Kept())
    object_store.reset()
    assert table.value(("plain",), 70) == rows[70]
    assert object_store.num_requests() <= most, "and not one for each of 80 pages"
    assert object_store.num_bytes <= most_bytes
    assert all_of(table, ("plain",)) == rows
    assert (all_of(table), paged(table)) == (expected(rows), True)


def test_a_page_index_that_is_damaged_is_told_or_does_no_harm(tmp_path: Path) -> None:
    rows, path, remote = values(12, 3000), tmp_path / "a.parquet", RemotePath("memory://tables/index.parquet")
    pq.write_table(table_of(rows), path, data_page_size=2000, write_batch_size=1, write_page_index=True)
    whole, group = path.read_bytes(), pq.read_metadata(path).row_group(0)
    last = group.column(3)
    end = min(last.data_page_offset, last.dictionary_page_offset) + last.total_compressed_size
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    random, told = np.random.default_rng(3), 0
    for place in random.integers(end, footer, 60).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << int(random.integers(8))
        remote.write_bytes(bytes(changed))
        try:
            assert all_of(open_table(remote, Kept())) == expected(rows)
        except DataError as error:
            assert str(remote) in str(error)  # noqa: PT017
            told += 1
    assert told < 30, "pyarrow reads what our index does not fit"


def damaged(path: Path, change: Callable[[bytearray], bytearray]) -> Path:
    path.write_bytes(change(bytearray(path.read_bytes())))
    return path


def test_files_that_are_cut_short_or_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(values()), path)
    with pytest.raises(DataError, match=rf"{path} cannot be read\.(.|\n)*a whole Parquet file"):
        open_table(damaged(path, lambda data: data[:-100]), Kept())
    feather.write_feather(table_of(values()), tmp_path / "a.feather")
    with pytest.raises(DataError, match=r"\.feather cannot be read\.(.|\n)*a whole Arrow file"):
        open_table(damaged(tmp_path / "a.feather", lambda data: data[:-100]), Kept())
    with pytest.raises(DataError, match=r"\.arrow cannot be read"):
        open_table(damaged(stream(tmp_path / "a.arrow", table_of(values())), lambda data: data[:-50_000]), Kept())
    (tmp_path / "b").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(DataError, match="the first version of Feather"):
        open_table(tmp_path / "b", Kept())
    with pytest.raises(DataError, match="may be read"):
        open_table(tmp_path / "none.parquet", Kept())


def test_damaged_pages_are_named_or_whole_and_never_end_the_process(tmp_path: Path) -> None:
    rows = values(12, 3000)
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(rows), path, write_page_checksum=True, use_dictionary=False)
    size = int(pq.read_metadata(path).row_group(0).column(0).total_compressed_size)
    whole = path.read_bytes()
    random, told = np.random.default_rng(3), []
    for place in (4, *random.integers(4, size, 60).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(random.integers(8))
        path.write_bytes(changed)
        try:
            found = all_of(open_table(path, Kept()))
        except DataError as error:
            told.append(str(error))
        else:
            assert found == expected(rows)
    assert len(told) > 40
    assert all(str(path) in text for text in told)


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    for name, write in (
        ("a.parquet", lambda path: pq.write_table(table_of(values()), path, row_group_size=10)),
        ("b.arrow", None),
    ):
        path = tmp_path / name
        write(path) if write else stream(path, table_of(values()))
        table = open_table(path, Kept())
        table.value(LEAF, 0)
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(DataError, match="has changed since"):
            table.value(LEAF, 12)


def test_summaries_tell_files_apart(tmp_path: Path) -> None:
    first, second = table_of(values()), table_of([*reversed(values())])
    found = set()
    for number, table in enumerate((first, second, first)):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=10)
        found.add(open_table(tmp_path / f"{number}.parquet", Kept()).summary)
    assert len(found) == 2


def test_summaries_of_arrow_tell_schemas_apart_by_what_is_in_them(tmp_path: Path) -> None:
    rows, long = table_of(values()), b"x" * 500
    tables_of = (
        rows.replace_schema_metadata({b"a": long + b"1", b"b": b"2"}),
        rows.replace_schema_metadata({b"b": b"2", b"a": long + b"1"}),
        rows.replace_schema_metadata({b"a": long + b"3", b"b": b"2"}),
        rows,
        rows.cast(pa.schema([*list(rows.schema)[:2], pa.field("label", pa.int64(), nullable=False)])),
    )
    found = []
    for number, table in enumerate(tables_of):
        feather.write_feather(table, tmp_path / f"{number}.feather", chunksize=10)
        found.append(open_table(tmp_path / f"{number}.feather", Kept())._layout())
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_groups_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table_of(values()), tmp_path / "a.parquet", compression="lz4", row_group_size=10)
    monkeypatch.setattr(tables, "_LARGEST_GROUP_BYTES", 1000)
    with pytest.raises(DataError, match=r"A row group of .* does not fit into memory(.|\n)*row_group_size=100"):
        open_table(tmp_path / "a.parquet", Kept()).value(LEAF, 3)


def test_batches_that_do_not_fit_into_memory_are_refused_before_they_take_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, path = 16 << 20, tmp_path / "a.feather"
    words = pa.array(["a" * size, "b"]).dictionary_encode()
    table = pa.table({"image": [bytes(size), b""], "label": [1, 2]})
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    monkeypatch.setattr(tables, "_LARGEST_GROUP_BYTES", size)
    for made, told in ((table, "record batch 0"), (table.append_column("word", words), "dictionaries")):
        feather.write_feather(made, path, compression="zstd")
        assert path.stat().st_size < size / 100
        before = pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            with pytest.raises(DataError, match=rf"The {told} of .* would not fit into memory(.|\n)*chunksize=100"):
                open_table(path, Kept()).value(("image",), 0)
        finally:
            pa.set_memory_pool(before)
    assert pool.max_memory() < size / 100
    with pytest.raises(DataError, match=r"is a stream of Arrow's that is compressed(.|\n)*without compression"):
        open_table(stream(path, table, compression="zstd"), Kept())


def test_columns_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table_of(values()), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "_LARGEST_COLUMN_BYTES", 1000)
    table = open_table(tmp_path / "a.parquet", Kept())
    assert len(table.column(("label",))) == 24
    with pytest.raises(DataError, match=r"The column plain of .* does not fit into memory"):
        table.column(("plain",))
    feather.write_feather(table_of(values()), tmp_path / "a.feather", compression="zstd", chunksize=10)
    table = open_table(tmp_path / "a.feather", Kept())
    assert len(table.column(("label",))) == 24
    with pytest.raises(DataError, match=r"The column plain of .* does not fit into memory"):
        table.column(("plain",))


def test_without_pyarrow_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table_of(values()), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pip install "lockstep-train\[parquet\]"'):
        open_table(tmp_path / "a.parquet", Kept())
