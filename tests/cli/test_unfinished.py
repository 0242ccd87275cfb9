"""KV that could not be stored is said, kept as unfinished, and computed by the next run."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.kv import TieredKVStore
from cacheblend_rag.kv.tiers import disk
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.rag import KV_NAME, indexing
from cacheblend_rag.rag.collection import Collection
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.settings.tier_url import TierUrl
from tests.cli.documents import write_notes
from tests.cli.test_index import LetterEmbedder
from tests.local_servers import redis_server, redis_url
from tests.toy import TOY

OPTIONS = ("--model", TOY, "--set", "chunk_size=64")
Index = Callable[..., Any]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    write_notes(tmp_path / "notes")
    return tmp_path / "notes"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "collection"


@pytest.fixture
def index(cli: Any, into: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Run ``index`` with arguments; return what came of it."""
    monkeypatch.setattr(indexing, "Embedder", LetterEmbedder)
    return lambda *arguments: cli("index", *arguments, "--into", into, *OPTIONS, "--json")


def unfinished(into: Path) -> dict[str, int]:
    with Collection(into) as collection:
        return collection.unfinished()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def files(into: Path) -> list[Path]:
    return sorted((into / KV_NAME).glob("??/*.safetensors"))


def test_a_redis_that_is_down_leaves_documents_unfinished_until_it_is_up(
    index: Index, into: Path, notes: Path
) -> None:
    with redis_server() as server:
        url = redis_url(server, "").rstrip("?")
        server.kill()
        down = index(notes, "--set", f"tiers={url}")
        assert down.code == 1
        found = down.json
        assert (found["added"], found["documents"], found["computed_chunks"]) == (4, 4, 0)
        assert found["unfinished_documents"] == 4
        assert found["unfinished_chunks"] == found["chunks"] > 8
        ((cause, count),) = found["refused_chunks"].items()
        assert cause.startswith("redis tier: ConnectionError: ")
        assert "refused" in cause
        assert count == found["chunks"]
        said = down.stderr.splitlines()[-1]
        assert said.startswith(f"cacheblend-rag: {count} chunks of 4 documents have no KV ({cause}")
        assert said.endswith("the same command computes it once that is fixed")
        server.start()
        up = index(notes, "--set", f"tiers={url}")
        assert (up.code, up.stderr) == (0, "")
        again = up.json
        assert (again["unchanged"], again["computed_chunks"]) == (4, count)
        assert (again["unfinished_chunks"], again["refused_chunks"]) == (0, {})
        with TieredKVStore([open_tier(TierUrl(url), "cpu")]) as store:
            assert len(store.keys()) == count
        third = index(notes, "--set", f"tiers={url}").json
        assert (third["computed_chunks"], third["stored_chunks"]) == (0, 0), "nothing is left"


def test_a_full_disk_leaves_documents_unfinished_though_memory_has_their_kv(
    index: Index, into: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with monkeypatch.context() as full:
        full.setattr(disk, "write_parts", no_room)
        outcome = index(notes)
    assert outcome.code == 1
    found = outcome.json
    assert found["refused_chunks"] == {"disk tier: No space left on device": found["chunks"]}
    assert (found["computed_chunks"], found["unfinished_chunks"]) == (0, found["chunks"])
    assert outcome.stderr.count("No space left on device") == 1
    assert len([one for one in caplog.messages if "No space" in one]) == 1, "one line a cause"
    assert sum(unfinished(into).values()) == found["chunks"]
    finished = index(notes)
    assert (finished.code, finished.json["computed_chunks"]) == (0, found["chunks"])
    assert len(files(into)) == found["chunks"]
    assert unfinished(into) == {}


def test_repair_computes_what_was_lost_or_damaged_and_nothing_else(
    index: Index, into: Path, notes: Path, caplog: Any
) -> None:
    chunks = index(notes).json["chunks"]
    lost, damaged, cut, *_ = files(into)
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"x" * 9)
    cut.write_bytes(b"")
    assert index(notes).json["computed_chunks"] == 0, "it is not asked to look"
    found = index("--repair")
    assert found.code == 0, found.stderr
    assert (found.json["computed_chunks"], found.json["stored_chunks"]) == (3, chunks - 3)
    assert len(files(into)) == chunks
    with TieredKVStore.of(StoreConfig(kv_path=into / KV_NAME)) as store:
        assert all(store.get(key).kv is not None for key in store.entries())
    again = index("--repair").json
    assert (again["computed_chunks"], again["stored_chunks"]) == (0, chunks)


def test_repair_computes_what_was_only_registered_and_knows_chunks_again(
    index: Index, into: Path, notes: Path
) -> None:
    chunks = index(notes, "--set", "register_only=true").json["chunks"]
    for path in (into / KV_NAME).glob("*.sqlite*"):
        path.unlink()
    (notes / "new.txt").write_text("A new text.")
    found = index(notes, "--repair").json
    assert (found["added"], found["computed_chunks"]) == (1, chunks + 1)
    assert found["stored_chunks"] == 0, "what this run has stored is not looked at again"


def test_what_repair_cannot_read_stays_unfinished(
    index: Index, into: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = index(notes).json["chunks"]

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(disk, "read_range", broken)
        found = index("--repair")
    assert found.code == 1
    assert found.json["refused_chunks"] == {"disk tier: store error": chunks}
    assert found.json["unfinished_chunks"] == chunks
    assert index("--repair").json["unfinished_chunks"] == 0


def test_nothing_is_computed_for_a_while_once_a_tier_has_failed(
    index: Index, into: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompute, asked = TransformersEngine.precompute, []

    def noted(engine: Any, chunks: Any, **options: Any) -> Any:
        asked.append(options["register_only"])
        return precompute(engine, chunks, **options)

    monkeypatch.setattr(TransformersEngine, "precompute", noted)
    with monkeypatch.context() as full:
        full.setattr(disk, "write_parts", no_room)
        found = index(notes).json
    assert asked == [False, True, True, True]
    assert found["refused_chunks"] == {"disk tier: No space left on device": found["chunks"]}
    with Collection(into) as collection, closing(collection.open_engine({})) as engine:
        assert len(engine.registry) == found["chunks"], "what is not computed is known all the same"
