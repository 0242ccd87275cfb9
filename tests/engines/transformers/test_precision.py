"""Chunk KV in eight bits a number: one answer whichever tier it comes from, and none's but its."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag import Chunk, SamplingParams, StoreConfig, TieredKVStore, TransformersEngine
from tests.models import make_model, make_tokenizer, prompt_of, words

CHUNKS = [Chunk(words(60, 3)), Chunk(words(50, 4))]
PROMPT = prompt_of(words(5, 1), *CHUNKS, words(9, 5))
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def opened(folder: Path, precision: str) -> TransformersEngine:
    config = StoreConfig.of({"kv_path": str(folder), "precision": precision})
    return TransformersEngine(
        make_model("llama"), tokenizer=make_tokenizer(), store=TieredKVStore.of(config)
    )


def test_all_tiers_give_the_same_answer_and_ratio_one_is_exact(tmp_path: Path) -> None:
    with_all = dict[str, list[tuple[int, ...]]]()
    for turn in ("host", "disk"):  # the second engine finds nothing in memory
        engine = opened(tmp_path, "fp8")
        engine.precompute(CHUNKS, progress=False)
        config = engine.config.with_changes(selector="none", min_tokens=0)
        answer = engine.generate(PROMPT, SHORT, config=config)
        assert [chunk.tier for chunk in answer.report.chunks] == [turn, turn]
        exact = config.with_changes(selector="hkvd").with_ratio(1.0)
        everything = engine.generate(PROMPT, SHORT, config=exact)
        assert everything.report.blended
        assert everything.token_ids == engine.generate_full(PROMPT, SHORT).token_ids
        with_all[turn] = [answer.token_ids, everything.token_ids]
        engine.close()
    assert with_all["host"] == with_all["disk"]


def test_engines_of_two_precisions_share_nothing(tmp_path: Path) -> None:
    rough, fine = opened(tmp_path, "fp8"), opened(tmp_path, "native")
    rough.precompute(CHUNKS, progress=False)
    config = fine.config.with_changes(min_tokens=0)
    fine.register(CHUNKS)
    missed = fine.generate(PROMPT, SHORT, config=config).report
    assert {chunk.reason for chunk in missed.chunks} == {"other model"}
    fine.precompute(CHUNKS, progress=False)
    assert fine.generate(PROMPT, SHORT, config=config).report.blended
    assert len(fine.store.keys()) == 4
    rough.close()
    fine.close()
