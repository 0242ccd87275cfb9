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
from threading import RLock, Thread

import pytest

from cacheblend_rag.errors import PromptError, StoreError
from cacheblend_rag.text import registry_file, sqlite_registry
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.registry import ChunkRegistry
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry

REPORT = Document("report", ("Alpha is first.", "It was founded in Rome.", "It has ten members."))
LETTER = Document("letter", ("Dear reader,", "It was founded in Rome."))
OTHER_PROCESS = """
import sys
from cacheblend_rag.text.chunk import Document
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
registry = SharedChunkRegistry(sys.argv[1])
for name in sys.argv[3:]:
    registry.add_many(Document(name, (f"First of {name}.", f"Second of {name}.")).to_chunks())
registry.discard_many(registry.document(sys.argv[2]))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "chunks.sqlite"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The files that registries opened, in order."""
    opened: list[sqlite3.Connection] = []

    def open_file(uri: str, *, timeout: float) -> sqlite3.Connection:
        opened.append(registry_file.open_file(uri, timeout=timeout))
        return opened[-1]

    monkeypatch.setattr(sqlite_registry, "open_file", open_file)
    return opened


class NotedLock:
    """A lock between threads. waits: how long those that need not get it would wait for it."""

    def __init__(self) -> None:
        self._lock, self.waits = RLock(), list[float]()

    def acquire(self, *, timeout: float) -> bool:
        self.waits.append(timeout)
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> NotedLock:
    """The lock of the registry that the test opens."""
    own = NotedLock()
    monkeypatch.setattr(sqlite_registry, "RLock", lambda: own)
    return own


def test_what_was_added_is_found_after_a_restart_with_its_context(path: Path) -> None:
    first = SharedChunkRegistry(path)
    first.add_many(REPORT.to_chunks())
    first.close()

    again = SharedChunkRegistry(path)
    assert again.document("report") == tuple(REPORT.to_chunks())
    assert [m.chunk for m in again.find("So: It has ten members. Yes.")] == [REPORT.to_chunks()[2]]
    assert "Alpha is first." in again
    assert len(again) == 3


def test_only_what_others_remove_is_told(path: Path) -> None:
    one, two = SharedChunkRegistry(path), SharedChunkRegistry(path)
    heard: dict[str, list[Chunk]] = {"one": [], "two": []}
    one.watch(heard["one"].extend)
    two.watch(heard["two"].extend)
    one.add_many([*REPORT.to_chunks(), *LETTER.to_chunks()])
    one.discard_many(one.document("letter"))
    assert two.document("letter") == ()  # looks, and hears of nothing that it had not known
    assert heard == {"one": [], "two": []}
    one.discard_many(one.document("report"))
    assert len(two) == 0
    assert heard == {"one": [], "two": REPORT.to_chunks()}
    two.add_many(LETTER.to_chunks())
    assert len(one) == 2
    two.discard_many(two.document("letter"))
    one.refresh()
    assert heard["one"] == LETTER.to_chunks()
    assert heard["two"] == REPORT.to_chunks()


def test_another_process_adds_and_removes(path: Path) -> None:
    here = SharedChunkRegistry(path)
    here.add_many(REPORT.to_chunks())
    run = [sys.executable, "-c", OTHER_PROCESS, str(path), "report"]
    others = [subprocess.Popen([*run, *(f"{k}{i}" for i in range(20))]) for k in "ab"]
    assert [other.wait(60) for other in others] == [0, 0]
    assert here.document("report") == ()
    assert len(here) == 80
    assert here.find("Second of b19.")[0].chunk.context == ("First of b19.", "\n\n")


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
                    registry.add(chunk)
                    memory.add(chunk)
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


def test_registering_again_what_is_known_does_not_touch_the_file(path: Path) -> None:
    registry = SharedChunkRegistry(path)
    registry.add_many(REPORT.to_chunks())
    before = path.read_bytes()
    registry.add_many(REPORT.to_chunks())
    assert path.read_bytes() == before


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
    SharedChunkRegistry(path).add(chunk)
    assert SharedChunkRegistry(path).variants(chunk.text) == (chunk,)


def test_an_empty_text_is_refused_and_nothing_is_added(path: Path) -> None:
    registry = SharedChunkRegistry(path)
    with pytest.raises(PromptError, match="empty"):
        registry.add_many([Chunk("good"), Chunk("  ")])
    assert len(registry) == 0


def test_a_file_that_is_no_registry_is_an_error_of_one_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        SharedChunkRegistry(path)

    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE something (x)")
    with pytest.raises(StoreError, match="not a chunk registry of version 2"):
        SharedChunkRegistry(path)


