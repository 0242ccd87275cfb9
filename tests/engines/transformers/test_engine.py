"""The engine as its users meet it: answers, reports, streams, threads, limits."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from cacheblend_rag import Chunk, Document, SamplingParams, TieredKVStore, TransformersEngine
from cacheblend_rag.errors import PromptError, StoreError
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
from tests.engines.transformers.conftest import EngineFactory
from tests.models import words

CHUNKS = [Chunk(words(30, seed)) for seed in range(4)]
QUESTION = words(6, 99)
TEXT = "\n\n".join([words(3, 98), *(c.text for c in CHUNKS), QUESTION])
SHORT = SamplingParams(max_tokens=6)


def test_an_end_token_ends_the_answer_unless_ignored(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    first = engine.generate(TEXT, SHORT).token_ids[2]
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [first])
    engine = make_engine()
    ended = engine.generate(TEXT, SHORT)
    assert ended.finish_reason == "stop"
    assert first not in ended.token_ids
    assert len(engine.generate(TEXT, SamplingParams(max_tokens=6, ignore_eos=True)).token_ids) == 6


def test_an_empty_prompt_is_refused_even_where_a_bos_token_is_added(
    make_engine: EngineFactory,
) -> None:
    engine = make_engine()
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    engine = TransformersEngine(engine.model, tokenizer=tokenizer)
    assert engine.generate("w5 w6", SHORT).prompt_tokens == 3
    with pytest.raises(PromptError, match="prompt is empty"):
        engine.generate("")


def test_a_prompt_ending_in_a_chunk_still_yields_its_own_logits(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.0, lead_in="none")
    engine.precompute(CHUNKS[:1], progress=False)
    answer = engine.generate(CHUNKS[0].text, SHORT)
    assert answer.report.recomputed_tokens == 1
    assert answer.token_ids == engine.generate_full(CHUNKS[0].text, SHORT).token_ids


def test_a_full_disk_does_not_keep_a_document(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry needs room to forget, so KV goes before it."""
    registry = SharedChunkRegistry(tmp_path / "registry.sqlite")
    store = TieredKVStore.open(host_bytes=0, kv_path=tmp_path)
    engine = make_engine(store=store, registry=registry)
    engine.precompute([Document("report", ("w1 w2", "w3 w4"))], progress=False)
    discard = registry.discard_many

    def full_while_there_is_kv(chunks: Iterable[Chunk]) -> None:
        if store.keys():
            raise StoreError("database or disk is full")
        discard(chunks)

    monkeypatch.setattr(registry, "discard_many", full_while_there_is_kv)
    assert engine.evict_document("report") == 2
    assert len(registry) == 0


LEAVING = """
import sys, threading, time
from tests.models import make_model, make_tokenizer
from cacheblend_rag import SamplingParams, TransformersEngine
engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer())
def work(seed):
    while True:
        engine.precompute([f"w{n % 200} w{seed}" for n in range(seed, seed + 40)], progress=False)
        engine.generate(f"w{seed} w2 w3", SamplingParams(max_tokens=20, ignore_eos=True))
for seed in range(4):
    threading.Thread(target=work, args=(seed,), daemon=True).start()
time.sleep(float(sys.argv[1]))
print("leaving")
"""


def test_the_interpreter_may_end_while_threads_compute() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, "0.5"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr[-500:]
