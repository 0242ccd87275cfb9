"""Measures speedup and hit share over many requests that never repeat.

Chunks are drawn by Zipf's law from a store larger than its memory: the host tier holds a share of
them, the disk below it all. No two requests have the same chunks in the same order. After every
``full_every``-th request the same prompt is prefilled in full.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plans import HUNDRED, SteadyPlan
from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    draw_chunks,
    draw_ranks,
    draw_words,
    zipf_weights,
)
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt

WARM_UPS = 3
COMPUTED = "computed"


@dataclass(frozen=True)
class SteadyRow:
    """A hundred requests (fewer at the end).

    speedup: median over those that were prefilled in full, too, of full / blend seconds: the two
    runs of one prompt follow each other, so that a machine whose speed changes changes both.
    hit_share: share of the chunks that the host tier had; the disk had the others, of which
    some may have been computed (COMPUTED). full_seconds, blend_seconds: medians, of those and of
    all.
    """

    requests: int
    speedup: float
    hit_share: float
    full_seconds: float
    blend_seconds: float

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer]) -> SteadyRow:
        """Summarize the answers of one row."""
        pairs = [(a.full_seconds, a.blend_seconds) for a in answers if a.full_seconds is not None]
        tiers = [tier for one in answers for tier in one.tiers]
        return cls(
            requests=len(answers),
            speedup=median(full / blend for full, blend in pairs),
            hit_share=tiers.count("host") / len(tiers),
            full_seconds=median(full for full, _ in pairs),
            blend_seconds=median(one.blend_seconds for one in answers),
        )


@dataclass(frozen=True)
class TimedAnswer:
    """Seconds to the first token of one request; full_seconds: where it was measured, too."""

    blend_seconds: float
    full_seconds: float | None
    tiers: tuple[str, ...]


def measure_steady(plan: SteadyPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``hundreds``, a row for each hundred requests, and the parameters.

    last_over_second: the last hundred's speedup by the second's, None below three hundreds.
    """
    advance("building the model")
    shape = plan.model_shape
    model, tokenizer = shape.load(dtype=plan.torch_dtype, device=plan.torch_device)
    rng = random.Random(plan.seed)
    chunks = draw_chunks(
        rng, plan.chunks, plan.chunk_tokens, shape.vocabulary,
        selector=plan.selector, name="bench",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cacheblend-") as folder:
        store = TieredKVStore.open(host_bytes=plan.host_bytes, kv_path=Path(folder))
        engine = TransformersEngine(model, tokenizer=tokenizer, lead_in=LEAD_IN, store=store)
        advance(f"precomputing {plan.chunks} chunks")
        engine.precompute(chunks, progress=False)
        answers = list(_answers(plan, engine, chunks, rng, advance))
        stats = store.stats()
        engine.close()
    rows = [
        SteadyRow.of(answers[start : start + HUNDRED]) for start in range(0, len(answers), HUNDRED)
    ]
    return {
        "shape": plan.shape,
        "prompt_tokens": plan.prompt_tokens,
        "chunks": plan.chunks,
        "exponent": plan.exponent,
        "ratio": plan.ratio,
        "selector": plan.selector,
        "selector_options": plan.options,
        "stored_bytes": stats["disk"]["bytes"],
        "host_bytes": plan.host_bytes,
        "rejected": stats["host"]["rejected"],
        "last_over_second": rows[-1].speedup / rows[1].speedup if len(rows) > 2 else None,
        "hundreds": [asdict(row) for row in rows],
    }


def combinations(plan: SteadyPlan, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Draw the chunks of each request, by rank; no sequence is drawn twice.

    Raises ConfigError when there are hardly any left.
    """
    weights = zipf_weights(plan.chunks, plan.exponent)
    drawn = set[tuple[int, ...]]()
    for _ in range(plan.requests):
        for _ in range(1000):
            found = draw_ranks(rng, weights, plan.drawn)
            if found not in drawn:
                break
        else:
            raise ConfigError(f"requests={plan.requests} are too many for chunks={plan.chunks}")
        drawn.add(found)
        yield found


def _answers(
    plan: SteadyPlan,
    engine: TransformersEngine,
    chunks: Sequence[Chunk],
    rng: random.Random,
    advance: Advance,
) -> Iterator[TimedAnswer]:
    for number, ranks in enumerate(combinations(plan, rng)):
        question = draw_words(rng, plan.question_tokens, plan.model_shape.vocabulary)
        prompt = BlendPrompt.of(*(chunks[rank] for rank in ranks), question)
        for _ in range(WARM_UPS if not number else 0):
            engine.generate_full(prompt, ONE_TOKEN)
        advance(f"request {number + 1} of {plan.requests}")
        blended = engine.generate(prompt, ONE_TOKEN, config=plan.blend_config(plan.ratio))
        sampled = number % HUNDRED % plan.full_every == 0
        full = engine.generate_full(prompt, ONE_TOKEN) if sampled else None
        yield TimedAnswer(
            _seconds(blended), None if full is None else _seconds(full), _tiers(blended)
        )


def _seconds(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token


def _tiers(answer: Generation) -> tuple[str, ...]:
    """Return the tier of each chunk; raises CacheBlendError if one was missing.

    COMPUTED: computed from its tokens, since its tier was slower than that at the time.
    """
    for chunk in answer.report.chunks:
        if chunk.reason not in (None, "slow"):
            raise CacheBlendError(f"a chunk was missing: {chunk.reason}")
    return tuple(c.tier if c.hit and c.tier else COMPUTED for c in answer.report.chunks)
