"""The frame of an evaluation's prompts: the text before the passages and behind the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag.quality.dataset import EvalQuestion
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.instructed import PLACE, SEPARATOR, InstructedChat
from cacheblend_rag.text.prompt import BlendPrompt

ANSWER = "\nAnswer:"
OPENING = "opening"
"""The document of an opening that is kept as a chunk."""


@dataclass(frozen=True)
class PromptFrame:
    """What surrounds passages and questions in all prompts of an evaluation.

    opening: the text before the first passage, which an engine gets as its ``instruction``.
    closing: the text behind the question. is_rendered: whether a chat template rendered both, so
    that the tokenizer adds no BOS.
    """

    opening: str
    closing: str = ANSWER
    is_rendered: bool = False

    @classmethod
    def of(cls, tokenizer: Any, instruction: str, *, chat_template: bool = True) -> PromptFrame:
        """Return the frame that ``ask`` uses: by the model's chat template, if it has one.

        chat_template: False gives plain text. Raises ConfigError when the template drops the user's
        text.
        """
        chat = InstructedChat(tokenizer, instruction, chat_template=chat_template)
        _, behind = chat.around(PLACE)
        return cls(chat.lead_in, f"{ANSWER}{behind}", chat.has_template)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: without a chat template, the end of its line."""
        return () if self.is_rendered else ("\n",)

    def prompt(self, question: EvalQuestion) -> BlendPrompt:
        """Return opening, passages and question as explicit segments."""
        return self._around(question, question.passages)

    def without_passages(self, question: EvalQuestion) -> BlendPrompt:
        """Return the same prompt without its passages."""
        return self._around(question, ())

    def opening_alone(self, question: EvalQuestion) -> tuple[Chunk, BlendPrompt]:
        """Return the opening as a chunk, and the prompt in which it is the only one."""
        opening = Chunk(self.opening, OPENING)
        rest = "".join(f"{passage.text}{SEPARATOR}" for passage in question.passages)
        return opening, self._of(opening, rest, self._asked(question))

    def _around(self, question: EvalQuestion, passages: Sequence[Chunk]) -> BlendPrompt:
        parts = [part for passage in passages for part in (passage, SEPARATOR)]
        return self._of(self.opening, *parts, self._asked(question))

    def _of(self, *parts: str | Chunk) -> BlendPrompt:
        prompt = BlendPrompt.of(*(part for part in parts if part != ""))
        return replace(prompt, is_rendered=self.is_rendered)

    def _asked(self, question: EvalQuestion) -> str:
        return f"Question: {question.question}{self.closing}"
