"""Segment and BlendPrompt: a prompt as runs of text and chunks, and its token ids and spans."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.chunks import Chunk


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a prompt: ``chunk`` is None for text (instructions, separators, question)."""

    text: str
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Tokens [start, end) of an encoded prompt hold ``chunk``."""

    chunk: Chunk
    start: int
    end: int


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids and where its chunks stand."""

    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]


@dataclass(frozen=True)
class BlendPrompt:
    """A prompt cut into segments; their texts, joined, are the prompt."""

    segments: tuple[Segment, ...]
