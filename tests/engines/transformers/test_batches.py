"""A batch loads what its prompts share once."""

from __future__ import annotations

import pytest

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.kv import HostTier, TierPolicy
from cacheblend_rag.kv.tiers.contract import Admit
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import SlowTier
from tests.models import prompt_of, words

SHORT = SamplingParams(max_tokens=2)


@pytest.mark.parametrize(("held", "admit"), [(2, "always"), (6, "frequency")])
def test_a_batch_reads_each_shared_chunk_once(
    make_engine: EngineFactory, held: int, admit: Admit
) -> None:
    """Also where memory has room for the chunks of one prompt only, and others come in between."""
    topics = [[Chunk(words(40, 10 * topic + i)) for i in range(2)] for topic in range(3)]
    chunks = [chunk for topic in topics for chunk in topic]
    writer = make_engine(recompute_ratio=0.0)
    writer.precompute(chunks, progress=False)
    slow = SlowTier(lambda: None)
    room = 0
    for chunk in chunks:
        kv = writer.store.get(writer.key(chunk)).kv
        assert kv is not None
        room = max(room, writer.store.nbytes(writer.key(chunk)) or 0)
        TieredKVStore([slow]).put(writer.key(chunk), kv)
    memory = HostTier(policy=TierPolicy(held * room, admit=admit))
    store = TieredKVStore([memory, slow])
    engine = make_engine(store=store, recompute_ratio=0.0)
    prompts = [prompt_of(words(5, turn), *topic, "w9") for turn in range(4) for topic in topics]
    alone = [writer.generate(prompt, SHORT) for prompt in prompts]
    together = engine.generate_batch(prompts, SHORT)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert all(chunk.hit for answer in together for chunk in answer.report.chunks)
    assert sorted(map(str, slow.keys)) == sorted(str(writer.key(chunk)) for chunk in chunks)


@pytest.mark.parametrize("room", [0, 1])
def test_memory_need_not_hold_what_a_group_shares(make_engine: EngineFactory, room: int) -> None:
    """A chunk that all of eight prompts have is read once, also without memory for it."""
    shared, *others = (Chunk(words(40, seed)) for seed in range(9))
    writer = make_engine(recompute_ratio=0.0)
    writer.precompute([shared, *others], progress=False)
    slow, size = SlowTier(lambda: None), writer.store.nbytes(writer.key(shared)) or 0
    for chunk in (shared, *others):
        kv = writer.store.get(writer.key(chunk)).kv
        assert kv is not None
        TieredKVStore([slow]).put(writer.key(chunk), kv)
    slow.keys.clear()
    memory = HostTier(policy=TierPolicy(room * size, admit="always", promote=bool(room)))
    store = TieredKVStore([memory, slow])
    engine = make_engine(store=store, recompute_ratio=0.0)
    engine.register([shared, *others])
    prompts = [prompt_of(words(5, turn), shared, own, "w9") for turn, own in enumerate(others)]
    alone = [writer.generate(prompt, SHORT).token_ids for prompt in prompts]
    together = engine.generate_batch(prompts, SHORT)
    assert [answer.token_ids for answer in together] == alone
    assert all(chunk.hit for answer in together for chunk in answer.report.chunks)
    assert sorted(map(str, slow.keys)) == sorted(str(writer.key(c)) for c in (shared, *others))
    slow.keys.clear()
    for prompt in prompts:
        engine.generate(prompt, SHORT)
    if not room:  # nothing was kept after the batch, or between requests
        assert slow.keys.count(writer.key(shared)) > 1
