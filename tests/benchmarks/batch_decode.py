"""`python -m tests.benchmarks.batch_decode`: several answers together, and one after another.

Each prompt has chunks of its own, which are stored. Answers have a fixed number of greedy tokens.
Cases are run in turn: one prompt alone, all of them one after another, in one `generate_batch`, and
each in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from statistics import median
from typing import Any

from cacheblend_rag import BlendConfig, SamplingParams, TransformersEngine
from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app

SENTENCE = "In {year}, the keeper of lighthouse {number} at Vell wrote down {ships} ships at sea. "
QUESTION = "Which of these lighthouses saw the most ships, and in which year was that? Explain."
ONE, IN_TURN, BATCH, THREADS = "one", "one after another", "batch", "threads"


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """Time of several answers together, over that of one, and against one after another."""

    model: str = option("smollm2", "Model name, folder or GGUF file.")
    dtype: str = option("float32", "float32, bfloat16 or float16.")
    prompts: int = option(8, "Prompts.", least=2)
    chunks: int = option(4, "Chunks in each.", least=1)
    chunk_tokens: int = option(144, "Least tokens of a chunk.", least=1)
    answer_tokens: int = option(128, "Tokens of each answer.", least=2)
    repeat: int = option(3, "Timed runs each; medians are shown.", least=1)


@dataclass(frozen=True)
class _Prompts:
    """Answers the prompts in each of the ways, and keeps the tokens of the latest answers."""

    engine: TransformersEngine
    prompts: Sequence[BlendPrompt]
    sampling: SamplingParams
    found: dict[str, list[tuple[int, ...]]]

    def case(self, name: str, answer: Callable[[int], Sequence[Generation]]) -> Case:
        """Return the case of that name; answer: takes the number of the turn."""

        def run(turn: int) -> float:
            began = time.perf_counter()
            answers = answer(turn)
            seconds = time.perf_counter() - began
            for one in answers:
                if not one.report.blended or one.report.reused_tokens == 0:
                    raise ConfigError(f"a prompt was not blended: {one.report.reason}")
            self.found[name] = [one.token_ids for one in answers]
            return seconds

        return run

    def one(self, turn: int) -> Sequence[Generation]:
        """Answer one of the prompts, another one in each turn."""
        return [self._answer(self.prompts[turn % len(self.prompts)])]

    def in_turn(self, _: int) -> Sequence[Generation]:
        """Answer one after another."""
        return [self._answer(prompt) for prompt in self.prompts]

    def batch(self, _: int) -> Sequence[Generation]:
        """Answer all by ``generate_batch``."""
        return self.engine.generate_batch(self.prompts, self.sampling)

    def threads(self, _: int) -> Sequence[Generation]:
        """Answer each in a thread of its own."""
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            return list(pool.map(self._answer, self.prompts))

    def _answer(self, prompt: BlendPrompt) -> Generation:
        return self.engine.generate(prompt, self.sampling)


def measure_batch(plan: BatchPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return median seconds of each case, and their ratios in the same turn."""
    advance("loading the model")
    config = BlendConfig(
        selector="none", recompute_ratio=0.0, min_tokens=0, cost_model=False, reuse_prefix=False
    )
    engine = TransformersEngine(plan.model, dtype=plan.dtype, config=config)
    with closing(engine):
        if engine.blend_refusal is not None:
            raise ConfigError(f"blending is off: {engine.blend_refusal}")
        texts = [_chunks(plan, engine, number) for number in range(plan.prompts)]
        advance(f"precomputing {plan.prompts * plan.chunks} chunks")
        engine.precompute([chunk for chunks in texts for chunk in chunks], progress=False)
        prompts = [_prompt(chunks) for chunks in texts]
        sampling = SamplingParams.greedy(max_tokens=plan.answer_tokens, ignore_eos=True)
        asked = _Prompts(engine, prompts, sampling, {})
        cases = {
            ONE: asked.case(ONE, asked.one),
            IN_TURN: asked.case(IN_TURN, asked.in_turn),
            BATCH: asked.case(BATCH, asked.batch),
            THREADS: asked.case(THREADS, asked.threads),
        }
        runs = run_in_turns(cases, plan.repeat, advance)
        tokens = len(engine.prepare(prompts[0]).token_ids)
    return {
        "model": engine.model_name,
        "dtype": plan.dtype,
        "prompts": plan.prompts,
        "prompt_tokens": tokens,
        "answer_tokens": plan.answer_tokens,
        **{f"{name} seconds": median(seconds) for name, seconds in runs.items()},
        **{f"{name} over one": _ratio(runs, name, ONE) for name in (IN_TURN, BATCH, THREADS)},
        "speedup of batch": _ratio(runs, IN_TURN, BATCH),
        "speedup of threads": _ratio(runs, IN_TURN, THREADS),
        **{
            f"same answers by {name}": sum(map(eq, asked.found[name], asked.found[IN_TURN]))
            for name in (BATCH, THREADS)
        },
        "runs": runs,
    }


def _prompt(chunks: Sequence[Chunk]) -> BlendPrompt:
    return BlendPrompt.of(*(part for chunk in chunks for part in (chunk, "\n\n")), QUESTION)


def _chunks(plan: BatchPlan, engine: TransformersEngine, prompt: int) -> list[Chunk]:
    """Return chunks of a few sentences, of which no two are alike."""
    chunks: list[Chunk] = []
    for number in range(plan.chunks):
        text, year = "", 1800
        while len(engine.tokenize(text)) < plan.chunk_tokens:
            year += 1
            lighthouse = prompt * plan.chunks + number
            ships = (year * 7 + lighthouse * 31) % 97
            text += SENTENCE.format(year=year, number=lighthouse, ships=ships)
        chunks.append(Chunk(text.strip()))
    return chunks


def _ratio(runs: dict[str, list[float]], slow: str, fast: str) -> float:
    return median(one / other for one, other in zip(runs[slow], runs[fast], strict=True))


app = benchmark_app(BatchPlan, measure_batch, facts("answers decoded together"))

if __name__ == "__main__":
    app()
