"""What one replica deletes, no other replica serves out of its vLLM's prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cacheblend_rag.engines import finder as finder_module
from cacheblend_rag.engines.catalog import Catalog, Name
from cacheblend_rag.engines.catalog_places import InFolder
from cacheblend_rag.engines.finder import Finder
from cacheblend_rag.engines.vllm.connector.finding import Finding
from cacheblend_rag.engines.vllm.connector.pending import Pending
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, StoreJob
from cacheblend_rag.engines.vllm.protocol.result import EvictResult
from cacheblend_rag.kv.mac import CHECKSUM
from tests.engines.vllm.connector.test_finding import CONFIG, ask, find, tokens_of
from tests.engines.vllm.exactness import index
from tests.engines.vllm.inprocess import InProcessEngine
from tests.families.reference import retrieved
from tests.kv.samples import until
from tests.models import words


def waited(check: Callable[[], object]) -> None:
    assert until(check, 20)


# Two replicas with a common folder: the vLLM of these tests, and the connector's other side alone


def sharing(folder: Path) -> Finder:
    return Finder(lambda: Catalog(InFolder(folder, "m"), CHECKSUM))


@pytest.fixture
def engine(
    llama: InProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InProcessEngine]:
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(InFolder, "seconds", 0.02)
    with closing(sharing(tmp_path)) as finder:
        monkeypatch.setattr(llama.scheduler_connector.finding, "finder", finder)
        index(llama)
        assert finder.settle()
        yield llama


@pytest.fixture
def replica(engine: InProcessEngine, tmp_path: Path) -> Iterator[Finding]:
    with closing(sharing(tmp_path)) as finder:
        yield Finding(finder, ConnectorSettings())


def tiers(engine: InProcessEngine) -> set[str | None]:
    """Where a prompt's chunks come from."""
    tokens = (*tokens_of(engine, retrieved()), *engine.tokenize(words(200, 62)))
    [told] = ask(engine, tokens, params=find(**CONFIG.to_dict()))
    return {chunk["tier"] for chunk in told.params[PARAMETER].get("chunks") or ()}


def evict(connector: Finding, chunk: Name) -> None:
    """Tell a connector that its worker has evicted a chunk."""
    lead = chunk.lead_in
    job = StoreJob(kind="evict", lead_in=lead, keys=((chunk.chunk_id, chunk.context_id),))
    connector.note_result(Pending(job, namespace="default"), EvictResult(1))


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


def test_what_another_replica_deleted_is_not_served_out_of_the_prefix_cache(
    engine: InProcessEngine, replica: Finding
) -> None:
    assert tiers(engine) == {"host"}
    assert tiers(engine) == {"prefix cache"}
    delete(replica, engine)
    assert tiers(engine) <= {None}