DAMAGES = {
    "UPDATE texts SET text = 'a string' WHERE id = 1": ("a value is not text", 3),
    "UPDATE texts SET text = CAST(x'ff' AS TEXT) WHERE id = 1": ("a value is not text", 3),
    "UPDATE texts SET text = x'ff' WHERE id = 1": ("a text is not UTF-8", 3),
    "UPDATE texts SET text = x'20' WHERE id = 1": ("text ' ' of document 'report' is empty", 1),
    "DELETE FROM texts WHERE id = 1": ("text 1 is missing", 3),
    "UPDATE contexts SET parent = 99 WHERE id = 1": ("context 1 is broken", 2),
    "UPDATE contexts SET parent = 1 WHERE id = 1": ("context 1 is broken", 2),
    "UPDATE contexts SET parent = -1 WHERE id = 1": ("context 1 is broken", 2),
    "UPDATE contexts SET parent = x'00' WHERE id = 1": ("is not a number", 2),
    "UPDATE contexts SET parent = 'abc' WHERE id = 1": ("context 'abc' is not a number", 2),
    "UPDATE contexts SET parent = CAST(x'ff' AS TEXT) WHERE id = 1": ("is not a number", 2),
    "UPDATE contexts SET text = 0.5 WHERE id = 1": ("text '0.5' is not a number", 2),
    "DELETE FROM contexts WHERE id = 1": ("context 1 is broken", 2),
    "UPDATE chunks SET context = 99 WHERE id < 4": ("context 99 is broken", 3),
    "UPDATE chunks SET context = 1.5 WHERE id = 2": ("context '1.5' is not a number", 1),
    "UPDATE chunks SET text = x'01' WHERE id = 2": ("is not a number", 1),
    "UPDATE chunks SET document = 5 WHERE id = 2": ("a value is not text", 1),
    "UPDATE chunks SET document = 'report' WHERE id = 2": ("a value is not text", 1),
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
            file.execute("INSERT INTO texts SELECT * FROM source.texts")
            file.execute("INSERT INTO contexts SELECT * FROM source.contexts")
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
    reader.add(Chunk("more"))
    reader.discard_many(reader.document("report"))
    assert set(reader.document("letter")) == set(LETTER.to_chunks())
    (told,) = caplog.messages
    assert f"chunk registry {path}: row " in told
    assert why in told
    assert (f", and {count - 1} more" in told) == (count > 1)
    reader.add_many(REPORT.to_chunks())
    assert len(SharedChunkRegistry(path).find(REPORT.chunks[2])) == 1


FOREIGN = {
    "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN SELECT 1; END": "trigger 't'",
    "CREATE VIEW v AS SELECT 1": "view 'v'",
    "CREATE TABLE more (x)": "table 'more'",
    "CREATE INDEX i ON chunks (hex(document))": "index 'i'",
    "ALTER TABLE chunks ADD COLUMN more GENERATED ALWAYS AS (abs(id))": "table 'chunks'",
    "DROP INDEX chunks_by_text; DROP TABLE chunks; CREATE VIEW chunks AS"
    " WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    " SELECT x AS id, 1 AS text, NULL AS document, 0 AS context, x'' AS collection FROM c": (
        "view 'chunks'"
    ),
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
    said = f"its {FOREIGN[foreign]} is not a registry's"
    for _ in range(3):
        assert len(registry.find(REPORT.chunks[0])) == 1
    assert caplog.messages == [f"chunk registry {path} cannot be read: {said}"]
    with pytest.raises(StoreError, match=f"cannot be changed: {said}"):
        registry.add(Chunk("more"))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"cannot be opened: {said}"):
            SharedChunkRegistry(path, read_only=read_only)


def test_a_file_without_our_tables_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreError, match="cannot be opened: a registry's tables are missing"):
        SharedChunkRegistry(path)


def test_a_text_that_many_rows_name_is_held_once(path: Path) -> None:
    """A file of some MiB must not become gigabytes in memory."""
    SharedChunkRegistry(path).close()
    rows = 2000
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO texts VALUES (1, ?)", (b"x" * (1 << 20),))
        numbers = [(number,) for number in range(1, rows + 1)]
        file.executemany("INSERT INTO contexts VALUES (?1, ?1 - 1, 1)", numbers)
        file.executemany("INSERT INTO chunks VALUES (?1, 1, NULL, ?1, x'')", numbers)
    tracemalloc.start()
    registry = SharedChunkRegistry(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(registry) == rows
    assert most < 256 << 20


def test_a_broken_context_is_looked_up_once(path: Path) -> None:
    SharedChunkRegistry(path).close()
    rows = 400
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO texts VALUES (1, x'68')")
        numbers = [(number, number - 1 or 999) for number in range(1, rows + 1)]
        file.executemany("INSERT INTO contexts VALUES (?, ?, 1)", numbers)
        deepest_first = [(rows + 1 - number, number) for number, _ in numbers]
        file.executemany("INSERT INTO chunks VALUES (?, 1, NULL, ?, x'')", deepest_first)
    opened, seen = registry_file.open_file, list[str]()

    def traced(uri: str, *, timeout: float) -> sqlite3.Connection:
        made = opened(uri, timeout=timeout)
        made.set_trace_callback(seen.append)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_registry, "open_file", traced)
        assert len(SharedChunkRegistry(path)) == 0
    assert len(seen) < 2 * rows


