"""The prompt of `ask`: an instruction, then those turns (passages, question, answer) that fit.

A model with a chat template gets the instruction as its system message (or, if the template
has no system role, at the start of the first user message) and a user and an assistant message per
turn. Other models get the same as plain text. The text before the first passage is the *lead-in
text*: it is the same in every prompt of a collection, and its chunk KV is computed after it. Where
a template tells the date, prompts have today's and the lead-in text that of a fixed day.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.text.chat import (
    PLACE,
    InstructedChat,
    RenderedChat,
    begins_as_rendered,
    on_day,
)
from cacheblend_rag.text.chunk import SEPARATOR, Chunk
from cacheblend_rag.text.encoder import EDGE_TOKENS
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PreparedPrompt
    from cacheblend_rag.prefill.conversation_kv import ConversationKV
    from cacheblend_rag.text.registry import ChunkRegistry

Found = TypeVar("Found")
"""A passage: a Source here, a node or a Document in frameworks."""
INSTRUCTION = (
    "Answer the question from the passages below. Use nothing else. If they do not hold the "
    "answer, say so. Be brief."
)


class PassageOrder(StrEnum):
    """The order of passages in a prompt.

    Attributes:
        SCORE: best first.
        DOCUMENT: passages of one document together and in its order, the document with the best
            passage first.
        REVERSE: best last, next to the question.
    """

    SCORE = "score"
    DOCUMENT = "document"
    REVERSE = "reverse"

    def arrange(
        self,
        found: Sequence[Found],
        *,
        document_of: Callable[[Found], Hashable],
        positions_of: Callable[[Sequence[Found]], Sequence[int]],
    ) -> list[Found]:
        """Put passages in this order.

        Args:
            found: the passages, best first.
            document_of: returns a passage's document; None is a document of that passage alone.
            positions_of: returns the positions of passages, given best first, in their common
                document. At equal positions the better one stays first.

        Returns:
            The same passages, all of them.
        """
        if self is PassageOrder.SCORE:
            return list(found)
        if self is PassageOrder.REVERSE:
            return list(reversed(found))
        documents: dict[Hashable, list[Found]] = {}
        for passage in found:
            name = document_of(passage)
            documents.setdefault(object() if name is None else name, []).append(passage)
        ordered: list[Found] = []
        for together in documents.values():
            placed = zip(positions_of(together), together, strict=True)
            ordered += [passage for _, passage in sorted(placed, key=itemgetter(0))]
        return ordered


@dataclass(frozen=True)
class Source:
    """A retrieved passage: chunk ``position`` (from 0) of its document, and its cosine."""

    chunk: Chunk
    position: int
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "source": self.chunk.document_id,
            "chunk": self.position,
            "score": self.score,
            "text": self.chunk.text,
        }


Passage = Chunk | Source | str
"""A passage of a turn: a chunk, a retrieved one, or a text that is no chunk."""


@dataclass(frozen=True)
class Turn:
    """One question with its passages, in the order of the prompt; ``answer`` is "" until given."""

    question: str
    sources: tuple[Source, ...] = ()
    answer: str = ""

    @classmethod
    def of(cls, question: str, passages: Sequence[Passage], answer: str = "") -> Self:
        """Return a turn with passages of any kind, best first."""
        return cls(question, tuple(map(_source, passages, count())), answer)

    @property
    def content(self) -> str:
        """The text of the user's message."""
        passages = [source.chunk.text for source in self.sources]
        return SEPARATOR.join([*passages, f"Question: {self.question}\nAnswer:"])


def _source(passage: Passage, rank: int) -> Source:
    if isinstance(passage, Source):
        return passage
    chunk = Chunk(passage) if isinstance(passage, str) else passage
    return Source(chunk, 0, 1.0 / (1 + rank))


