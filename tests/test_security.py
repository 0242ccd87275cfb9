"""docs/security.md names a test for what it says; each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "security.md").read_text())
    assert len(named) > 30
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        assert test in functions, f"{file} has no {test}"


def test_every_row_names_one() -> None:
    lines = (ROOT / "docs" / "security.md").read_text().splitlines()
    start = lines.index("## The access middleware")
    rows = [line for line in lines[start:] if line.startswith("| ")]
    assert all(
        NAMED.search(row) for row in rows if row not in {"| what holds | test |", "| --- | --- |"}
    )