def test_a_text_that_could_not_be_read_again_is_not_written(path: Path) -> None:
    registry = SharedChunkRegistry(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_registry, "MOST_BYTES", 100)
        with pytest.raises(StoreError, match="a text of 101 bytes is longer than 100"):
            registry.add(Chunk("x" * 101))
    assert len(registry) == 0


def test_a_document_is_forgotten_though_its_rows_were_deleted_by_hand(path: Path) -> None:
    registry = SharedChunkRegistry(path)
    registry.add_many([*REPORT.to_chunks(), *LETTER.to_chunks()])
    with sqlite3.connect(path) as file:
        file.execute("DELETE FROM chunks WHERE id = 1")
        file.execute("DELETE FROM contexts WHERE id = 1")
    registry.discard_many(registry.document("report"))
    assert registry.document("report") == ()
    assert len(SharedChunkRegistry(path)) == 2


def test_a_document_registered_again_and_in_part_is_whole_after_a_restart(tmp_path: Path) -> None:
    """Contexts are written as what one chunk adds to the last one's, and some go meanwhile."""
    document = Document("d", tuple(f"passage {index}" for index in range(8)))
    chunks = document.to_chunks()
    registry = SharedChunkRegistry(tmp_path / "chunks.sqlite")
    registry.add_many(chunks)
    registry.discard_many(chunks[5:])
    registry.add_many([chunks[7], chunks[2], chunks[7], chunks[6], chunks[3]])
    again = SharedChunkRegistry(tmp_path / "chunks.sqlite")
    assert set(again.document("d")) == set(registry.document("d")) == {*chunks[:5], *chunks[6:]}


def test_a_document_costs_what_its_length_does(
    tmp_path: Path, files: list[sqlite3.Connection]
) -> None:
    def statements(chunks: int) -> int:
        registry = SharedChunkRegistry(tmp_path / f"{chunks}.db")
        seen: list[str] = []
        files[-1].set_trace_callback(seen.append)
        texts = tuple(f"Chunk {number}." for number in range(chunks))
        registry.add_many(Document("long", texts).to_chunks())
        registry.add_many(Document("long", texts).to_chunks())
        other = SharedChunkRegistry(registry.path)
        files[-1].set_trace_callback(seen.append)
        registry.discard_many(registry.document("long"))
        assert len(other) == 0
        return len(seen)

    assert statements(400) <= 2.1 * statements(200)


def test_a_reader_does_not_wait_for_a_writer(
    tmp_path: Path, files: list[sqlite3.Connection], lock: NotedLock
) -> None:
    """Neither for one in another process that is stuck, nor for one in this process."""
    path = tmp_path / "registry.db"
    registry = SharedChunkRegistry(path)
    registry.add_many(REPORT.to_chunks())
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    seen: list[str] = []
    files[-1].set_trace_callback(seen.append)
    for _ in range(3):
        assert len(registry.find(REPORT.chunks[1])) == 1
    files[-1].set_trace_callback(None)
    waits = [statement for statement in seen if "busy_timeout" in statement]
    assert waits == [f"PRAGMA busy_timeout = {wait}" for wait in (100, 0, 0)]
    blocked = Thread(target=registry.add_many, args=(LETTER.to_chunks(),))
    blocked.start()
    while lock.acquire(timeout=0):  # until the other thread has it
        lock.release()
        time.sleep(0.01)
    assert len(registry.find(REPORT.chunks[1])) == 1
    assert len(registry) == 3
    assert blocked.is_alive()
    writer.execute("ROLLBACK")
    blocked.join(30)
    assert len(registry) == 5


def test_what_another_registry_writes_is_another_generation(path: Path) -> None:
    one, two = SharedChunkRegistry(path), SharedChunkRegistry(path)
    chunk, before = Chunk("a text"), two.generation
    assert two.generation is before
    one.add(chunk)
    added = two.generation
    assert added is not before
    one.discard(chunk)
    assert two.generation is not added
