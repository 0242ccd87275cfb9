"""The prompt of `ask`: an instruction, then turns of passages, question and answer.

A model with a chat template gets the instruction as its system message (or, if the template
has no system role, at the start of the first user message) and a user and an assistant message per
turn. Other models get the same as plain text. The text before the first passage is the *lead-in
text*: it is the same in every prompt of a collection, and its chunk KV is computed after it. Where
a template tells the date, prompts have today's and the lead-in text that of a fixed day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from cacheblend_rag.text.chat import (
    PLACE,
    SEPARATOR,
    InstructedChat,
    RenderedChat,
    begins_as_rendered,
    on_day,
)
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.text.registry import ChunkRegistry

INSTRUCTION = (
    "Answer the question from the passages below. Use nothing else. If they do not hold the "
    "answer, say so. Be brief."
)


@dataclass(frozen=True)
class Turn:
    """One question with its passages, in the order of the prompt; ``answer`` is "" until given."""

    question: str
    passages: tuple[str, ...]
    answer: str = ""

    @property
    def content(self) -> str:
        """The text of the user's message."""
        return SEPARATOR.join([*self.passages, f"Question: {self.question}\nAnswer:"])


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

    def segmented(
        self, turns: Sequence[Turn], registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
    ) -> BlendPrompt:
        """Return ``render``'s text, split at the registered chunks in it."""
        prompt = BlendPrompt.from_rendered(self._rendered(turns), registry, hints)
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
