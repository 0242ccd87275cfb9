"""The prompt of `ask` and `chat`: an instruction, then turns of passages, question and answer.

A model with a chat template gets the instruction as its system message (or, if the template
has no system role, at the start of the first user message) and a user and an assistant message per
turn. Other models get the same as plain text. The text before the first passage is the *lead-in
text*: it is the same in every prompt of a collection, and its chunk KV is computed after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from cacheblend_rag.text.chat import RenderedChat, begins_as_rendered
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.instructed import SEPARATOR, InstructedChat
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
        *earlier, last = turns
        chat = self._chat.render([(turn.content, turn.answer) for turn in earlier], last.content)
        cut = len(self._chat.lead_in)
        shift = len(self.lead_in) - cut
        data = tuple((start + shift, end + shift) for start, end in chat.data)
        return RenderedChat(f"{self.lead_in}{chat.text[cut:]}", data)
