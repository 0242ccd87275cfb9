"""Speedup and hit share of many requests that never repeat, from a store larger than memory.

Chunks are drawn by Zipf's law: the host tier holds a share of them, the disk below it all. No two
requests have the same chunks in the same order. After each one the same prompt is prefilled in
full, so that a machine whose speed changes changes both.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from cacheblend_rag import BlendConfig
from cacheblend_rag.bench.workload import LEAD_IN, ONE_TOKEN, draw_ranks, zipf_weights
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.loading import named_dtype
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import run, say
from tests.benchmarks.shapes import draw_chunks, draw_words, named_shape

HUNDRED = 100
WARM_UPS = 3


def measure(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    device: str = "cpu",
    requests: int = 1000,
    chunks: int = 200,
    drawn: int = 4,
    chunk_tokens: int = 96,
    question_tokens: int = 16,
    held: float = 0.25,
    selector: str = "hkvd",
    ratio: float = 0.15,
    seed: int = 7,
) -> dict[str, Any]:
    """Return ``hundreds``, a row for each hundred requests, and the parameters.

    speedup: the median of full / blend seconds. hit_share: of the chunks that memory had, the disk
    had the others. last_over_second: the last hundred's speedup by the second's.
    """
    dimensions, rng = named_shape(shape), random.Random(seed)
    precision = named_dtype(dtype)
    model = dimensions.build_model(dtype=precision, device=device)
    known = draw_chunks(
        rng, chunks, chunk_tokens, dimensions.vocabulary, selector=selector, name="bench"
    )
    room = dimensions.kv_bytes(chunk_tokens, precision) * round(held * chunks)
    config = BlendConfig(recompute_ratio=ratio, selector=selector, min_tokens=0, reuse_prefix=False)
    answers: list[tuple[float, float, list[str]]] = []
    with tempfile.TemporaryDirectory(prefix="cacheblend-") as folder:
        store = TieredKVStore.open(host_bytes=room, kv_path=Path(folder))
        engine = TransformersEngine(
            model, tokenizer=dimensions.build_tokenizer(), lead_in=LEAD_IN, store=store
        )
        with closing(engine):
            engine.precompute(known, progress=False)
            for ranks in combinations(rng, requests, chunks, drawn):
                question = draw_words(rng, question_tokens, dimensions.vocabulary)
                prompt = BlendPrompt.of(*(known[rank] for rank in ranks), question)
                for _ in range(0 if answers else WARM_UPS):
                    engine.generate_full(prompt, ONE_TOKEN)
                blend = engine.generate(prompt, ONE_TOKEN, config=config)
                full = engine.generate_full(prompt, ONE_TOKEN)
                answers.append((_seconds(blend), _seconds(full), _tiers(blend)))
                if len(answers) % HUNDRED == 0:
                    say(f"{len(answers)} of {requests}")
            stored = store.stats()["disk"]["bytes"]
    rows = [_row(answers[at : at + HUNDRED]) for at in range(0, len(answers), HUNDRED)]
    return {
        "shape": shape,
        "prompt_tokens": drawn * chunk_tokens + question_tokens,
        "chunks": chunks,
        "ratio": ratio,
        "selector": selector,
        "stored_bytes": stored,
        "host_bytes": room,
        "last_over_second": rows[-1]["speedup"] / rows[1]["speedup"] if len(rows) > 2 else None,
        "hundreds": rows,
    }


def combinations(
    rng: random.Random, requests: int, chunks: int, drawn: int
) -> Iterator[tuple[int, ...]]:
    """Draw the chunks of each request, by rank; no sequence is drawn twice."""
    weights, seen = zipf_weights(chunks, 1.0), set[tuple[int, ...]]()
    for _ in range(requests):
        for _ in range(1000):
            found = draw_ranks(rng, weights, drawn)
            if found not in seen:
                break
        else:
            raise ConfigError(f"requests={requests} are too many for chunks={chunks}")
        seen.add(found)
        yield found


def _row(answers: Sequence[tuple[float, float, list[str]]]) -> dict[str, Any]:
    tiers = [tier for *_, found in answers for tier in found]
    return {
        "requests": len(answers),
        "speedup": median(full / blend for blend, full, _ in answers),
        "hit_share": tiers.count("host") / len(tiers),
        "full_seconds": median(full for _, full, _ in answers),
        "blend_seconds": median(blend for blend, *_ in answers),
    }


def _seconds(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token


def _tiers(answer: Generation) -> list[str]:
    """Return the tier of each chunk, or ``computed`` if its tier was slower than that."""
    for chunk in answer.report.chunks:
        if chunk.reason not in (None, "slow"):
            raise CacheBlendError(f"a chunk was missing: {chunk.reason}")
    return [c.tier if c.hit and c.tier else "computed" for c in answer.report.chunks]


if __name__ == "__main__":
    run(measure)
