"""Fits a question, its passages and the turns before it into a model's context window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend_rag.errors import PromptError, PromptTooLongError
from cacheblend_rag.rag.ordering import Source
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.text.chat import SEPARATOR
from cacheblend_rag.text.encoder import EDGE_TOKENS

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PreparedPrompt
    from cacheblend_rag.prefill.conversation_kv import ConversationKV

ANSWER_SHARE = 4


@dataclass(frozen=True)
class AskedTurn:
    """A turn and its passages."""

    turn: Turn
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt that leaves room for an answer, encoded, and its turns.

    turns: the earlier turns that fit, then the current one.
    """

    prepared: PreparedPrompt
    turns: tuple[AskedTurn, ...]

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
        earlier: Sequence[AskedTurn],
        question: str,
        sources: Sequence[Source],
        max_tokens: int,
        conversation: ConversationKV | None = None,
    ) -> FittedPrompt:
        """Build the prompt; the oldest turns, then the worst passages, are dropped until it fits.

        conversation: the one whose next turn it is.
        Raises PromptError when the question alone is too long.
        """
        window = self._engine.context_window
        room = window - min(max_tokens, window // ANSWER_SHARE)
        room = room if self._most_tokens is None else min(room, self._most_tokens)
        kept, shown = list(earlier), list(sources)
        while True:
            texts = tuple(source.chunk.text for source in shown)
            turns = (*kept, AskedTurn(Turn(question, texts), tuple(shown)))
            prepared, tokens = self._prepared(turns, conversation)
            if prepared is not None and tokens <= room:
                return FittedPrompt(prepared, turns)
            if not kept and not shown:
                raise PromptError(f"question holds {tokens} tokens, more than {room}: shorten it")
            while tokens > room and (kept or shown):
                tokens -= self._leave_out(kept, shown)

    def _prepared(
        self, turns: Sequence[AskedTurn], conversation: ConversationKV | None
    ) -> tuple[PreparedPrompt | None, int]:
        """Return the prompt, unless it is too long even without an answer, and its length."""
        from cacheblend_rag.engines.prepare import TurnPrompt

        hints = [source.chunk for asked in turns for source in asked.sources]
        told = [asked.turn for asked in turns]
        prompt = self._prompt.segmented(told, self._engine.registry, hints)
        turn = conversation and TurnPrompt(conversation, prompt, told[-1].question)
        try:
            prepared = self._engine.prepare(turn or prompt, hints)
        except PromptTooLongError as error:
            return None, error.tokens
        return prepared, len(prepared.token_ids)

    def _leave_out(self, kept: list[AskedTurn], shown: list[Source]) -> int:
        """Remove the oldest turn, else the worst passage; returns an upper bound of its tokens."""
        if kept:
            oldest = kept.pop(0).turn
            text = f"{self._prompt.render([oldest])}{oldest.answer}"
            return len(self._engine.tokenize(text)) + EDGE_TOKENS
        worst = min(shown, key=lambda source: source.score)
        shown.remove(worst)
        parts = (worst.chunk.text, SEPARATOR)  # the passage's own tokens are known by now
        return sum(len(self._engine.tokenize(part)) for part in parts) + EDGE_TOKENS
