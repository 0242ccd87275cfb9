"""How long the chunk registry takes to find a prompt's chunks among many."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from time import perf_counter

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.registry import ChunkRegistry
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.quantiles import p95

SEED = 20260101
CHUNKS_IN_PROMPT = 8
CHUNK_CHARACTERS = (400, 2400)
MEAN_WORD_CHARACTERS = 6


@dataclass(frozen=True, kw_only=True)
class RegistryPlan(Plan):
    """Time to find registered chunks in a prompt's text; the same plan gives the same text.

    Chunks have 400 to 2,400 characters. Each prompt holds 8 of them (fewer where they do not fit)
    between unregistered text; each turn has another prompt.
    """

    chunks: int = option(100_000, "Registered chunks.", least=1)
    prompt_characters: int = option(20_000, "Length of the prompt.", least=1)
    repeat: int = option(200, "Timed runs.", least=1)


def measure_registry(plan: RegistryPlan, _: Advance = lambda _: None) -> dict[str, object]:
    """Time ChunkRegistry.find on generated text.

    Returns chunks, prompt_characters, median_seconds and p95_seconds of one search, found and
    expected (chunks over all prompts), add_seconds (registering all).
    """
    chunks, prompt_characters, repeat = plan.chunks, plan.prompt_characters, plan.repeat
    writer = _Writer(random.Random(SEED))
    texts = [writer.text(writer.rng.randint(*CHUNK_CHARACTERS)) for _ in range(chunks)]
    registry = ChunkRegistry()
    start = perf_counter()
    registry.add_many(Chunk(text) for text in texts)
    add_seconds = perf_counter() - start

    searches = [_search(registry, writer.prompt(texts, prompt_characters)) for _ in range(repeat)]
    seconds = [search.seconds for search in searches]
    return {
        "chunks": chunks,
        "prompt_characters": prompt_characters,
        "median_seconds": statistics.median(seconds),
        "p95_seconds": p95(seconds),
        "found": sum(search.found for search in searches),
        "expected": sum(search.expected for search in searches),
        "add_seconds": add_seconds,
    }


@dataclass(frozen=True)
class _Prompt:
    text: str
    chunk_texts: tuple[str, ...]


@dataclass(frozen=True)
class _Search:
    seconds: float
    found: int
    expected: int


def _search(registry: ChunkRegistry, prompt: _Prompt) -> _Search:
    start = perf_counter()
    matches = registry.find(prompt.text)
    seconds = perf_counter() - start
    right = sum(m.chunk.text == t for m, t in zip(matches, prompt.chunk_texts, strict=False))
    return _Search(seconds, right, len(prompt.chunk_texts))


class _Writer:
    """Writes text of made-up words."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._words = [
            "".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9))) for _ in range(5000)
        ]

    def text(self, characters: int) -> str:
        words = self.rng.choices(self._words, k=characters // MEAN_WORD_CHARACTERS + 1)
        return " ".join(words)[:characters].strip()

    def prompt(self, texts: list[str], characters: int) -> _Prompt:
        held: list[str] = []
        room = characters
        for text in self.rng.sample(texts, min(CHUNKS_IN_PROMPT, len(texts))):
            if len(text) + 2 <= room:
                held.append(text)
                room -= len(text) + 2
        parts = [text + "\n\n" for text in held]
        return _Prompt("".join(parts) + self.text(room).ljust(room, "?"), tuple(held))


app = benchmark_app(RegistryPlan, measure_registry, facts("chunk registry"))

if __name__ == "__main__":
    app()
