"""The registry in a file: the same finds as in memory, after restarts and across processes."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.text import sqlite_registry
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.registry import ChunkRegistry
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry

REPORT = Document("report", ("Alpha is first.", "It was founded in Rome.", "It has ten members."))
LETTER = Document("letter", ("Dear reader,", "It was founded in Rome."))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "chunks.sqlite"


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that registries run on their files from now on."""
    connect, seen = sqlite_registry._connect, list[str]()

    def traced(path: Path, mode: str, wait_seconds: float) -> sqlite3.Connection:
        made = connect(path, mode, wait_seconds)
        made.set_trace_callback(seen.append)
        return made

    monkeypatch.setattr(sqlite_registry, "_connect", traced)
    return seen


def test_random_changes_through_two_registries_equal_one_in_memory(path: Path) -> None:
    draw = random.Random(3)
    files = [SharedChunkRegistry(path), SharedChunkRegistry(path)]
    memory = ChunkRegistry()
    texts = [f"passage number {i}" for i in range(6)]
    for _ in range(150):
        registry = draw.choice(files)
        chunks = Document(draw.choice("xyz"), tuple(draw.sample(texts, 3))).to_chunks()
        match draw.randrange(4):
            case 0:
                registry.discard_many(chunks)
                memory.discard_many(chunks)
            case 1:
                name = draw.choice("xyz")
                gone = registry.document(name)
                assert set(gone) == set(memory.document(name))
                registry.discard_many(gone)
                memory.discard_many(gone)
            case _:
                for chunk in chunks:
                    registry.add_many([chunk])
                    memory.add_many([chunk])
        prompt = " ".join(draw.sample(texts, 4))
        expected = memory.find(prompt)
        assert [file.find(prompt) for file in files] == [expected, expected]
        assert [len(file) for file in files] == [len(memory)] * 2
    assert SharedChunkRegistry(path).find(" ".join(texts)) == memory.find(" ".join(texts))


def test_a_removed_document_leaves_no_text_in_the_file(path: Path) -> None:
    registry = SharedChunkRegistry(path)
    registry.add_many([*REPORT.to_chunks(), *LETTER.to_chunks()])
    registry.discard_many(registry.document("report"))
    registry.close()
    kept = path.read_bytes()
    assert b"Alpha is first" not in kept
    assert b"ten members" not in kept
    assert b"Dear reader" in kept


def test_threads_may_share_it(path: Path) -> None:
    registry = SharedChunkRegistry(path)

    def work(index: int) -> int:
        document = Document(f"d{index}", (f"one of {index}", f"two of {index}"))
        registry.add_many(document.to_chunks())
        return len(registry.find(f"two of {index}"))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(40))) == [1] * 40
    assert len(SharedChunkRegistry(path)) == 80


def test_any_text_survives(path: Path) -> None:
    chunk = Chunk("{braces} \x00 \u2028 \ud800 \U0001f600", "caf\udce9.txt", ("\ud800", "\n\n"))
    SharedChunkRegistry(path).add_many([chunk])
    assert SharedChunkRegistry(path).variants(chunk.text) == (chunk,)


def test_a_file_that_is_no_registry_is_an_error_of_one_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        SharedChunkRegistry(path)

    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE something (x)")
    with pytest.raises(StoreError, match="cannot be opened: its table 'something' is not a reg"):
        SharedChunkRegistry(path)


NO_TEXT = "its text, or what stands before it, is missing or damaged"
DAMAGES = {
    "UPDATE pieces SET text = 'a string' WHERE id = 1": (NO_TEXT, 3),
    "UPDATE pieces SET text = CAST(x'ff' AS TEXT) WHERE id = 1": (NO_TEXT, 3),
    "UPDATE pieces SET text = x'ff' WHERE id = 1": (NO_TEXT, 3),
    "UPDATE pieces SET text = x'41' WHERE id = 1": (NO_TEXT, 3),
    "DELETE FROM pieces WHERE id = 1": (NO_TEXT, 3),
    "UPDATE pieces SET before = name WHERE id = 2": (NO_TEXT, 2),
    "UPDATE pieces SET before = 99 WHERE id = 2": (NO_TEXT, 2),
    "UPDATE pieces SET before = (SELECT name FROM pieces WHERE id = 4) WHERE id = 2": (NO_TEXT, 2),
    "UPDATE pieces SET name = x'00' WHERE id = 2": (NO_TEXT, 2),
    "DELETE FROM pieces WHERE id = 2": (NO_TEXT, 2),
    "UPDATE chunks SET piece = 1.5 WHERE id = 2": (NO_TEXT, 1),
    "UPDATE chunks SET piece = (SELECT name FROM pieces WHERE id = 2) WHERE id = 2": (NO_TEXT, 1),
    "UPDATE chunks SET document = 5 WHERE id = 2": ("a value is not text", 1),
    "UPDATE chunks SET document = 'report' WHERE id = 2": ("a value is not text", 1),
    "UPDATE chunks SET document = x'ff' WHERE id = 2": ("can't decode", 1),
    "UPDATE chunks SET collection = 5 WHERE id = 2": ("a value is not text", 1),
}
"""What befalls the rows of REPORT, why they cannot be read then, and how many chunks it hits."""


