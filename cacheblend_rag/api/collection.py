"""Answers from a collection: retrieves passages for the last message of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from cacheblend_rag.api.answers import Asked
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.printable import one_line
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.prompt import PassageOrder, Source, Turn
from cacheblend_rag.text.chat import plain_content

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
        cites: whether the text of an answer ends with its sources; not where it has a form.
    """

    asker: Asker
    top_k: int = TOP_K
    order: PassageOrder = PassageOrder.SCORE
    cites: bool = False
    _one_at_a_time: Lock = field(default_factory=Lock, repr=False)

    def asked(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams, n: int = 1
    ) -> Asked:
        """Return the prompt and settings of a chat.

        The last message is what is searched for; earlier questions and answers stand before it,
        without their passages, and right before it the text of system messages, and of messages of
        the user that have no answer.

        Args:
            messages: of the chat; the last one is the user's.
            sampling: of the answer.
            n: answers.

        Raises:
            ApiError: when the last message is not the user's.
            PromptError: when the question is empty, or too long.
        """
        *before, last = messages
        if last["role"] != "user":
            raise bad_field("messages", "must end with a question: a message of the role user")
        question = clean_question(_text(last, len(before)))
        self.asker.engine.prepare(question)  # before a search, which takes any length
        told = [_text(one, at) for at, one in enumerate(before) if one["role"] == "system"]
        turns, unanswered = _turns(before)
        earlier = turns + [Turn(text) for text in unanswered]
        with self._one_at_a_time:  # the embedding model is for one thread
            sources = self.asker.retrieve(question, self.top_k, self.order, earlier)
        asked = "\n\n".join([*(text for text in told if text.strip()), *unanswered, question])
        fitted = self.asker.fit(turns, Turn.of(asked, sources), sampling.max_tokens)
        cites = self.cites and sampling.structured_outputs is None
        return Asked(
            [fitted.prepared],
            self.asker.stopping(sampling),
            n,
            sources=fitted.sources,
            closing=sources_text(fitted.sources) if cites else "",
        )


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[str]]:
    """Return the earlier questions with their answers, and the last ones if they have none."""
    turns: list[Turn] = []
    asked: list[str] = []
    said = [(one["role"], _text(one, at).strip()) for at, one in enumerate(messages)]
    exchanged = [(role, text) for role, text in said if text and role in ("user", "assistant")]
    for role, texts in groupby(exchanged, key=itemgetter(0)):
        text = "\n\n".join(text for _, text in texts)
        if role == "user":
            asked.append(text)
        elif asked:
            turns.append(Turn("\n\n".join(asked), answer=text))
            asked = []
    return turns, asked


def is_task(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat asks about another one that its last message holds, such as for a title.

    So do Open WebUI's own tasks: they begin with "### Task:", and have a chat in <chat_history>.
    """
    text = _text(messages[-1], len(messages) - 1)
    return text.lstrip().startswith("### Task:") and "<chat_history>" in text


def _text(message: Mapping[str, Any], index: int) -> str:
    """Return a message's text; raises PromptError for parts that are none."""
    return plain_content(message.get("content") or "", f"messages[{index}].content")


def sources_text(sources: Sequence[Source]) -> str:
    """Return a short list of documents for the end of an answer; "" without sources."""
    names = dict.fromkeys(one_line(source.chunk.document_id or "") for source in sources)
    listed = "".join(f"\n- {name}" for name in names if name)
    return f"\n\nSources:{listed}" if listed else ""


def name_of(folder: Path) -> str:
    """Return a collection's name: its folder's, or the parent's if its own begins with a dot."""
    path = folder.resolve()
    return path.parent.name if path.name.startswith(".") and path.parent.name else path.name
