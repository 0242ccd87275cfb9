"""Answers from a collection: retrieves passages for the last message of a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from cacheblend_rag.api.answers import Asked
from cacheblend_rag.api.openai_errors import bad_field
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.fitting import AskedTurn, FittedPrompt
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.rag.prompt import Turn

if TYPE_CHECKING:
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.answering import Asker

TOP_K = 4


@dataclass
class Retriever:
    """Puts passages of a collection into the prompts of chats.

    Args:
        asker: of the collection.
        top_k: passages to retrieve.
        order: of the passages in the prompt.
        cites: whether the text of an answer ends with its sources.
    """

    asker: Asker
    top_k: int = TOP_K
    order: PassageOrder = PassageOrder.SCORE
    cites: bool = False
    _one_at_a_time: Lock = field(default_factory=Lock, repr=False)

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams, n: int
    ) -> Asked:
        """Return what the engine is asked for a chat.

        The last message is the question; earlier questions and answers stand before it, without
        their passages, and the text of system messages before the question.

        Args:
            messages: of the chat; the last one is the user's.
            sampling: of the answer.
            n: answers.

        Raises:
            ApiError: when the last message is not the user's.
            PromptError: when the question is empty, or too long.
        """
        fitted = await asyncio.to_thread(self._fitted, messages, sampling)
        return Asked(
            [fitted.prepared],
            self.asker.stopping(sampling),
            n,
            config=self.asker.config,
            sources=fitted.sources,
        )

    def _fitted(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> FittedPrompt:
        *before, last = messages
        if last["role"] != "user":
            raise bad_field("messages", "must end with a question: a message of the role user")
        question = clean_question(_text(last, len(before)))
        told = [_text(one, at) for at, one in enumerate(before) if one["role"] == "system"]
        with self._one_at_a_time:  # the embedding model is for one thread
            sources = self.asker.retrieve(question, self.top_k, self.order)
        asked = "\n\n".join([*(text for text in told if text.strip()), question])
        return self.asker.fit(_turns(before), asked, sources, sampling.max_tokens)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[AskedTurn]:
    """Return the earlier questions that have an answer, with it."""
    turns: list[AskedTurn] = []
    question = ""
    for at, message in enumerate(messages):
        text = _text(message, at).strip()
        if message["role"] == "user":
            question = text
        elif message["role"] == "assistant" and question and text:
            turns.append(AskedTurn(Turn(question, (), text), ()))
            question = ""
    return turns


def _text(message: Mapping[str, Any], index: int) -> str:
    """Return a message's text; raises ApiError for parts that are none."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = [part.get("text") if part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise bad_field(f"messages[{index}].content", "must be text: leave out other parts")
    return "\n".join(part for part in parts if part)


def name_of(folder: Path) -> str:
    """Return a collection's name: its folder's, or the parent's if its own begins with a dot."""
    path = folder.resolve()
    return path.parent.name if path.name.startswith(".") and path.parent.name else path.name
