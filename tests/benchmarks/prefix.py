"""`python -m tests.benchmarks.prefix`: first tokens of prompts that begin alike.

Each prompt begins with the same instruction; the question, and the order of the chunks, are new in
every turn. Prompts are asked in turn with and without reuse of what earlier ones began with.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.plan import option
from cacheblend_rag.bench.plans import BlendPlan
from cacheblend_rag.bench.workload import LEAD_IN, ONE_TOKEN, draw_chunks, draw_words
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app


@dataclass(frozen=True, kw_only=True)
class PrefixPlan(BlendPlan):
    """Time to first token after an instruction that earlier prompts had, without and with chunks.

    Against computing the instruction anew, and against full prefill of the prompt with chunks.
    """

    instruction_tokens: int = option(
        1024, "Tokens before the first chunk, or the question.", least=128
    )
    chunks: int = option(4, "Chunks in the prompt.", least=1)
    ratio: float = option(0.15, "Recompute ratio.")
    repeat: int = option(5, "Timed runs each; medians are shown.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blend_config(self.ratio)
        if self.prompt_tokens >= self.model_shape.max_positions:
            raise ConfigError(
                f"a prompt of {self.prompt_tokens} tokens must be shorter than "
                f"{self.model_shape.max_positions}, the positions of {self.model_shape.name}"
            )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt with chunks."""
        chunks = self.chunks * self.chunk_tokens
        return self.instruction_tokens + chunks + self.question_tokens


@dataclass(frozen=True)
class _Prompts:
    """Makes the prompts of each turn."""

    plan: PrefixPlan
    engine: TransformersEngine
    instruction: str
    chunks: list[Chunk]

    def ask(self, name: str, turn: int, *, chunks: bool, reuses: bool, full: bool = False) -> float:
        """Return the seconds to the first token; what turn 0 began with is stored afterwards."""
        draw = random.Random(f"{name} {turn}")
        shuffled = draw.sample(self.chunks, len(self.chunks)) if chunks else []
        question = draw_words(draw, self.plan.question_tokens, self.plan.model_shape.vocabulary)
        prompt = BlendPrompt.of(self.instruction, *shuffled, question)
        if full:
            report = self.engine.generate_full(prompt, ONE_TOKEN).report
        else:
            config = self.plan.blend_config(self.plan.ratio).with_changes(
                cost_model=False, reuse_prefix=reuses
            )
            report = self.engine.generate(prompt, ONE_TOKEN, config=config).report
        self.engine.prefixes.drain()
        if turn and bool(report.prefix_tokens) != reuses:
            raise ConfigError(f"{report.prefix_tokens} tokens were reused as a prefix in {name}")
        return report.seconds.time_to_first_token - report.seconds.find - report.seconds.tokenize


def measure_prefix(plan: PrefixPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return median seconds of each case, the speedups by reuse, and the parameters."""
    advance("building the model")
    shape, draw = plan.model_shape, random.Random(1)
    model, tokenizer = shape.load(dtype=plan.torch_dtype, device=plan.torch_device)
    engine = TransformersEngine(model, tokenizer=tokenizer, lead_in=LEAD_IN)
    with closing(engine):
        chunks = draw_chunks(
            draw, plan.chunks, plan.chunk_tokens, shape.vocabulary,
            selector=plan.selector, name="bench",
        )  # fmt: skip
        advance(f"precomputing {plan.chunks} chunks")
        engine.precompute(chunks, progress=False)
        instruction = draw_words(draw, plan.instruction_tokens, shape.vocabulary)
        ask = _Prompts(plan, engine, instruction, chunks).ask
        cases: dict[str, Case] = {
            "question": partial(ask, "question", chunks=False, reuses=False),
            "question, prefix": partial(ask, "question, prefix", chunks=False, reuses=True),
            "full prefill": partial(ask, "full prefill", chunks=True, reuses=False, full=True),
            "blend": partial(ask, "blend", chunks=True, reuses=False),
            "blend, prefix": partial(ask, "blend, prefix", chunks=True, reuses=True),
        }
        runs = run_in_turns(cases, plan.repeat, advance)
    seconds = {name: median(taken) for name, taken in runs.items()}
    return {
        "shape": plan.shape,
        "instruction_tokens": plan.instruction_tokens,
        "prompt_tokens": plan.prompt_tokens,
        "ratio": plan.ratio,
        **{f"{name} seconds": taken for name, taken in seconds.items()},
        "question speedup": _speedup(runs, "question", "question, prefix"),
        "blend speedup": _speedup(runs, "blend", "blend, prefix"),
        "speedup over full prefill": _speedup(runs, "full prefill", "blend, prefix"),
        "runs": runs,
    }


def _speedup(runs: dict[str, list[float]], slow: str, fast: str) -> float:
    return median(one / other for one, other in zip(runs[slow], runs[fast], strict=True))


app = benchmark_app(PrefixPlan, measure_prefix, facts("prompts that begin alike"))

if __name__ == "__main__":
    app()
