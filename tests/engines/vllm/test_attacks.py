"""What may come as a job, and what it must not bring."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.connector.job_runner import evict, prefetch
from cacheblend_rag.engines.vllm.connector.scheduler import read_pending
from cacheblend_rag.engines.vllm.protocol.job import (
    Ask,
    Compare,
    Job,
    Precompute,
    StoreJob,
    read_job,
)
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import KVKey, TieredKVStore
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.lead_in import LeadInId
from tests.contracts.wire import cut
from tests.engines.vllm.exactness import SHORT, logprobs
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.protocol.test_result import HOSTILE, mutated
from tests.models import make_tokenizer, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)


# What is sent as a job

HASH = "0" * 32
NONE = LeadInId("none", chunk_id(()), 0)
DOCUMENT = LeadInId("document", chunk_id(range(3)), 2048)
MUTATIONS = 3_000
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


@pytest.fixture
def _long_numbers() -> Iterator[None]:
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(most)


@pytest.mark.usefixtures("_long_numbers")
def test_whatever_is_wrong_with_a_job_is_its_requests_reason() -> None:
    draw, read = random.Random(0), Counter[bool]()
    document = Precompute(
        lead_in=DOCUMENT, tokens=tuple(range(40)), chunks=((3, 10), (12, 20)), context_start=3
    )
    jobs = [document, *JOBS.values()]
    model = SimpleNamespace(max_model_len=150, get_vocab_size=lambda: 256)
    for turn in range(MUTATIONS):
        plain = draw.choice(jobs).model_dump(mode="json")
        sent = json.dumps(mutated(plain, draw, 900) if turn % 50 else draw.choice(HOSTILE))
        if turn % 5 == 0:
            sent = cut(json.dumps(plain).encode(), draw).decode(errors="replace")
        pending = read_pending(sent, None, model)  # type: ignore[arg-type]
        read[pending.job is not None] += 1
        assert (pending.job is None) == (pending.reason is not None)
        assert len(pending.reason or "") < 600
        assert "\n" not in (pending.reason or "")
        with suppress(ConfigError):  # it is all that the HTTP route must expect
            read_job(sent.encode(errors="replace"))
    assert min(read[True], read[False]) > MUTATIONS // 50


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
