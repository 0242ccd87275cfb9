"""Renders chat messages with a tokenizer's chat template, or as plain text without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.text.chunk import SEPARATOR
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.special_tokens import Markers, special_tokens
from cacheblend_rag.text.tools import (
    Data,
    Message,
    Tool,
    ToolChoice,
    check_choice,
    check_tools,
    functions_called,
    is_system,
    plain_turns,
    speaks_of_tools,
    stand_in_order,
    system_as_user,
    text_of,
    tool_name,
    with_object,
)

PLACE = "[the passages stand here]"
"""A text that no prompt has: the place of the passages, or of a message, in a rendered prompt."""

Told = tuple[str, str]
"""A user's message and its answer."""
CLOCK = "strftime_now"
"""The function by which chat templates tell the date."""
FIXED_DAY = datetime(2024, 7, 26)
"""The day of all lead-ins, so that KV which was computed behind them is found on every day."""
DAYS = (FIXED_DAY, None)
"""The days of texts that a template rendered: of lead-ins, and today."""


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages, and the tools that the answer may call.

    Messages are in the OpenAI form: ``{"role": ..., "content": ...}``; those of an assistant may
    have ``tool_calls``, and the tools' results are messages of the role ``tool``.

    Args:
        messages: the chat so far.
        tools: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters":
            a JSON schema}}``.
        tool_choice: ``auto``: the model decides; ``none``: it is told of no tool; ``required``: it
            calls at least one; ``{"type": "function", "function": {"name": ...}}``: that one.
        parallel_tool_calls: whether an answer may call several at once; False takes the first.

    Raises:
        PromptError: when a tool or the choice is malformed.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        told: object = self.messages
        if isinstance(told, str | Mapping) or not isinstance(told, Sequence) or not told:
            raise PromptError("messages must be a non-empty list of {'role': ..., 'content': ...}")
        object.__setattr__(self, "messages", tuple(told))
        object.__setattr__(self, "tools", check_tools(self.tools))
        check_choice(self.tool_choice, self.tools)

    @property
    def told_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is told of."""
        return () if self.tool_choice == "none" else tuple(self.tools)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat. data: (start, end) of what is data in its text, in order (see ``Data``)."""

    text: str
    data: tuple[tuple[int, int], ...] = ()


def text_before(place: str, messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """Return what rendered messages have before a place in them, on a fixed day.

    It is the instruction of an engine whose passages stand at that place: their KV does not depend
    on the date that a template tells.

    Args:
        place: a text that stands for the passages; "" is returned if it is in no message.
        messages: a chat.
        tokenizer: the one whose chat template is used.

    Raises:
        PromptError: as ``render_chat``.
    """
    before, found, _ = render_chat(messages, tokenizer, day=FIXED_DAY).text.partition(place)
    return before if found else ""


def render_chat(
    prompt: ChatPrompt | Sequence[Message],
    tokenizer: Tokenizer,
    *,
    day: datetime | None = None,
) -> RenderedChat:
    """Render a chat with the tokenizer's template, up to where the answer begins.

    Results of tools stand in it word for word, and control tokens in the user's text as text. A
    template that takes no tools, or refuses, drops or repeats what they were asked and what they
    said, gets all this as plain text (see ``tools``). A template that refuses or drops system
    messages gets them as the user's: those that the messages begin with at the start of the first
    user's message, say.

    Args:
        prompt: the chat so far.
        tokenizer: the one whose chat template is used.
        day: that the template tells; today by default.

    Raises:
        PromptError: when a message is malformed, the tokenizer has no chat template, or the
            template refuses the messages.
    """
    chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)
    plain = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)]
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "the tokenizer has no chat template: pass the prompt as a plain string or set "
            "tokenizer.chat_template"
        )
    template = _Template(tokenizer, day)
    data = Data(plain, chat.told_tools, Markers(special_tokens(tokenizer).values()))
    if data.tools or any(map(speaks_of_tools, plain)):
        text = _natively(template, data) or _plainly(template, data)
    else:
        text = template.render(data.messages)
    return RenderedChat(*data.put_into(text))


