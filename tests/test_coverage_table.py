"""`docs/reference/coverage.tsv`: each line of the reference checklist points at a test or at a page that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs/reference/coverage.tsv"
LINES = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]


@cache
def functions_in(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@cache
def anchors_in(path: Path) -> set[str]:
    headings = [line.lstrip("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_line_resolves() -> None:
    for line in LINES:
        identity, kind, target, sentence = line.split("\t")
        assert re.fullmatch(r"B?\d+[a-z]?\.\d+", identity), line
        assert kind in {"test", "different", "doc"}, line
        assert sentence, line
        for part in re.split(r"[,;]\s*", target):
            if kind == "test":
                path, *names = part.split("::")  # a class may stand before the function
                assert {*names} <= functions_in(ROOT / path), line
            else:
                path, _, anchor = part.partition("#")
                assert anchor in anchors_in(ROOT / path), line


def test_no_id_stands_twice() -> None:
    ids = [line.split("\t")[0] for line in LINES]
    assert len(set(ids)) == len(ids)
