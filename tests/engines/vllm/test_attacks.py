"""What may come as a job, and what it must not bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.connector.job_runner import evict, prefetch
from cacheblend_rag.engines.vllm.protocol.job import (
    Ask,
    Compare,
    Job,
    Precompute,
    StoreJob,
)
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.kv import KVKey, TieredKVStore
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.lead_in import LeadInId
from tests.engines.vllm.exactness import SHORT, logprobs
from tests.engines.vllm.inprocess import InProcessEngine
from tests.models import make_tokenizer, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)


# What is sent as a job

HASH = "0" * 32
NONE = LeadInId("none", chunk_id(()), 0)
TOKENS = tuple(range(2, 150))
JOBS: dict[str, Job] = {
    "precompute": Precompute(lead_in=NONE, tokens=TOKENS, chunks=((0, 148),)),
    "turns": Precompute(lead_in=NONE, tokens=TOKENS, chunks=((2, 90),), conversation=HASH),
    "compare": Compare(tokens=TOKENS, answer=(3, 4), config=CONFIG),
    "evict": StoreJob(kind="evict", lead_in=NONE, keys=((HASH, ""),)),
    "prefetch": StoreJob(kind="prefetch", lead_in=NONE, keys=((HASH, ""),)),
    "status": Ask(kind="status"),
    "report": Ask(kind="report", report_id="1" * 32),
}


@pytest.mark.parametrize("work", [evict, prefetch])
def test_an_order_of_many_keys_lets_others_in_between(work: Callable[..., Iterator[None]]) -> None:
    keys = [KVKey(f"{number:032x}", "0" * 64, "") for number in range(100)]
    with TieredKVStore.open() as store:
        assert len(list(work(store, keys))) == len(keys)


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_reads_nothing_of_others(few_blocks: InProcessEngine, kind: str) -> None:
    """Whatever goes with it as prompt is computed, never decoded from what stood there."""
    for seed in range(4):  # others' prompts, in all blocks there are
        few_blocks.generate_full(words(700, 70 + seed), SHORT)
    prompt = tuple(make_tokenizer().encode(words(400, 90)))
    many = ResolvedSampling(max_tokens=40)
    salt, job = f"carrier {kind}", JOBS[kind].model_dump_json()
    seen = logprobs(few_blocks, VLLMRequest(prompt, many, salt, job=job))
    assert len(seen) == 2, "it ends when its job is done"
    plain = logprobs(few_blocks, VLLMRequest(prompt, many, f"plain {kind}"))
    assert seen == plain[:2]
    after = logprobs(few_blocks, VLLMRequest(prompt, many, salt))
    assert after == pytest.approx(plain, abs=1e-4), (
        "what the prefix cache keeps is the prompt's own"
    )
