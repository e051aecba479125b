"""`lockstep inspect` of tables, whole and damaged ones, and of the record files of a data set of TFDS."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.cli.main import main

GOLDEN = Path(__file__).parents[1] / "golden" / "tables"


def test_rows_and_columns_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN / "hub" / "train")]) == 0
    told = re.sub(r"[\d.]+ kB", "N kB", capsys.readouterr().out)
    assert told.splitlines() == [
        f"{GOLDEN}/hub/train: a table",
        f"  {GOLDEN}/hub/data/train-00000-of-00002.parquet: 2 rows in 1 groups, N kB, Parquet",
        f"  {GOLDEN}/hub/data/train-00001-of-00002.parquet: 2 rows in 1 groups, N kB, Parquet",
        "columns:",
        "  image  struct<bytes: binary, path: string>: the images",
        "  label  int64: the labels",
        "2 files, 4 rows",
    ]
    assert main(["inspect", str(GOLDEN / "listed.parquet"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["files"][0]["num_rows"], found["problems"]) == ("table", 6, [])
    assert found["columns"]["objects"].endswith(": the objects")


def test_the_records_of_a_data_set_of_tfds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN / "tfds" / "boxed" / "2.0.1")]) == 0
    assert "objects/bbox" in capsys.readouterr().out


def test_what_is_damaged_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [bytes([n]) * 5000 for n in range(9)]}), path, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    (tmp_path / "b.parquet").write_bytes(data[:-20])
    assert main(["inspect", str(tmp_path / "*.parquet")]) == 1
    told = capsys.readouterr().out
    assert re.search(rf"damaged:\n.*{path}: row 0 cannot be read(.|\n)*another checksum", told)
    assert f"{tmp_path}/b.parquet cannot be read" in told
    assert main(["inspect", str(path), "--diff", "x"]) == 2
    assert "--diff is for weights" in capsys.readouterr().err
