"""A prompt as segments of text and chunks.

It is tokenized as one text; each chunk is then a run of its tokens (see ``encoder``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from cacheblend_rag.errors import PromptError
from cacheblend_rag.text.chat import RenderedChat
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import EncodedPrompt, PromptEncoder, Segment, Tokenizer

if TYPE_CHECKING:
    from cacheblend_rag.text.registry import ChunkRegistry


@dataclass(frozen=True)
class BlendPrompt:
    """A prompt cut into segments; their texts, joined, are the prompt.

    Adjacent text segments are merged and empty ones dropped on construction.

    Args:
        segments: runs of text and chunks, in order.
        is_rendered: whether a chat template rendered the text: the tokenizer then adds no BOS,
            as ``apply_chat_template`` adds none.

    Raises:
        PromptError: when a segment's text is not its chunk's.
    """

    segments: tuple[Segment, ...]
    is_rendered: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", _merge_text(self.segments))

    @classmethod
    def of(cls, *parts: str | Chunk) -> BlendPrompt:
        """Return a prompt made of explicit parts.

        Args:
            *parts: strings, which are text and not searched for chunks, and chunks.

        Raises:
            PromptError: on a part of another type.
        """
        return cls(tuple(_segment_of(part, index) for index, part in enumerate(parts)))

    @classmethod
    def from_text(
        cls,
        text: str | RenderedChat,
        registry: ChunkRegistry,
        hints: Sequence[Chunk | str] = (),
    ) -> BlendPrompt:
        """Return a text, split at the registered chunks in it.

        Args:
            text: the whole prompt, or a chat by ``render_chat``.
            registry: known chunks.
            hints: chunks, or document ids, that are expected (see ChunkRegistry.find).
        """
        if isinstance(text, RenderedChat):
            return cls(tuple(_found(text.text, text.data, registry, hints)), is_rendered=True)
        return cls(tuple(_found(text, (), registry, hints)))

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(s.text for s in self.segments)

    def encode(self, tokenizer: Tokenizer | PromptEncoder) -> EncodedPrompt:
        """Tokenize the prompt as one text, and find its chunks in the tokens.

        Args:
            tokenizer: a tokenizer, whose behaviour is then examined in each call, or a
                PromptEncoder of it, which has done so once.

        Returns:
            The prompt's token ids, and where its chunks stand in them.

        Raises:
            PromptError: when a text holds an unpaired surrogate.
        """
        encoder = tokenizer if isinstance(tokenizer, PromptEncoder) else PromptEncoder(tokenizer)
        return encoder.encode(self.segments, opens=not self.is_rendered)


def _found(
    text: str,
    data: Sequence[tuple[int, int]],
    registry: ChunkRegistry,
    hints: Sequence[Chunk | str],
) -> Iterator[Segment]:
    """Yield a text's segments: the registered chunks in it, and the text between them.

    data: (start, end) of what is data in the text, in order.
    """
    edges = list(chain.from_iterable(data))
    done = 0
    for match in registry.find(text, hints):
        yield from _between(text, done, match.start, edges)
        yield Segment(match.chunk.text, match.chunk)
        done = match.end
    yield from _between(text, done, len(text), edges)


def _between(text: str, start: int, end: int, edges: Sequence[int]) -> Iterator[Segment]:
    """Yield segments of text[start:end], cut at ``edges``: begin and end of each piece of data."""
    first = bisect_right(edges, start)
    cuts = [start, *edges[first : bisect_left(edges, end)], end]
    for index, (left, right) in enumerate(pairwise(cuts), first):
        yield Segment(text[left:right], is_data=index % 2 == 1)


def _segment_of(part: str | Chunk, index: int) -> Segment:
    if isinstance(part, Chunk):
        return Segment(part.text, part)
    if isinstance(part, str):
        return Segment(part)
    raise PromptError(f"part {index} of a prompt must be a str or a Chunk, not {part!r:.40}")


def _merge_text(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for found in segments:
        last = merged[-1] if merged else None
        alike = last and found.chunk is last.chunk is None and found.is_data == last.is_data
        if last and alike:
            merged[-1] = replace(last, text=last.text + found.text)
        elif found.text:
            if found.chunk is not None and found.chunk.text != found.text:
                raise PromptError(
                    f"segment {found.text[:20]!r} differs from its chunk's text: pass "
                    "Segment(text) without a chunk"
                )
            merged.append(found)
    return tuple(merged)