class RagPrompt:
    """Renders turns for one model.

    Raises ConfigError when the model's chat template drops the user's text.
    """

    def __init__(self, tokenizer: Any, instruction: str, *, lead_in: str | None = None) -> None:
        """lead_in: what prompts begin with instead of the rendered instruction."""
        self._chat = InstructedChat(tokenizer, instruction)
        self._tokenizer, self._own = tokenizer, lead_in
        self.instruction = self._chat.instruction
        self.lead_in = self._chat.lead_in if lead_in is None else lead_in

    @classmethod
    def of_engine(cls, tokenizer: Any, own: str, instruction: str | None = None) -> Self:
        """Return prompts for an engine; own: its ``instruction``, used where none is given."""
        if instruction is None and begins_as_rendered(own, tokenizer):
            return cls(tokenizer, "", lead_in=own)
        return cls(tokenizer, own if instruction is None else instruction)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: a model without a template would go on with a question."""
        return () if self._chat.has_template else (f"{SEPARATOR}Question:",)

    def render(self, turns: Sequence[Turn]) -> str:
        """Return the prompt as text; it ends with the last turn's question."""
        return self._rendered(turns).text

    def segmented(self, turns: Sequence[Turn], registry: ChunkRegistry) -> BlendPrompt:
        """Return ``render``'s text, split at the registered chunks in it."""
        prompt = BlendPrompt.from_text(self._rendered(turns), registry, hints_of(turns))
        return replace(prompt, is_rendered=self._chat.has_template)

    def _rendered(self, turns: Sequence[Turn]) -> RenderedChat:
        told = [(turn.content, turn.answer) for turn in turns]
        if self._own is not None:
            told[0] = (f"{PLACE}{told[0][0]}", told[0][1])
        *earlier, (last, _) = told
        chat = self._chat.render(earlier, last)
        if self._own is None:
            return chat
        before, place, rest = chat.text.partition(PLACE)
        own = on_day(None, self._own, self._tokenizer)
        shift = len(own) - len(before) - len(place)
        data = tuple((start + shift, end + shift) for start, end in chat.data)
        return RenderedChat(f"{own}{rest}", data)


ANSWER_SHARE = 4


def hints_of(turns: Iterable[Turn]) -> list[Chunk]:
    """Return the chunks that a prompt of these turns holds."""
    return [source.chunk for turn in turns for source in turn.sources]


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt that leaves room for an answer, encoded, and its turns.

    turns: the earlier turns that fit, then the current one.
    """

    prepared: PreparedPrompt
    turns: tuple[Turn, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """The passages of the current turn."""
        return self.turns[-1].sources


class PromptFitter:
    """Builds prompts for one engine that leave room for an answer.

    A prompt is encoded once if everything fits. If not, upper bounds of the parts' lengths show
    how many parts must be left out at least, and the rest is encoded again: twice in total, and
    once more whenever that was too few by some tokens.
    """

    def __init__(
        self, engine: Engine, prompt: RagPrompt, *, most_tokens: int | None = None
    ) -> None:
        """most_tokens: of a prompt without answer."""
        self._engine, self._prompt, self._most_tokens = engine, prompt, most_tokens

    def fit(
        self,
        earlier: Sequence[Turn],
        asked: Turn,
        max_tokens: int,
        conversation: ConversationKV | None = None,
    ) -> FittedPrompt:
        """Build the prompt; the oldest turns, then the worst passages, are dropped until it fits.

        conversation: the one whose next turn it is.
        Raises PromptTooLongError when the question alone is too long.
        """
        window = self._engine.context_window
        room = window - min(max_tokens, window // ANSWER_SHARE)
        room = room if self._most_tokens is None else min(room, self._most_tokens)
        kept, shown = list(earlier), list(asked.sources)
        while True:
            turns = (*kept, replace(asked, sources=tuple(shown)))
            prepared, tokens = self._prepared(turns, conversation)
            if prepared is not None and tokens <= room:
                return FittedPrompt(prepared, turns)
            if not kept and not shown:
                raise PromptTooLongError(tokens, window, answer_tokens=window - room)
            while tokens > room and (kept or shown):
                tokens -= self._leave_out(kept, shown)

    def _prepared(
        self, turns: Sequence[Turn], conversation: ConversationKV | None
    ) -> tuple[PreparedPrompt | None, int]:
        """Return the prompt, unless it is too long even without an answer, and its length."""
        from cacheblend_rag.engines.prepare import TurnPrompt

        prompt = self._prompt.segmented(turns, self._engine.registry)
        turn = conversation and TurnPrompt(conversation, prompt, turns[-1].question)
        try:
            prepared = self._engine.prepare(turn or prompt, hints_of(turns))
        except PromptTooLongError as error:
            return None, error.tokens
        return prepared, len(prepared.token_ids)

    def _leave_out(self, kept: list[Turn], shown: list[Source]) -> int:
        """Remove the oldest turn, else the worst passage; returns an upper bound of its tokens."""
        if kept:
            oldest = kept.pop(0)
            parts = [f"{self._prompt.render([oldest])}{oldest.answer}"]
        else:
            worst = min(shown, key=lambda source: source.score)
            shown.remove(worst)
            parts = [worst.chunk.text, SEPARATOR]  # the passage's own tokens are known by now
        return sum(len(self._engine.tokenize(part)) for part in parts) + EDGE_TOKENS
