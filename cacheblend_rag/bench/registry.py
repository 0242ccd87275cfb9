"""How long the chunk registry takes to find a prompt's chunks among many: ``bench registry``."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from time import perf_counter

from cacheblend_rag.bench.interleave import p95
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.registry import ChunkRegistry

SEED = 20260101
CHUNKS_IN_PROMPT = 8
CHUNK_CHARACTERS = (400, 2400)
MEAN_WORD_CHARACTERS = 6


def measure_registry(chunks: int, prompt_characters: int, repeat: int) -> dict[str, object]:
    """Time ChunkRegistry.find on generated text; the same arguments give the same text.

    chunks: registered chunks of 400 to 2,400 characters. prompt_characters: length of each prompt,
    which holds 8 of the chunks (fewer where they do not fit) between unregistered text. repeat:
    prompts searched, each another.

    Returns chunks, prompt_characters, median_seconds and p95_seconds of one search, found and
    expected (chunks over all prompts), add_seconds (registering all). Raises ConfigError when an
    argument is below 1.
    """
    for name, value in (
        ("chunks", chunks),
        ("prompt_characters", prompt_characters),
        ("repeat", repeat),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
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
