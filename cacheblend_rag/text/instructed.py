"""Renders an instruction and a conversation for one model, by its chat template if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.text.chat import render_messages

SEPARATOR = "\n\n"
PLACE = "[the passages stand here]"
"""Stands for the passages in a rendered prompt."""

Told = tuple[str, str]
"""A user's message and its answer."""


class InstructedChat:
    """Renders conversations under one instruction.

    A chat template gets the instruction as its system message (or, if the template has no system
    role, at the start of the first user message). A model without one gets plain text. ``lead_in``
    is the text before the first user's message, the same in every prompt.

    Raises ConfigError when the model's chat template drops the user's text.
    """

    def __init__(self, tokenizer: Any, instruction: str, *, chat_template: bool = True) -> None:
        """chat_template: False renders plain text, whatever the tokenizer has."""
        self.instruction = instruction.strip()
        self._tokenizer = tokenizer
        self.has_template = chat_template and bool(getattr(tokenizer, "chat_template", None))
        self._takes_system = self.has_template and self._try_system()
        self.lead_in, _ = self.around(PLACE)

    def around(self, content: str) -> tuple[str, str]:
        """Return the text before and behind a user's first message."""
        before, found, behind = self.render([], content).partition(content)
        if not found:
            raise ConfigError("the model's chat template drops the user's text: use another model")
        return before, behind

    def render(self, told: Sequence[Told], content: str) -> str:
        """Return a prompt of earlier messages with their answers, and of the user's last one."""
        if not self.has_template:
            earlier = [f"{message} {answer}" for message, answer in told]
            return SEPARATOR.join([*self._opening(), *earlier, content])
        messages = [{"role": "system", "content": self.instruction}] if self._takes_system else []
        opening = () if self._takes_system else self._opening()
        for message, answer in told:
            messages += _exchange(SEPARATOR.join([*opening, message]), answer)
            opening = ()
        messages.append({"role": "user", "content": SEPARATOR.join([*opening, content])})
        return render_messages(messages, self._tokenizer)

    def _opening(self) -> tuple[str, ...]:
        return (self.instruction,) if self.instruction else ()

    def _try_system(self) -> bool:
        """Whether the template renders a system message; some refuse or drop it."""
        if not self.instruction:
            return False
        messages = [
            {"role": "system", "content": self.instruction},
            {"role": "user", "content": PLACE},
        ]
        try:
            return self.instruction in render_messages(messages, self._tokenizer)
        except PromptError:
            return False


def _exchange(message: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