@pytest.fixture(params=[False, True], ids=["before it is opened", "while it is open"])
def damaged(
    path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Callable[[str], SharedChunkRegistry]:
    """Returns a registry whose file holds REPORT, damaged, and LETTER; nothing is logged yet."""

    def make(damage: str) -> SharedChunkRegistry:
        source = path.with_name("source.sqlite")
        SharedChunkRegistry(source).add_many([*REPORT.to_chunks(), *LETTER.to_chunks()])
        with sqlite3.connect(source) as file:
            file.execute(damage)
        reader = SharedChunkRegistry(path)
        with sqlite3.connect(path) as file:
            file.execute("ATTACH ? AS source", (str(source),))
            file.execute("INSERT INTO pieces SELECT * FROM source.pieces")
            file.execute("INSERT INTO chunks SELECT * FROM source.chunks")
        return reader if request.param else SharedChunkRegistry(path)

    return make


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_is_left_out_by_name_and_the_rest_works(
    path: Path,
    damage: str,
    damaged: Callable[[str], SharedChunkRegistry],
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader, (why, count) = damaged(damage), DAMAGES[damage]
    for _ in range(2):
        assert len(reader) == 5 - count
        assert len(reader.find("Dear reader, how are you?")) == 1
    reader.add_many([Chunk("more")])
    reader.discard_many(reader.document("report"))
    assert set(reader.document("letter")) == set(LETTER.to_chunks())
    (told,) = caplog.messages
    assert f"chunk registry {path}: row " in told
    assert why in told
    assert (f", and {count - 1} more" in told) == (count > 1)
    reader.add_many(REPORT.to_chunks())
    again = SharedChunkRegistry(path)
    assert set(REPORT.to_chunks()) <= set(again.document("report"))


FOREIGN = {
    "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN SELECT 1; END": "trigger 't'",
    "CREATE VIEW v AS SELECT 1": "view 'v'",
    "CREATE TABLE more (x)": "table 'more'",
    "CREATE INDEX i ON chunks (hex(document))": "index 'i'",
    "ALTER TABLE chunks ADD COLUMN more GENERATED ALWAYS AS (abs(id))": "table 'chunks'",
    "DROP TABLE chunks; CREATE VIEW chunks AS"
    " WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    " SELECT x AS id, x'00' AS piece, NULL AS document, x'' AS collection FROM c": "view 'chunks'",
}
"""What is in no registry, and how it is named."""


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_schema_that_is_not_ours_is_run_by_nobody(
    path: Path, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = SharedChunkRegistry(path)
    registry.add_many(REPORT.to_chunks())
    with sqlite3.connect(path) as file:
        file.executescript(foreign)
    said = f"its {FOREIGN[foreign]} is not a registry's; give another path, or delete it and index"
    for _ in range(3):
        assert len(registry.find(REPORT.chunks[0])) == 1
    assert caplog.messages == [f"chunk registry {path} cannot be read: {said} again"]
    with pytest.raises(StoreError, match=f"cannot be changed: {said}"):
        registry.add_many([Chunk("more")])
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"cannot be opened: {said}"):
            SharedChunkRegistry(path, read_only=read_only)


def test_a_damaged_file_is_refused_in_a_line_or_read_as_far_as_it_is_whole(path: Path) -> None:
    source, draw = SharedChunkRegistry(path), random.Random(11)
    source.add_many([*REPORT.to_chunks(), *LETTER.to_chunks()])
    source.discard_many(source.document("letter"))
    source.close()
    whole, passages = path.read_bytes(), {chunk.passage for chunk in REPORT.to_chunks()}
    refused: list[str] = []
    for number in range(150):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 3, 20])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        copy = path.with_name(f"{number}.sqlite")
        copy.write_bytes(damaged[: draw.choice([1 << 20] * 9 + [draw.randrange(len(whole))])])
        for read_only in (True, False):
            try:
                registry = SharedChunkRegistry(copy, read_only=read_only)
                assert {chunk.passage for chunk in registry.chunks()} <= passages
                registry.add_many([Chunk("more")])
                assert "more" in registry
                registry.close()
            except StoreError as error:
                refused.append(str(error))
    assert 50 < len(refused) < 250
    assert all(len(message.splitlines()) == 1 for message in refused)


