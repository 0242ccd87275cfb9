"""Segment and BlendPrompt: a prompt as runs of text and chunks, and its token ids and spans.

Each segment is tokenized by itself, so a chunk's tokens in a prompt are those its KV was computed
from, whatever stands around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from cacheblend_rag.chunks import Chunk, ChunkRegistry
from cacheblend_rag.errors import PromptError

Message = Mapping[str, Any]

PROBE = "a"


class Tokenizer(Protocol):
    """What a prompt asks of a tokenizer; every Hugging Face tokenizer offers it."""

    @property
    def chat_template(self) -> Any:
        """The Jinja template (or templates by name) that renders messages; None without one."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Return token ids; ``verbose`` warns when there are more than the model takes."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the rendered messages, a str when ``tokenize`` is False."""


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
    """A prompt's token ids and where its chunks stand, in order."""

    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]


@dataclass(frozen=True)
class BlendPrompt:
    """A prompt cut into segments; their texts, joined, are the prompt.

    Adjacent text segments are merged and empty ones dropped on construction, since where text is
    cut changes its tokens. Raises PromptError when a segment's text is not its chunk's.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", _merge_text(self.segments))

    @classmethod
    def of(cls, *parts: str | Chunk) -> BlendPrompt:
        """Make a prompt of explicit parts: strings are text, chunks are chunks.

        Strings are not searched for chunks. Raises PromptError on a part of another type.
        """
        return cls(tuple(_segment_of(part, index) for index, part in enumerate(parts)))

    @classmethod
    def from_text(
        cls, text: str, registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
    ) -> BlendPrompt:
        """Cut ``text`` at the registered chunks that stand in it (see ChunkRegistry.find)."""
        return cls(segment(text, registry, hints))

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Message],
        registry: ChunkRegistry,
        tokenizer: Tokenizer,
        hints: Sequence[Chunk | str] = (),
        add_generation_prompt: bool = True,
    ) -> BlendPrompt:
        """Render chat messages with the tokenizer's template and cut the result at known chunks.

        Raises PromptError when a message is malformed, the tokenizer has no chat template, or the
        template refuses the messages.
        """
        text = render_messages(messages, tokenizer, add_generation_prompt)
        return cls.from_text(text, registry, hints)

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(s.text for s in self.segments)

    def encode(self, tokenizer: Tokenizer) -> EncodedPrompt:
        """Tokenize each segment by itself, behind what the tokenizer puts before any prompt (BOS).

        The BOS token is not added when the text brings it along, as rendered chat messages do. A
        chunk that yields no token (its characters normalized away) gets no span. Raises PromptError
        when a text holds an unpaired surrogate.
        """
        pieces = [(s.chunk, tokenize_chunk(tokenizer, s.text)) for s in self.segments]
        opening = opening_tokens(tokenizer)
        first = next((ids for _, ids in pieces if ids), ())
        token_ids = [] if first[: len(opening)] == opening else list(opening)
        spans: list[ChunkSpan] = []
        for chunk, ids in pieces:
            if chunk is not None and ids:
                spans.append(ChunkSpan(chunk, len(token_ids), len(token_ids) + len(ids)))
            token_ids += ids
        return EncodedPrompt(tuple(token_ids), tuple(spans))


def segment(
    text: str, registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
) -> tuple[Segment, ...]:
    """Cut ``text`` at the registered chunks in it; the segments' texts, joined, are ``text``."""
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


def tokenize_chunk(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of one segment, alone and without special tokens around it.

    Raises PromptError when ``text`` holds an unpaired surrogate, which no tokenizer can encode.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} of {text[:20]!r}... is an unpaired surrogate; decode the "
            "source with errors='replace'"
        ) from error
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def opening_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return what the tokenizer puts before a plain prompt: the BOS token, or nothing.

    Some tokenizers put several tokens there, and some none although they have a BOS token, so it is
    read off an encoded probe.
    """
    bare = tuple(tokenizer.encode(PROBE, add_special_tokens=False, verbose=False))
    full = tuple(tokenizer.encode(PROBE, add_special_tokens=True, verbose=False))
    starts = range(len(full) - len(bare) + 1)
    return full[: next((i for i in starts if full[i : i + len(bare)] == bare), 0)]


def render_messages(
    messages: Sequence[Message], tokenizer: Tokenizer, add_generation_prompt: bool = True
) -> str:
    """Render chat messages with the tokenizer's template; raises as BlendPrompt.from_messages."""
    plain = _plain_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "the tokenizer has no chat template: pass the prompt as a plain string or set "
            "tokenizer.chat_template"
        )
    try:
        rendered = tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise PromptError(f"the chat template refused the messages: {error}") from error
    return str(rendered)


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Message, name: str) -> dict[str, Any]:
    """Return the message with its content as one string; other fields (tool calls) as they are."""
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{name} must be a mapping with 'role' and 'content', not {message!r:.40}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{name}.role must be a non-empty string, not {role!r:.40}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _plain_content(content, f"{name}.content")}


def _plain_content(content: object, name: str) -> str:
    """Join text parts by newlines: most templates know strings only, and print a list as code."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"{name} must be a string or a list of text parts, not {content!r:.40}")
    return "\n".join(_part_text(part, f"{name}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, name: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise PromptError(
            f"{name} must be {{'type': 'text', 'text': ...}}: only text can be blended"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{name}.text must be a string, not {text!r:.40}")
    return text


def _segment_of(part: str | Chunk, index: int) -> Segment:
    if isinstance(part, Chunk):
        return Segment(part.text, part)
    if isinstance(part, str):
        return Segment(part)
    raise PromptError(f"part {index} of a prompt must be a str or a Chunk, not {part!r:.40}")


def _merge_text(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for found in segments:
        if found.chunk is None and merged and merged[-1].chunk is None:
            merged[-1] = Segment(merged[-1].text + found.text)
        elif found.text:
            merged.append(_checked(found))
    return tuple(merged)


def _checked(found: Segment) -> Segment:
    if found.chunk is not None and found.chunk.text != found.text:
        raise PromptError(
            f"segment {found.text[:20]!r} differs from its chunk's text; make it a text segment"
        )
    return found
