"""``store pin``: a document's chunks, for every process on the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheblend_rag.cli.main import app
from cacheblend_rag.kv import DiskTier, KVKey
from tests.admin.test_select import ONE, SHARED, TWO, indexed, keys
from tests.toy import TOY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> set[Any]:
    """The keys of the document ``one``."""
    engine = indexed(folder, ONE, TWO)
    found = keys(engine, ONE)
    engine.close()
    return found


@pytest.fixture
def store(folder: Path, wanted: set[Any]) -> Callable[..., Any]:
    return lambda *arguments: CliRunner().invoke(
        app, ["store", *arguments, "--kv-path", str(folder), "--json"]
    )


def test_a_documents_chunks_are_pinned_and_let_go(
    store: Callable[..., Any], folder: Path, wanted: set[Any]
) -> None:
    assert SHARED in ONE.chunks
    result = store("pin", "one", "--model", TOY)
    assert json.loads(result.stdout) == {"path": str(folder), "pinned": len(wanted)}
    assert DiskTier(folder).pinned() == wanted, "in a process of its own, as far as this tells"
    assert json.loads(store("pin", "--undo", "two", "--model", TOY).stdout)["unpinned"] <= 1
    result = store("pin", "--undo", "one", "--model", TOY)
    assert json.loads(result.stdout)["unpinned"] >= len(wanted) - 1
    assert DiskTier(folder).pinned() == set()


def test_all_pins_are_let_go_of_chunks_that_are_gone_too(
    store: Callable[..., Any], folder: Path, wanted: set[Any]
) -> None:
    store("pin", "one", "--model", TOY)
    DiskTier(folder).pin(KVKey("0" * 32, "0" * 64))
    assert json.loads(store("pin", "--undo").stdout)["unpinned"] == len(wanted) + 1
    assert DiskTier(folder).pinned() == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pin"], "give a document, or --undo"),
        (["pin", "three", "--model", TOY], "knows no document 'three'"),
        (["pin", "one", "--model", TOY, "--store", "tiers=redis://127.0.0.1:9"],
         "no pins are kept in redis: only a folder (disk) keeps pins"),
    ],
)  # fmt: skip
def test_wrong_uses_are_one_line(
    store: Callable[..., Any], arguments: list[str], said: str
) -> None:
    result = store(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
