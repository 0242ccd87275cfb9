"""Renders an instruction and a conversation for one model, by its chat template if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chat import FIXED_DAY, ChatPrompt, RenderedChat, render_chat

SEPARATOR = "\n\n"
PLACE = "[the passages stand here]"
"""Stands for the passages in a rendered prompt."""

Told = tuple[str, str]
"""A user's message and its answer."""


class InstructedChat:
    """Renders conversations under one instruction.

    A chat template gets the instruction as its system message (see ``render_chat``). A model
    without one gets plain text. ``lead_in`` is the text before the first user's message, the same
    in every prompt but for the date that a template tells: it is that of a fixed day.

    Raises ConfigError when the model's chat template drops the user's text.
    """

    def __init__(self, tokenizer: Any, instruction: str, *, chat_template: bool = True) -> None:
        """chat_template: False renders plain text, whatever the tokenizer has."""
        self.instruction = instruction.strip()
        self._tokenizer = tokenizer
        self.has_template = chat_template and bool(getattr(tokenizer, "chat_template", None))
        self.lead_in, _ = self.around(PLACE, FIXED_DAY)

    def around(self, content: str, day: datetime | None = None) -> tuple[str, str]:
        """Return the text before and behind a user's first message; day: today by default."""
        before, found, behind = self.render([], content, day).text.partition(content)
        if not found:
            raise ConfigError("the model's chat template drops the user's text: use another model")
        return before, behind

    def render(
        self, told: Sequence[Told], content: str, day: datetime | None = None
    ) -> RenderedChat:
        """Return a prompt of earlier messages with their answers, and of the user's last one.

        day: that the template tells; today by default.
        """
        opening = [self.instruction] if self.instruction else []
        if not self.has_template:
            earlier = [f"{message} {answer}" for message, answer in told]
            return RenderedChat(SEPARATOR.join([*opening, *earlier, content]))
        messages = [{"role": "system", "content": text} for text in opening]
        for message, answer in told:
            messages.append({"role": "user", "content": message})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": content})
        return render_chat(ChatPrompt(messages), self._tokenizer, day=day)
