"""What one replica deletes, no other replica serves out of its vLLM's prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.connector import finder as finder_module
from cacheblend_rag.engines.vllm.connector import found_chunk as deletions_module
from cacheblend_rag.engines.vllm.connector.finder import Finder
from cacheblend_rag.engines.vllm.connector.finding import Finding
from cacheblend_rag.engines.vllm.connector.found_chunk import Deletions
from cacheblend_rag.engines.vllm.connector.pending import Pending
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.connector.stored_tokens import Name
from cacheblend_rag.engines.vllm.connector.token_file import FILE_NAME
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, BlendJob, SentChunk
from cacheblend_rag.engines.vllm.protocol.result import EvictResult
from cacheblend_rag.kv.chunk_kv import chunk_id, namespace_id
from cacheblend_rag.settings.tier_url import TierUrl
from tests.engines.vllm.connector.test_finder import BARE, found, job, learn, prompt, waited
from tests.engines.vllm.connector.test_finding import CONFIG, ask, find, tokens_of
from tests.engines.vllm.exactness import SHORT, index
from tests.engines.vllm.inprocess import InProcessEngine
from tests.families.reference import DOCUMENTS, retrieved
from tests.local_servers import Server
from tests.models import prompt_of, words
from tests.servers import redis, redis_place  # noqa: F401 - a fixture

TOKENS = tuple(range(100))
JOB = BlendJob("blend", BARE, (SentChunk(0, 40), SentChunk(50, 90)))
FIRST, SECOND = (chunk_id(TOKENS[one.start : one.end]) for one in JOB.chunks)


def name(chunk: str, namespace: str = "n") -> Name:
    return Name(namespace, chunk, "", BARE)


def test_only_deleted_chunks_change_the_marks_of_blends() -> None:
    deletions = Deletions()
    deletions.note([name("elsewhere"), name(FIRST, "another namespace")])
    assert deletions.mark("n", JOB, TOKENS) == ""
    marks = set()
    for chunk in (FIRST, SECOND, FIRST):
        deletions.note([name(chunk)])
        marks.add(deletions.mark("n", JOB, TOKENS))
        assert deletions.mark("n", JOB, TOKENS) in marks
    assert len(marks) == 3
    assert "" not in marks


def test_no_deletion_is_undone_by_forgetting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions_module, "KEPT", 2)
    deletions = Deletions()
    deletions.note([name(FIRST)])
    marks = {"", deletions.mark("n", JOB, TOKENS)}
    for other in "abc":
        deletions.note([name(other)])
    assert deletions.mark("n", JOB, TOKENS) not in marks


@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_replicas_tell_each_other_of_deletions(
    kind: str,
    redis: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.02)
    shared = TierUrl(redis_place(redis, "timeout=1"))
    place = shared if kind == "redis" else tmp_path / FILE_NAME
    document = tuple(range(1000, 1040))
    blend = BlendJob("blend", BARE, (SentChunk(2, 42),))
    with closing(Finder(place, lambda: "m")) as one, closing(Finder(place, lambda: "m")) as other:

        def mark() -> str:
            return one.deletions.mark(namespace_id("default"), blend, prompt(document))

        learn(one, job(document))
        waited(lambda: len(found(other, document)) == 1)
        assert mark() == ""
        other.forget("default", BARE, [(chunk_id(document), "")])
        waited(lambda: mark() != "")
        first = mark()
        learn(other, job(document))
        waited(lambda: len(found(one, document)) == 1)
        assert mark() == first, "what was blended since may be shared"


# Two replicas with a common folder: the vLLM of these tests, and the connector's other side alone


@pytest.fixture
def blend_config() -> BlendConfig:
    return CONFIG


@pytest.fixture
def engine(
    llama: InProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InProcessEngine]:
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.02)
    with closing(Finder(tmp_path / FILE_NAME, lambda: "m")) as finder:
        monkeypatch.setattr(llama.scheduler_connector.finding, "finder", finder)
        index(llama)
        assert finder.settle()
        yield llama
        for document in DOCUMENTS:
            llama.evict_document(document.document_id)


@pytest.fixture
def replica(engine: InProcessEngine, tmp_path: Path) -> Iterator[Finding]:
    with closing(Finder(tmp_path / FILE_NAME, lambda: "m")) as finder:
        yield Finding(finder, ConnectorSettings(), 128)


def tiers(engine: InProcessEngine) -> set[str | None]:
    """Where the chunks come from if a client names them."""
    (first, *_), second = (document.to_chunks() for document in DOCUMENTS)
    asked = prompt_of(words(9, 50), second[1], " w7 ", first, " w7 ", words(200, 61))
    return {chunk.tier for chunk in engine.generate(asked, SHORT).report.chunks}


def found_tiers(engine: InProcessEngine) -> set[str | None]:
    """Where they come from if the connector finds them."""
    tokens = (*tokens_of(engine, retrieved()), *engine.tokenize(words(200, 62)))
    [told] = ask(engine, tokens, params=find(**CONFIG.to_dict()))
    return {chunk["tier"] for chunk in told.params[PARAMETER].get("chunks") or ()}


def evict(connector: Finding, chunk: Name) -> None:
    """Tell a connector that its worker has evicted a chunk."""
    work = BlendJob("evict", chunk.lead_in, (), keys=((chunk.chunk_id, chunk.context_id),))
    connector.note_result(Pending(work, blends=False, namespace="default"), EvictResult(1))


def delete(replica: Finding, engine: InProcessEngine) -> None:
    """Have the replica delete what it knows, and wait until the engine's connector knows."""
    tokens = tokens_of(engine, retrieved())
    waited(lambda: len(replica.finder.find("default", tokens)) == 3)
    while several := replica.finder.find("default", tokens):
        for one in several:
            evict(replica, one.name)
    store = engine.worker_connector.blender.store
    for key in list(store.entries()):
        store.evict(key)
    finder = engine.scheduler_connector.finding.finder
    waited(lambda: not finder.find("default", tokens))


@pytest.mark.parametrize("asked", [tiers, found_tiers])
def test_what_another_replica_deleted_is_not_served_out_of_the_prefix_cache(
    engine: InProcessEngine, replica: Finding, asked: Callable[[InProcessEngine], set[str | None]]
) -> None:
    assert asked(engine) == {"host"}
    assert asked(engine) == {"prefix cache"}
    delete(replica, engine)
    assert asked(engine) <= {None}


def test_what_was_deleted_here_is_not_either(engine: InProcessEngine) -> None:
    assert [tiers(engine) for _ in range(2)] == [{"host"}, {"prefix cache"}]
    connector = engine.scheduler_connector.finding
    tokens = tokens_of(engine, retrieved())
    for one in connector.finder.find("default", tokens):
        evict(connector, one.name)
    assert tiers(engine) == {"host"}, "its KV is still there, and is blended anew"
