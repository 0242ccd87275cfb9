"""`python -m tests.benchmarks.decode`: decoding, by the engine and by transformers' `generate`.

Both decode the same number of greedy tokens behind the same prompt, in turn in one run; what is
compared is the time from the first token to the last, so that prefill does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cacheblend_rag import BlendConfig, SamplingParams, TransformersEngine
from cacheblend_rag.bench.interleave import run_in_turns

WORDS = "The lighthouse at Vell was built in 1821 by a widow who had lost two ships at sea. "


@dataclass
class Stamps:
    """When each token came; transformers' streamer, which is handed the prompt first."""

    clock: Callable[[], float]
    at: list[float] = field(default_factory=list)

    def put(self, _: Any) -> None:
        """Note a token."""
        self.at.append(self.clock())

    def end(self) -> None:
        """Nothing is held back."""


def by_engine(engine: TransformersEngine, prompt: str, tokens: int, stamps: Stamps) -> None:
    """Decode, and turn tokens into text; a piece of text is a token here."""
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
    )
    for _ in engine.stream(prompt, sampling):
        stamps.put(None)


def by_generate(engine: TransformersEngine, prompt: str, tokens: int, stamps: Stamps) -> None:
    """Decode; no text is made."""
    ids = torch.tensor([engine.tokenizer.encode(prompt)], device=engine.model.device)
    engine.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=stamps,
    )
    del stamps.at[0]


CASES = {"engine": by_engine, "generate": by_generate}


def seconds_a_token(
    case: Callable[..., None], clock: Callable[[], float], tokens: int, engine: Any, prompt: str
) -> float:
    """Return seconds from the first token to the last, a token."""
    stamps = Stamps(clock)
    case(engine, prompt, tokens, stamps)
    return (stamps.at[-1] - stamps.at[0]) / (tokens - 1)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this process: for busy machines"
    )
    asked = parser.parse_args()
    config = BlendConfig(reuse_prefix=False)  # storing prompts would take time meanwhile
    engine = TransformersEngine(asked.model, dtype=asked.dtype, config=config)
    if engine.blend_refusal is not None:
        sys.exit(f"blending is off: {engine.blend_refusal}")
    each = len(engine.tokenizer.encode(WORDS, add_special_tokens=False))
    prompt = (engine.tokenizer.bos_token or "") + WORDS * max(1, asked.prompt_tokens // each)
    clock = time.process_time if asked.cpu_time else time.perf_counter
    cases: dict[str, Callable[[int], float]] = {
        name: lambda _, case=case: seconds_a_token(case, clock, asked.tokens, engine, prompt)
        for name, case in CASES.items()
    }
    seconds = run_in_turns(cases, asked.repeat, lambda _: None)
    ours, theirs = (statistics.median(seconds[name]) for name in CASES)
    ratios = [a / b for a, b in zip(seconds["engine"], seconds["generate"], strict=True)]
    print(f"{engine.model_name}, {asked.dtype}, {asked.prompt_tokens} tokens of prompt: seconds")
    print(f"a token, engine {ours:.4f}, generate {theirs:.4f}, ratio in each turn", end=" ")
    print(
        ", ".join(f"{ratio:.2f}" for ratio in ratios), f"(median {statistics.median(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
