"""The tier of examples/: chunks are found after a restart, and answers are those without it."""

from __future__ import annotations

import runpy
import sqlite3
from contextlib import closing
from pathlib import Path

from cacheblend_rag import BlendConfig, Document, Engine, SamplingParams, TransformersEngine
from cacheblend_rag.kv import HostTier, TieredKVStore
from tests.models import make_model, make_tokenizer, prompt_of, words

FILE = Path(__file__).parents[2] / "examples" / "table_tier.py"
TableTier = runpy.run_path(str(FILE))["TableTier"]
DOCUMENTS = [Document(f"document {seed}", (words(30, seed),)) for seed in range(2)]
PROMPT = prompt_of("w5 w6", *(chunk for one in DOCUMENTS for chunk in one.to_chunks()), "w9")
MODEL, TOKENIZER = make_model(), make_tokenizer()


def engine_on(path: Path) -> Engine:
    engine = TransformersEngine(
        MODEL,
        tokenizer=TOKENIZER,
        config=BlendConfig(min_tokens=0, cost_model=False, reuse_prefix=False),
        store=TieredKVStore([HostTier(0), TableTier(str(path))]),
    )
    engine.register(DOCUMENTS)
    return engine


def test_a_tier_of_ones_own_is_one_short_file(tmp_path: Path) -> None:
    assert len(FILE.read_text().splitlines()) <= 60
    path, short = tmp_path / "chunks.sqlite", SamplingParams.greedy(max_tokens=6)
    with closing(engine_on(path)) as engine:
        assert engine.precompute(DOCUMENTS, progress=False).computed == 2
    with closing(engine_on(path)) as engine:
        assert engine.precompute(DOCUMENTS, progress=False).skipped == 2
        answer = engine.generate(PROMPT, short)
        assert [chunk.tier for chunk in answer.report.chunks] == ["table", "table"]
        exact = engine.config.with_changes(recompute_ratio=1.0)
        whole = engine.generate(PROMPT, short, config=exact)
        assert whole.token_ids == engine.generate_full(PROMPT, short).token_ids
        assert engine.store.stats()["table"]["entries"] == 2
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE chunks SET data = zeroblob(LENGTH(data))")
        assert not any(chunk.hit for chunk in engine.generate(PROMPT, short).report.chunks)
        assert engine.store.stats()["table"]["quarantined"] == 2
        assert engine.store.keys() == []
