"""What strangers may send to a vLLM server, and what it must not bring them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from cacheblend_rag import BlendConfig, Chunk
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.connector.job_runner import evict, prefetch
from cacheblend_rag.engines.vllm.connector.scheduler import read_job
from cacheblend_rag.engines.vllm.protocol.job import (
    SALT_PREFIX,
    BlendJob,
    SentChunk,
)
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.kv import KVKey, TieredKVStore
from cacheblend_rag.prefill.lead_in import LeadInId
from tests.engines.vllm.exactness import SHORT, logprobs
from tests.engines.vllm.hostile import HOSTILE, mutated
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.models import make_tokenizer, prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)


@pytest.fixture
def blend_config() -> BlendConfig:
    return CONFIG


# What strangers send

MUTATIONS = 3_000


def test_whatever_is_wrong_with_an_order_is_its_requests_reason() -> None:
    draw = random.Random(0)
    chunks = (SentChunk(3, 10), SentChunk(12, 20, "0" * 32, True))
    lead_in = LeadInId("document", "0" * 32, 2048)
    orders = [
        BlendJob("blend", lead_in, chunks, config=CONFIG, report_id="1" * 32),
        BlendJob("precompute", lead_in, chunks, tokens=tuple(range(20))),
        BlendJob("evict", lead_in, keys=(("0" * 32, ""),)),
        BlendJob(
            "precompute",
            lead_in,
            (SentChunk(3, 10, "1" * 32, turn=True), SentChunk(12, 20, "0" * 32, turn=True)),
            tokens=tuple(range(40)),
        ),
        BlendJob("report", lead_in, report_id="1" * 32),
    ]
    model = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 256)
    read = Counter[bool]()
    for turn in range(MUTATIONS):
        params = mutated(draw.choice(orders).to_params(), draw)
        request = SimpleNamespace(
            kv_transfer_params=params if turn % 50 else draw.choice(HOSTILE),
            num_prompt_tokens=100,
            prompt_token_ids=list(range(100)),
            cache_salt=f"{SALT_PREFIX}x",
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
            sampling_params=SimpleNamespace(prompt_logprobs=None),
            skip_reading_prefix_cache=False,
            resumable=False,
        )
        pending = read_job(request, None, model)  # type: ignore[arg-type]
        read[pending.job is not None] += 1
        assert pending.job is None or pending.reason is None
        assert len(pending.reason or "") < 600
    assert min(read[True], read[False]) > MUTATIONS // 50


@pytest.mark.parametrize("work", [evict, prefetch])
def test_an_order_of_many_keys_lets_others_in_between(work: Callable[..., Iterator[None]]) -> None:
    keys = [KVKey(f"{number:032x}", "0" * 64, "") for number in range(100)]
    with TieredKVStore.open() as store:
        assert len(list(work(store, keys))) == len(keys)


def orders_of_every_kind(engine: InProcessEngine) -> dict[str, BlendJob]:
    blend = request_of(engine, prompt_of(Chunk(words(30, 5)), words(5, 6)), SHORT, CONFIG).job
    assert blend is not None
    lead_in = blend.lead_in
    tokens = tuple(range(2, 150))
    whole = SentChunk(0, 148, "", False, 0)
    return {
        "precompute": BlendJob("precompute", lead_in, (whole,), tokens=tokens),
        "evict": BlendJob("evict", lead_in, keys=(("0" * 32, ""),)),
        "turns": BlendJob(
            "precompute", lead_in, (SentChunk(2, 90, "0" * 32, turn=True),), tokens=tokens
        ),
        "prefetch": BlendJob("prefetch", lead_in, keys=(("0" * 32, ""),)),
        "status": BlendJob("status", lead_in),
        "report": BlendJob("report", lead_in, report_id="1" * 32),
    }


@pytest.mark.parametrize("kind", ["precompute", "evict", "turns", "prefetch", "status", "report"])
def test_an_order_reads_nothing_of_others(few_blocks: InProcessEngine, kind: str) -> None:
    """Whatever goes with an order as prompt is computed, never decoded from what stood there."""
    for seed in range(4):  # others' prompts, in all blocks there are
        few_blocks.generate_full(words(700, 70 + seed), SHORT)
    order = orders_of_every_kind(few_blocks)[kind]
    prompt = tuple(make_tokenizer().encode(words(400, 90)))
    many = ResolvedSampling(max_tokens=40)
    salt = f"{SALT_PREFIX}{kind}"
    seen = logprobs(few_blocks, VLLMRequest(prompt, many, salt, order))
    assert len(seen) == (40 if kind == "report" else 2), "it ends when its order is done"
    plain = logprobs(few_blocks, VLLMRequest(prompt, many, f"plain {kind}"))
    assert seen == plain[: len(seen)]
    after = logprobs(few_blocks, VLLMRequest(prompt, many, salt))
    assert after == pytest.approx(plain, abs=1e-4), (
        "what the prefix cache keeps is the prompt's own"
    )
