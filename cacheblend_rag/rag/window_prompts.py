"""The prompts of a long document's analysis: a window of chunks, and the combining of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag.text.chat import PLACE, SEPARATOR, InstructedChat, begins_as_rendered, on_day
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt

INSTRUCTION = (
    "The passages below are consecutive parts of one long document; each may begin with the end of "
    "the one before it. Answer from them alone. If they do not hold the answer, say so."
)
SUMMARY = "What is the main content of this text?"
"""The question if none is given."""
COMBINE = (
    "The parts above answer the question below, each from another section of one document, in its "
    "order. Join them to one answer. Leave out what they repeat, and parts without an answer."
)
REFINE = (
    "This is the answer from the sections of the document before these passages:\n{answer}\n\n"
    "Write the answer anew, with what the passages above add or correct."
)


def default_lead_in(tokenizer: Any) -> str:
    """Return the text before the first passage, the ``instruction`` of an engine for analyses."""
    return InstructedChat(tokenizer, INSTRUCTION).lead_in


def heading(number: int) -> str:
    """Return the heading of an answer in the prompt that joins several: "Part 3: "."""
    return f"Part {number}: "


@dataclass(frozen=True)
class WindowPrompts:
    """Prompts for one engine and one question.

    before: the text before the first passage. behind: the text after the question. is_rendered:
    whether a chat template gave them.
    """

    question: str
    before: str
    behind: str
    is_rendered: bool

    @classmethod
    def of(cls, question: str, tokenizer: Any, instruction: str) -> WindowPrompts:
        """Return prompts that begin with an engine's instruction, if it has one."""
        if not instruction:
            chat = InstructedChat(tokenizer, INSTRUCTION)
            before, behind = chat.around(PLACE)
            return cls(question, before, behind, chat.has_template)
        if not begins_as_rendered(instruction, tokenizer):
            return cls(question, instruction, "", False)
        _, behind = InstructedChat(tokenizer, "").around(PLACE)
        return cls(question, on_day(None, instruction, tokenizer), behind, True)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: a model without a template would go on with a question."""
        return () if self.is_rendered else (f"{SEPARATOR}Question:",)

    def window(self, chunks: Sequence[Chunk], so_far: str = "") -> BlendPrompt:
        """Return the prompt of a window; ``so_far``: the answer to refine, if there is one."""
        passages = [part for chunk in chunks for part in (chunk, SEPARATOR)]
        return self._prompt(*passages, REFINE.format(answer=so_far) if so_far else "")

    def combining(self, answers: Sequence[str]) -> BlendPrompt:
        """Return the prompt that joins answers to one."""
        parts = [f"{heading(number)}{text}" for number, text in enumerate(answers, start=1)]
        return self._prompt(SEPARATOR.join([*parts, COMBINE]))

    def _prompt(self, *parts: str | Chunk) -> BlendPrompt:
        *first, last = parts
        asked = f"{last}{SEPARATOR if last else ''}Question: {self.question}\nAnswer:{self.behind}"
        return replace(BlendPrompt.of(self.before, *first, asked), is_rendered=self.is_rendered)
