"""The prompt of `ask` and `chat`: an instruction, then turns of passages, question and answer.

A model with a chat template gets the instruction as its system message (or, if the template
has no system role, at the start of the first user message) and a user and an assistant message per
turn. Other models get the same as plain text. The text before the first passage is the *lead-in
text*: it is the same in every prompt of a collection, and its chunk KV is computed after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.text.chat import render_messages
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.registry import ChunkRegistry

INSTRUCTION = (
    "Answer the question from the passages below. Use nothing else. If they do not hold the "
    "answer, say so. Be brief."
)
SEPARATOR = "\n\n"
PLACE_OF_PASSAGES = "[the passages stand here]"


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

    def __init__(self, tokenizer: Any, instruction: str) -> None:
        self.instruction = instruction.strip()
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._takes_system = self._has_template and self._try_system()
        lead_in, found, _ = self.render([Turn("", (PLACE_OF_PASSAGES,))]).partition(
            PLACE_OF_PASSAGES
        )
        if not found:
            raise ConfigError("the model's chat template drops the user's text: use another model")
        self.lead_in = lead_in

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: a model without a template would go on with a question."""
        return () if self._has_template else (f"{SEPARATOR}Question:",)

    def render(self, turns: Sequence[Turn]) -> str:
        """Return the prompt as text; it ends with the last turn's question."""
        *earlier, last = turns
        if not self._has_template:
            told = [f"{turn.content} {turn.answer}" for turn in earlier]
            return SEPARATOR.join([*self._opening(), *told, last.content])
        messages = [{"role": "system", "content": self.instruction}] if self._takes_system else []
        opening = () if self._takes_system else self._opening()
        for turn in turns:
            content = SEPARATOR.join([*opening, turn.content])
            opening = ()
            messages.append({"role": "user", "content": content})
            if turn is not last:
                messages.append({"role": "assistant", "content": turn.answer})
        return render_messages(messages, self._tokenizer)

    def segmented(
        self, turns: Sequence[Turn], registry: ChunkRegistry, hints: Sequence[Chunk | str] = ()
    ) -> BlendPrompt:
        """Return ``render``'s text, split at the registered chunks in it."""
        prompt = BlendPrompt.from_text(self.render(turns), registry, hints)
        return replace(prompt, is_rendered=self._has_template)

    def _opening(self) -> tuple[str, ...]:
        return (self.instruction,) if self.instruction else ()

    def _try_system(self) -> bool:
        """Whether the template renders a system message; some refuse or drop it."""
        if not self.instruction:
            return False
        messages = [
            {"role": "system", "content": self.instruction},
            {"role": "user", "content": PLACE_OF_PASSAGES},
        ]
        try:
            return self.instruction in render_messages(messages, self._tokenizer)
        except PromptError:
            return False
