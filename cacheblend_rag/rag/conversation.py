"""A conversation with an engine: each prompt holds the earlier turns, whose KV is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, describe_errors
from cacheblend_rag.folders import write_private
from cacheblend_rag.prefill.conversation_kv import MOST_BYTES, MOST_TURNS, ConversationKV
from cacheblend_rag.rag.answering import clean_question, finished
from cacheblend_rag.rag.prompt import (
    INSTRUCTION,
    FittedPrompt,
    Passage,
    PromptFitter,
    RagPrompt,
    Turn,
)

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta, Generation
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class SavedConversation:
    """A conversation as ``to_json`` writes it; kv: see ConversationKV.to_plain."""

    turns: tuple[Turn, ...]
    kv: Any


SAVED = TypeAdapter(SavedConversation)
NOT_SAVED = {"turns": {"__all__": {"sources": {"__all__": {"chunk": {"context"}}}}}}
"""The text before each chunk in its document may be long; chunks are found by their documents."""


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer.

    turn_tokens: tokens of earlier turns, beside their passages, whose KV was reused.
    """

    fitted: FittedPrompt
    answer: Generation
    turn_tokens: int


class Conversation:
    """Questions and answers with one engine; the KV of every turn, answers included, is reused.

    Passages stand in the prompt in the turn that they were given with, and keep their own chunk KV.
    When the context window is full, the oldest turns are dropped. For one thread at a time.

    Attributes:
        last: the last prompt and answer, None at first.
        turns: the earlier turns that the next prompt may hold, oldest first. Put in another order,
            or without some, their KV stays reusable.
        kv: which KV of its turns is stored.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        instruction: str | None = None,
        sampling: SamplingParams | None = None,
        config: BlendConfig | None = None,
        prompt_tokens: int | None = None,
        most_turns: int = MOST_TURNS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Begin a conversation.

        Args:
            engine: answers. vLLM computes the KV of a turn again while it does nothing else; a
                busy one keeps none, and reads turns again or finds them in its own prefix cache.
            instruction: what prompts begin with; by default the engine's own, or one that asks for
                brief answers from the passages.
            sampling: how answers are sampled; the defaults for None.
            config: how KV is blended; the engine's own for None.
            prompt_tokens: the longest prompt; by default what the context window leaves beside the
                answer.
            most_turns: for so many turns KV is kept; that of the oldest is evicted.
            most_bytes: so many bytes of KV are kept at most.

        Raises:
            ConfigError: when the model's chat template drops the user's text, or a bound is
                negative.
        """
        self.last: Answered | None = None
        self.kv = ConversationKV(most_turns=most_turns, most_bytes=most_bytes)
        self._engine, self._config = engine, config
        self.turns: tuple[Turn, ...] = ()
        if instruction is None and not engine.instruction:
            instruction = INSTRUCTION
        prompt = RagPrompt.of_engine(engine.tokenizer, engine.instruction, instruction)
        chosen = sampling or SamplingParams()
        self._sampling = chosen.with_changes(stop=(*chosen.stop, *prompt.stop))
        self._fitter = PromptFitter(engine, prompt, most_tokens=prompt_tokens)

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: Engine, **options: Any) -> Conversation:
        """Return a saved conversation, with its turns and, if they are still stored, their KV.

        Args:
            path: of the file.
            engine: answers; with the same store, also in another process or on another machine, KV
                of earlier turns is reused.
            **options: as for the constructor, without bounds, which are saved.

        Raises:
            ConfigError: when the file cannot be read, or holds no conversation.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return cls.from_json(text, engine, **options)

    @classmethod
    def from_json(cls, text: str, engine: Engine, **options: Any) -> Conversation:
        """Return a conversation, given what ``to_json`` returned; as ``load``.

        Args:
            text: the JSON.
            engine: as for load.
            **options: as for load.

        Raises:
            ConfigError: when it is not a conversation.
        """
        try:
            saved = SAVED.validate_json(text, strict=True)
            kv = ConversationKV.from_plain(saved.kv)
        except ValidationError as error:
            told = describe_errors(error.errors(include_input=False))
            raise ConfigError(f"not a saved conversation: {told:.200}") from error
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"not a saved conversation: {error!s:.200}") from error
        names = ("instruction", "sampling", "config", "prompt_tokens")
        if unknown := options.keys() - set(names):
            raise ConfigError(f"unknown option {min(unknown)!r}: give {', '.join(names)}")
        made = cls(engine, **options)
        made.kv, made.turns = kv, saved.turns
        return made

    def ask(
        self, question: str, passages: Sequence[Passage] = (), *, cancel: Event | None = None
    ) -> Generation:
        """Return the answer to a question; see ``stream``.

        Args:
            question: the user's.
            passages: as for stream.
            cancel: as for stream.
        """
        return finished(self.stream(question, passages, cancel=cancel))

    def stream(
        self, question: str, passages: Sequence[Passage] = (), *, cancel: Event | None = None
    ) -> Iterator[Delta]:
        """Yield an answer piece by piece; the turn is added once it was read to its end.

        Turns that did not fit beside it are dropped then; a turn without an answer is not added.

        Args:
            question: the user's.
            passages: stand before the question, in this order, best first. Texts that are no
                registered chunks are kept with the turn.
            cancel: set it to stop the answer, which is added as far as it came.

        Raises:
            PromptError: when the question is empty; PromptTooLongError when it is too long alone.
        """
        asked = Turn.of(clean_question(question), passages)
        fitted = self._fitter.fit(self.turns, asked, self._sampling.max_tokens, self.kv)
        deltas: list[Delta] = []
        for delta in self._engine.stream(
            fitted.prepared, self._sampling, config=self._config, cancel=cancel
        ):
            deltas.append(delta)
            yield delta
        answer = finished(deltas)
        starts = {part.start for part in fitted.prepared.placed}
        reused = [one for one in answer.report.chunks if one.hit and one.start not in starts]
        self.last = Answered(fitted, answer, sum(one.tokens - one.recomputed for one in reused))
        *earlier, asked = fitted.turns
        text = answer.text.strip()
        self.turns = (*earlier, replace(asked, answer=text)) if text else tuple(earlier)

    def forget(self) -> int:
        """Forget all turns and evict their KV; returns how many pieces of it were stored.

        Raises:
            StoreError: when the engine's store is read-only.
        """
        self.turns, self.last = (), None
        return forget_conversation(self._engine, self.kv)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a file that only its owner can read.

        Args:
            path: of the file, which is replaced as a whole.

        Raises:
            ConfigError: when it cannot be written.
        """
        text = self.to_json()
        try:
            write_private(path, text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error

    def to_json(self) -> str:
        """Return the turns, and the names of their KV, as JSON.

        It holds all of the conversation's text, and the secret by which its KV is found.
        """
        saved = SavedConversation(self.turns, self.kv.to_plain())
        return SAVED.dump_json(saved, exclude=NOT_SAVED).decode()


def forget_conversation(engine: Engine, conversation: ConversationKV) -> int:
    """Drop the KV of all turns of a conversation; returns how many pieces were stored.

    Args:
        engine: with the store in which it is kept.
        conversation: may go on afterwards; nothing of its earlier turns is reused then.

    Raises:
        StoreError: when the store is read-only.
        ConfigError: when the engine is closed.
    """
    engine._lifetime.check()
    return engine._evict_turns(conversation.forget(), conversation.key)
