"""Time to first token in each turn of a conversation, and how near the answers are.

Each turn has new passages, cut out of real ones, which stay in the prompt in their turn. The same
prompts are answered with all that is kept (passages' chunk KV, and the KV of earlier turns), by
prefix caching alone, and by full prefill.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, Conversation, SamplingParams
from cacheblend_rag.bench.workload import ONE_TOKEN, draw_real_texts
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.comparing import divergence
from cacheblend_rag.rag.conversation import Answered
from cacheblend_rag.text.chat import InstructedChat
from cacheblend_rag.text.encoder import Segment
from tests.benchmarks.command import run, say

INSTRUCTION = "Answer each question from the passages above it. Be brief."
CONFIG = BlendConfig(cost_model=False)
"""What is stored is reused, however long that takes."""
PREFIX_BYTES = 2 << 30


def measure(
    *,
    model: str = "smollm2",
    turns: int = 12,
    passages: int = 4,
    passage_tokens: int = 300,
    answer_tokens: int = 48,
    prompt_tokens: int = 6000,
    skip_undropped: bool = False,
    seed: int = 7,
) -> dict[str, Any]:
    """Return ``turns``, a row for each, with the oldest turns dropped beyond ``prompt_tokens``.

    nothing_dropped: the first turns, as many as the context window holds, without that limit.
    mean_kl: over the answer's tokens, of predictions from full prefill's, in nats.
    """
    rng = random.Random(seed)
    with ExitStack() as stack:
        engine = TransformersEngine(
            model,
            config=CONFIG,
            store=TieredKVStore.open(host_bytes=None),
            instruction=lambda tokenizer: InstructedChat(tokenizer, INSTRUCTION).lead_in,
        )
        stack.callback(engine.close)
        chunks = draw_real_texts(
            rng, engine.encoder, chunks=turns * passages, chunk_tokens=passage_tokens,
            question_tokens=8, selector="none", name="bench",
        ).chunks  # fmt: skip
        engine.precompute(chunks, progress=False)
        asked = [
            (rng.choice(load_passages().questions).question, chunks[at : at + passages])
            for at in range(0, len(chunks), passages)
        ]
        sampling = SamplingParams.greedy(answer_tokens, ignore_eos=True)
        rows = list(_rows(engine, asked, sampling, prompt_tokens))
        whole = [] if skip_undropped else list(_rows(engine, asked, sampling, None))
    return {
        "model": model,
        "passages": passages,
        "passage_tokens": passage_tokens,
        "answer_tokens": answer_tokens,
        "prompt_tokens": prompt_tokens,
        "turns": rows,
        "nothing_dropped": whole,
    }


def _rows(
    engine: TransformersEngine,
    asked: Sequence[tuple[str, Sequence[Chunk]]],
    sampling: SamplingParams,
    prompt_tokens: int | None,
) -> Iterator[dict[str, Any]]:
    """Yield a row a turn; without a limit it ends when a turn is dropped."""
    talk = Conversation(
        engine, instruction=INSTRUCTION, sampling=sampling, prompt_tokens=prompt_tokens,
        most_turns=len(asked),
    )  # fmt: skip
    prefix = TransformersEngine(
        engine.model, tokenizer=engine.tokenizer, config=CONFIG,
        store=TieredKVStore.open(host_bytes=PREFIX_BYTES),
    )  # fmt: skip
    with closing(prefix):
        for turn, (question, passages) in enumerate(asked, 1):
            say(f"turn {turn} of {len(asked)}")
            talk.ask(question, passages)
            assert talk.last is not None
            if prompt_tokens is None and len(talk.last.fitted.turns) < turn:
                return
            yield {"turn": turn, **_row(engine, prefix, talk.last)}
            talk.kv.to_plain()  # waits until the turn is stored


def _row(
    engine: TransformersEngine, prefix: TransformersEngine, answered: Answered
) -> dict[str, Any]:
    answer, prepared = answered.answer, answered.fitted.prepared
    source = prepared.source.prompt
    parts = [
        replace(p, chunk=None, is_data=p.is_data or p.chunk is not None) for p in source.segments
    ]
    plain = BlendPrompt(tuple(parts), is_rendered=source.is_rendered)
    cached = prefix.generate(plain, ONE_TOKEN)
    full = prefix.score(plain, answer.token_ids, full=True)
    near = engine.score(prepared, answer.token_ids)
    ours, theirs, whole = _seconds(answer), _seconds(cached), _seconds(full)
    told = Segment(answer.text, is_data=True)  # prefix caching sees the answer as its own
    prefix.generate(BlendPrompt((*parts, told), is_rendered=source.is_rendered), ONE_TOKEN)
    prefix.prefixes.drain()
    hits = sum(chunk.tokens for chunk in answer.report.chunks if chunk.hit)
    return {
        "full_seconds": whole,
        "prefix_seconds": theirs,
        "ours_seconds": ours,
        "mean_kl": divergence(full.log_probs.double(), near.log_probs.double()),
        "full_over_ours": whole / ours,
        "prefix_over_ours": theirs / ours,
        "prompt_tokens": answer.prompt_tokens,
        "earlier_turns": len(answered.fitted.turns) - 1,
        "passage_tokens": hits - answered.turn_tokens,
        "turn_tokens": answered.turn_tokens,
        "prefix_tokens": cached.report.prefix_tokens,
    }


def _seconds(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token


if __name__ == "__main__":
    run(measure)
