"""A prompt as segments of text and chunks, its token ids, and the spans of its chunks.

A prompt is tokenized as one text; each chunk is then a run of its tokens (see ``encoder``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from cacheblend_rag.errors import PromptError
from cacheblend_rag.text.chat import ChatPrompt, RenderedChat, render_chat
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder, Tokenizer
from cacheblend_rag.text.tools import Message

if TYPE_CHECKING:
    from cacheblend_rag.text.registry import ChunkRegistry


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a prompt.

    Args:
        text: its characters.
        chunk: the chunk with this text, None for other text (instructions, separators, question).
        is_data: whether text that is no chunk is data as well, such as a tool's result: what looks
            like a special token in it is text.
    """

    text: str
    chunk: Chunk | None = None
    is_data: bool = False


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Tokens [start, end) of an encoded prompt are tokens of ``chunk``.

    before, after: how many tokens of the chunk are missing at its edges, because the tokenizer
    joins its text with the text beside it.
    """

    chunk: Chunk
    start: int
    end: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids and the spans of its chunks, in order.

    inseparable: chunks with hardly any of their own tokens in the prompt, because the tokenizer
    joins them with the text beside them.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]
    inseparable: tuple[Chunk, ...] = ()


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
        cls, text: str, registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
    ) -> BlendPrompt:
        """Return ``text``, split at the registered chunks in it.

        Args:
            text: the whole prompt.
            registry: known chunks.
            hints: chunks, or document ids, that are expected (see ChunkRegistry.find).
        """
        return cls(segment(text, registry, hints))

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Message] | ChatPrompt,
        registry: ChunkRegistry,
        tokenizer: Tokenizer,
        hints: Sequence[Chunk | str] = (),
        add_generation_prompt: bool = True,
    ) -> BlendPrompt:
        """Return chat messages as the tokenizer's template renders them, split at known chunks.

        Args:
            messages: the chat so far.
            registry: known chunks.
            tokenizer: the one whose chat template is used.
            hints: chunks, or document ids, that are expected (see ChunkRegistry.find).
            add_generation_prompt: whether the prompt ends where the answer begins.

        Raises:
            PromptError: when a message is malformed, the tokenizer has no chat template, or the
                template refuses the messages.
        """
        chat = messages if isinstance(messages, ChatPrompt) else ChatPrompt(messages)
        rendered = render_chat(chat, tokenizer, add_generation_prompt)
        return cls.from_rendered(rendered, registry, hints)

    @classmethod
    def from_rendered(
        cls, rendered: RenderedChat, registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
    ) -> BlendPrompt:
        """Return a rendered chat, split at the registered chunks in it.

        Args:
            rendered: the chat, by ``render_chat``.
            registry: known chunks.
            hints: chunks, or document ids, that are expected (see ChunkRegistry.find).
        """
        found = segment(rendered.text, registry, hints)
        return cls(tuple(_told_apart(found, rendered.data)), is_rendered=True)

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
            The tokens, and the spans of chunks. A chunk without tokens (its characters are
            normalized away) gets no span.

        Raises:
            PromptError: when a text holds an unpaired surrogate.
        """
        encoder = tokenizer if isinstance(tokenizer, PromptEncoder) else PromptEncoder(tokenizer)
        parts = [(s.text, s.chunk is not None or s.is_data) for s in self.segments]
        done = encoder.encode(parts, opens=not self.is_rendered)
        spans: list[ChunkSpan] = []
        inseparable: list[Chunk] = []
        for part, own, run in zip(self.segments, done.alone, done.runs, strict=False):
            if part.chunk is None or not own:
                continue
            if run is None:
                inseparable.append(part.chunk)
            else:
                before, after = own[: run.skip], own[run.skip + run.tokens :]
                span = ChunkSpan(part.chunk, run.start, run.end, tuple(before), tuple(after))
                spans.append(span)
        return EncodedPrompt(done.token_ids, tuple(spans), tuple(inseparable))


def segment(
    text: str, registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
) -> tuple[Segment, ...]:
    """Split ``text`` at the registered chunks in it; the segments' texts, joined, are ``text``."""
    segments: list[Segment] = []
    done = 0
    for match in registry.find(text, hints):
        if done < match.start:
            segments.append(Segment(text[done : match.start]))
        segments.append(Segment(match.chunk.text, match.chunk))
        done = match.end
    if done < len(text):
        segments.append(Segment(text[done:]))
    return tuple(segments)


def _told_apart(segments: Iterable[Segment], data: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    """Yield a text's segments, cut where data begins and ends; data: (start, end), in order."""
    edges = [edge for span in data for edge in span]
    start = 0
    for found in segments:
        end = start + len(found.text)
        if found.chunk is not None:
            yield found
        else:
            first = bisect_right(edges, start)
            cuts = [start, *edges[first : bisect_left(edges, end)], end]
            for i, (left, right) in enumerate(pairwise(cuts)):
                text = found.text[left - start : right - start]
                yield Segment(text, is_data=(first + i) % 2 == 1)
        start = end


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
            merged.append(_checked(found))
    return tuple(merged)


def _checked(found: Segment) -> Segment:
    if found.chunk is not None and found.chunk.text != found.text:
        raise PromptError(
            f"segment {found.text[:20]!r} differs from its chunk's text; make it a text segment"
        )
    return found