@dataclass(frozen=True, slots=True)
class _Template:
    """A tokenizer's chat template; fields as for ``render_chat``."""

    tokenizer: Tokenizer
    day: datetime | None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of messages, in the first form that shows all that the system says."""
        system = [text_of(one).strip() for one in messages if is_system(one)]
        if not system:
            return self._text(messages, tools)
        forms = (
            messages,
            system_as_user(messages, but_first=True),
            system_as_user(messages, but_first=False),
        )
        incomplete, refusals = list[str](), list[PromptError]()
        for form in forms:
            try:
                text = self._text(form, tools)
            except PromptError as refusal:
                refusals.append(refusal)
                continue
            if stand_in_order(system, text):
                return text
            incomplete.append(text)
        if not incomplete:
            raise refusals[0]
        return incomplete[0]

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        from jinja2 import TemplateError

        told: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        if self.day is not None and tells_the_date(self.tokenizer):
            told[CLOCK] = self.day.strftime
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **told,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template refused the messages: {error}") from error
        return str(text)


def _natively(template: _Template, data: Data) -> str | None:
    """Return what the template makes of tools and calls; None unless it shows all of them."""
    tools, messages = data.tools, data.messages
    called = (str(one.get("name")) for message in messages for one in functions_called(message))
    try:
        text = template.render(messages, tools)
        if tools and text == template.render(messages):  # their names may stand in it by chance
            return None
    except PromptError:
        return None
    shown = stand_in_order(map(tool_name, tools), text) and stand_in_order(called, text)
    return text if shown and data.are_in(text) else None


def _plainly(template: _Template, data: Data) -> str:
    """Return the chat with tools and calls as plain text, where the template lets it stand."""
    text = template.render(plain_turns(data.messages, data.tools))
    if not data.are_in(text):
        raise PromptError(
            "the chat template drops or repeats the results of tools: use another model"
        )
    return text


def tells_the_date(tokenizer: Tokenizer) -> bool:
    """Whether the chat template tells the date."""
    return CLOCK in str(getattr(tokenizer, "chat_template", None))


def begins_as_rendered(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text begins with the opening that the tokenizer's chat template renders.

    Prompts made of messages have only the template's own BOS, so such a text has no second BOS,
    which the tokenizer would put before a plain text.
    """
    return any(text.startswith(opening) for day in DAYS for opening in _openings(tokenizer, day))


def on_day(day: datetime | None, text: str, tokenizer: Tokenizer) -> str:
    """Return a text with the opening of a chat template as it is on a day; today for None.

    Other texts, and the rest of the text, are unchanged.
    """
    if not tells_the_date(tokenizer):
        return text
    wanted = _openings(tokenizer, day)
    for other in DAYS:
        for there, here in zip(_openings(tokenizer, other), wanted, strict=True):
            if text.startswith(there):
                return f"{here}{text[len(there) :]}"
    return text


def _openings(tokenizer: Tokenizer, day: datetime | None) -> list[str]:
    """Return the texts that the template puts before a first message, of the user or the system."""
    found = list[str]()
    for roles in (("user",), ("system", "user")):
        messages = [{"role": role, "content": PLACE} for role in roles]
        with suppress(PromptError):  # it has no template, or takes no system message
            before, place, _ = render_chat(messages, tokenizer, day=day).text.partition(PLACE)
            found += [before] if before and place else []
    return found


class InstructedChat:
    """Renders conversations under one instruction.

    A chat template gets the instruction as its system message (see ``render_chat``). A model
    without one gets plain text. ``lead_in`` is the text before the first user's message, the same
    in every prompt but for the date that a template tells: it is that of a fixed day. ``closing``
    is the text behind the last user's message.

    Raises ConfigError when the model's chat template drops the user's text.
    """

    def __init__(self, tokenizer: Any, instruction: str, *, chat_template: bool = True) -> None:
        """chat_template: False renders plain text, whatever the tokenizer has."""
        self.instruction = instruction.strip()
        self._tokenizer = tokenizer
        self.has_template = chat_template and bool(getattr(tokenizer, "chat_template", None))
        rendered = self.render([], PLACE, FIXED_DAY).text
        self.lead_in, found, self.closing = rendered.partition(PLACE)
        if not found:
            raise ConfigError("the model's chat template drops the user's text: use another model")

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


def _plain_message(message: Message, name: str) -> dict[str, Any]:
    """Return the message with its content as one string, its calls' arguments as objects."""
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{name} must be a mapping with 'role' and 'content', not {message!r:.40}"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{name}.role must be a non-empty string, not {role!r:.40}")
    plain = dict(message)
    if isinstance(calls := message.get("tool_calls"), Sequence) and calls:
        plain["tool_calls"] = [with_object(call) for call in calls]
    if content is not None or not calls:
        plain["content"] = plain_content(content, f"{name}.content")
    return plain


def plain_content(content: object, name: str) -> str:
    """Return content as one string: most templates print lists as code. Raises PromptError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"{name} must be a string or a list of text parts, not {content!r:.40}")
    return "\n".join(_part_text(part, f"{name}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        told = "a string or {'type': 'text', 'text': ...}"
        raise PromptError(f"{name} must be {told}: only text can be blended")
    if not isinstance(text := part.get("text"), str):
        raise PromptError(f"{name}.text must be a string, not {text!r:.40}")
    return text
