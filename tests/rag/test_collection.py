from __future__ import annotations

import json
import sqlite3
import stat

import numpy as np
import pytest

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.rag import FILE_NAME, KV_NAME
from cacheblend_rag.rag.collection import (
    Collection,
    CollectionSettings,
    clear,
    source_name,
)
from cacheblend_rag.text.chunk import Document
from tests.toy import TOY

SETTINGS = CollectionSettings(model=TOY, chunk_size=64, instruction="Answer {briefly}.")
TWO = Document("docs/two.md", ("First {chunk}.", "Second\x07 chunk."))
ONE = Document("docs/one.md", ("Only chunk.",))


def vectors(count, seed=0, size=8):
    drawn = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.fixture
def folder(tmp_path):
    """A collection of two documents."""
    folder = tmp_path / "collection"
    with Collection.create(folder, SETTINGS, "f") as collection:
        collection.replace(TWO, "hash two", vectors(2, 1))
        collection.replace(ONE, "hash one", vectors(1, 2))
    return folder


def test_what_was_written_is_read_again(folder):
    with Collection(folder) as collection:
        assert (collection.settings, collection.fingerprint) == (SETTINGS, "f")
        assert collection.content_hashes() == {
            ONE.document_id: "hash one",
            TWO.document_id: "hash two",
        }
        assert collection.counts() == (2, 3)
        documents, found = collection.load()
    assert documents == (ONE, TWO)
    np.testing.assert_array_equal(found, np.concatenate([vectors(1, 2), vectors(2, 1)]))


def test_a_document_takes_the_place_of_its_older_self_and_goes_whole(folder):
    newer = Document(TWO.document_id, ("Another text.",))
    with Collection(folder) as collection:
        collection.replace(newer, "hash new", vectors(1, 3))
        assert collection.load()[0] == (ONE, newer)
        collection.remove(newer.document_id)
        assert collection.counts() == (1, 1)
        collection.remove(ONE.document_id)
        with pytest.raises(StoreError, match="no documents"):
            collection.load()


def test_vectors_of_another_size_are_refused(folder):
    with Collection(folder) as collection:
        with pytest.raises(ConfigError, match="--rebuild"):
            collection.replace(ONE, "hash", vectors(1, size=9))
        assert collection.content_hashes()[ONE.document_id] == "hash one"


def test_only_the_owner_may_read_it(folder):
    for path in (folder, folder / FILE_NAME):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_an_interrupted_creation_is_no_collection(folder):
    (folder / FILE_NAME).rename((folder / FILE_NAME).with_suffix(".new"))
    with pytest.raises(StoreError, match="holds no collection"):
        Collection(folder)
    with Collection.create(folder, SETTINGS, "f") as collection:
        assert collection.counts() == (0, 0)


def test_clearing_takes_kv_and_documents_and_nothing_else(folder):
    (folder / KV_NAME).mkdir()
    (folder / KV_NAME / "x").write_text("x")
    (folder / "mine.txt").write_text("mine")
    clear(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".gitignore", "mine.txt"]
    clear(folder)


def test_sources_are_named_from_the_folder_beside_the_collection(tmp_path):
    folder = tmp_path / "project" / ".cacheblend"
    assert source_name(folder, tmp_path / "project" / "docs" / "a.md") == "docs/a.md"
    assert source_name(folder, tmp_path / "b.md") == str(tmp_path / "b.md")


def change(folder, *statements):
    with sqlite3.connect(folder / FILE_NAME) as file:
        for statement in statements:
            file.execute(*statement) if isinstance(statement, tuple) else file.execute(statement)
    file.close()


def settings_as(**changes):
    return ("UPDATE settings SET body = ?", (json.dumps({**SETTINGS.to_dict(), **changes}),))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / FILE_NAME).write_bytes(b"no database at all" * 100),
        lambda folder: (folder / FILE_NAME).write_bytes(b""),
        lambda folder: (folder / FILE_NAME).write_bytes((folder / FILE_NAME).read_bytes()[:9000]),
        lambda folder: change(folder, "PRAGMA application_id = 1"),
        lambda folder: change(folder, "PRAGMA user_version = 99"),
        lambda folder: change(folder, "DELETE FROM settings"),
        lambda folder: change(folder, "UPDATE settings SET body = '[]'"),
        lambda folder: change(folder, "UPDATE settings SET body = '{'"),
        lambda folder: change(folder, "UPDATE settings SET body = x'00'"),
        lambda folder: change(folder, settings_as(chunk_size="64")),
        lambda folder: change(folder, settings_as(chunk_size=-1)),
        lambda folder: change(folder, settings_as(extra=1)),
        lambda folder: change(folder, "DROP TABLE documents"),
        lambda folder: change(folder, "UPDATE documents SET vectors = 'text'"),
        lambda folder: change(folder, "UPDATE documents SET vectors = x'0000'"),
        lambda folder: change(folder, "UPDATE documents SET vectors = x''"),
        lambda folder: change(folder, "UPDATE documents SET vectors = x'00000000' WHERE rowid = 1"),
        lambda folder: change(folder, "UPDATE documents SET vectors = x'0000c07f' WHERE rowid = 2"),
        lambda folder: change(folder, """UPDATE documents SET chunks = '["  "]'"""),
        lambda folder: change(folder, "UPDATE documents SET chunks = x'ff'"),
        lambda folder: change(folder, "UPDATE documents SET chunks = CAST(x'ff' AS TEXT)"),
        lambda folder: change(folder, "UPDATE documents SET chunks = '[1]'"),
        lambda folder: change(folder, "UPDATE documents SET chunks = '[]'"),
        lambda folder: change(folder, """UPDATE documents SET chunks = '["a", "b", "c"]'"""),
        lambda folder: change(folder, "UPDATE documents SET unfinished = 'all'"),
    ],
)
def test_damage_is_one_line(folder, damage):
    damage(folder)
    with pytest.raises(StoreError) as raised, Collection(folder) as collection:
        collection.load()
    assert str(folder / FILE_NAME) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unfinished_documents_are_noted_with_the_document(folder):
    with Collection(folder) as collection:
        assert collection.unfinished() == {}
        collection.replace(TWO, "two", vectors(2), unfinished=2)
        assert collection.unfinished() == {TWO.document_id: 2}
        collection.note_unfinished(TWO.document_id, 1)
        collection.note_unfinished(ONE.document_id, 1)
        assert collection.unfinished() == {ONE.document_id: 1, TWO.document_id: 1}
        collection.replace(TWO, "other", vectors(2))
        collection.remove(ONE.document_id)
        assert collection.unfinished() == {}