def test_a_text_that_many_rows_hold_is_held_once(path: Path) -> None:
    """A file whose rows share their pages must not become gigabytes in memory."""
    text, rows = "x" * (1 << 20), 200
    SharedChunkRegistry(path).add_many([Chunk(text, "d", [text] * rows)])
    tracemalloc.start()
    registry = SharedChunkRegistry(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(registry) == 1
    assert most < 128 << 20


def test_a_row_that_is_too_long_is_neither_written_nor_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = SharedChunkRegistry(path)
    before.add_many([Chunk("x" * 900)])
    monkeypatch.setattr(sqlite_registry, "MOST_BYTES", 800)
    with pytest.raises(StoreError, match="cannot be opened: string or blob too big"):
        SharedChunkRegistry(path)
    other = SharedChunkRegistry(path.with_name("other.sqlite"))
    with pytest.raises(StoreError, match="cannot be changed: string or blob too big"):
        other.add_many([Chunk("small"), Chunk("x" * 900)])
    assert len(other) == 0


def test_a_document_costs_what_its_length_does(tmp_path: Path, statements: list[str]) -> None:
    def count(chunks: int) -> int:
        statements.clear()
        registry = SharedChunkRegistry(tmp_path / f"{chunks}.db")
        texts = tuple(f"Chunk {number}." for number in range(chunks))
        registry.add_many(Document("long", texts).to_chunks())
        registry.add_many(Document("long", texts).to_chunks())
        registry.add_many(reversed(Document("backwards", texts).to_chunks()))
        other = SharedChunkRegistry(registry.path)
        registry.discard_many(registry.document("long"))
        registry.discard_many(registry.document("backwards"))
        assert len(other) == 0
        return len(statements)

    assert count(400) <= 2.1 * count(200)


def test_a_reader_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    """Neither for one in another process that is stuck, nor for one in this process."""
    path = tmp_path / "registry.db"
    registry = SharedChunkRegistry(path)
    registry.add_many(REPORT.to_chunks())
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    blocked = [
        Thread(target=registry.add_many, args=(LETTER.to_chunks(),)),
        Thread(target=registry.refresh),
    ]
    for thread in blocked:
        thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    for _ in range(20):
        assert len(registry.find(REPORT.chunks[1])) == 1
        assert len(registry) == 3
    assert time.monotonic() - started < 2
    assert all(thread.is_alive() for thread in blocked)
    writer.execute("ROLLBACK")
    for thread in blocked:
        thread.join(30)
    assert len(registry) == 5


ENDLESS_WRITER = """
import sys
from cacheblend_rag.text.chunk import Document
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
registry = SharedChunkRegistry(sys.argv[1])
print("writes", flush=True)
while True:
    for name in "abc":
        texts = [f"{name} says {number}. " * 40 for number in range(30)]
        registry.add_many(Document(name, tuple(texts)).to_chunks())
    for name in "abc":
        registry.discard_many(registry.document(name))
"""


def test_a_killed_writer_leaves_whole_documents(path: Path) -> None:
    registry, draw = SharedChunkRegistry(path), random.Random(5)
    seen = set[int]()
    for _ in range(6):
        run = [sys.executable, "-c", ENDLESS_WRITER, str(path)]
        with subprocess.Popen(run, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(draw.random() / 5)
            writer.kill()
        again = SharedChunkRegistry(path)
        assert set(again.chunks()) == set(registry.chunks())
        for name in "abc":
            seen.add(len(again.document(name)))
    assert seen <= {0, 30}
    registry.discard_many(registry.chunks())
    registry.close()
    assert b" says " not in path.read_bytes()
