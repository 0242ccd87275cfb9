"""The tools of a request: the form that holds an answer to a call, and the calls in an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.structured import MOST_DEPTH, StructuredOutputs, bounded_schema, is_deep
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chat import ChatPrompt
from cacheblend_rag.text.tool_calls import MARKS, ContentStream, cut_call, find_calls
from cacheblend_rag.text.tools import (
    Tool,
    ToolCall,
    ToolChoice,
    check_choice,
    named_tool,
    tool_name,
)

CHOICES: Mapping[Any, ToolChoice] = {
    None: "auto",
    False: "auto",
    "auto": "auto",
    "none": "none",
    "any": "required",
    "required": "required",
    True: "required",
}
"""Libraries' words for how tools are chosen, with OpenAI's."""
WHOLE = ("$schema", "$id")
"""Keywords of a whole document: within another one they would change what references mean."""


def read_tool_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return a ``tool_choice`` in the OpenAI form, whichever library's it is.

    Args:
        given: in that form; None or False for ``auto``; ``any`` or True for ``required``; a tool's
            name, or a mapping with it as ``name``.
        tools: what is chosen from, in the OpenAI form.

    Raises:
        PromptError: when it is none of them, or there is no such tool.
    """
    name = given.get("name", given) if isinstance(given, Mapping) else given
    choice: Any = name
    if isinstance(name, str) and (name in map(named_tool, tools) or name not in CHOICES):
        choice = {"type": "function", "function": {"name": name}}
    elif not isinstance(name, Mapping):
        choice = CHOICES.get(name, name)
    check_choice(choice, tools)
    return cast(ToolChoice, choice)


def read_arguments(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are no JSON object (cut off, say)."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class ToolUse:
    """What one request's answer may call.

    chat: the messages, and the tools. sampling: as it was asked for. tokenizer: of the model.
    """

    chat: ChatPrompt
    sampling: ResolvedSampling
    tokenizer: Any

    @classmethod
    def of(
        cls, prepared: PreparedPrompt, sampling: ResolvedSampling, tokenizer: Any
    ) -> Self | None:
        """Return the tools of a prepared prompt, None if its model is told of none."""
        source = prepared.source
        chat = source.prompt if isinstance(source, TurnPrompt) else source
        if not isinstance(chat, ChatPrompt) or not chat.told_tools:
            return None
        return cls(chat, sampling, tokenizer)

    @property
    def may_answer_in_form(self) -> bool:
        """Whether it may call, or else answer in the JSON form that the request asks for."""
        return self.chat.tool_choice == "auto" and _is_json(self.sampling)

    @cached_property
    def constrained(self) -> ResolvedSampling:
        """Sampling that holds the answer to a call if the request insists on one.

        Where it may call or answer, ``structured_outputs`` is the form of an answer without calls,
        as in vLLM and OpenAI's API: JSON may be either. A form that is no JSON rules calls out.
        """
        choice = self.chat.tool_choice
        answer = self.sampling.structured_outputs if self.may_answer_in_form else None
        if choice == "auto" and answer is None:
            return self.sampling
        wanted = named_tool(choice)
        tools = [one for one in self.chat.tools if wanted in (None, tool_name(one))]
        held_to = call_form(tools, self.sampling.max_tokens, answer)
        return self.sampling.with_changes(structured_outputs=held_to)

    def read(self, text: str, token_ids: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return an answer's text without its calls, and the calls; one if the chat says so.

        A call that must be made and is cut off is one as far as it goes, and never text.
        """
        is_json = _is_json(self.constrained)
        if not is_json and self.hides_mark(token_ids):
            whole = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))
            content, calls = find_calls(whole, self._known)
        else:
            content, calls = find_calls(text, self._known, is_json=is_json)
        if not calls:
            is_forced = self.chat.tool_choice != "auto"
            return ("", cut_call(text, self._known)) if is_forced else (text, ())
        return content, calls if self.chat.parallel_tool_calls else calls[:1]

    def content_stream(self) -> ContentStream:
        """Return a filter that leaves calls out of a streamed answer."""
        return ContentStream(self._known, is_json=_is_json(self.constrained))

    @property
    def _known(self) -> frozenset[str]:
        return frozenset(map(tool_name, self.chat.tools))

    def hides_mark(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens hold a mark of tool calls that decoding skips as a special token."""
        return not self._special_marks.isdisjoint(token_ids)

    @cached_property
    def _special_marks(self) -> frozenset[int]:
        marks = [text for text in MARKS if text in self.tokenizer.all_special_tokens]
        return frozenset(self.tokenizer.convert_tokens_to_ids(marks))


def _is_json(sampling: ResolvedSampling) -> bool:
    form = sampling.structured_outputs
    return form is not None and form.is_json


def call_form(
    tools: Sequence[Tool], max_tokens: int, answer: StructuredOutputs | None = None
) -> StructuredOutputs:
    """Return the form of one call of one of the tools: ``{"name": ..., "arguments": ...}``.

    Strings without a maxLength get one, so that the call ends within ``max_tokens``. answer: JSON
    that may stand in place of a call. Raises ConfigError for a schema that is nested too deep.
    """
    schemas: dict[str, Any] = {}
    forms = list[dict[str, Any]]()
    for i, tool in enumerate(tools):
        place = f"arguments_{i}"
        if is_deep(_parameters(tool)):
            raise ConfigError(f"tools[{i}].function.parameters has more than {MOST_DEPTH} levels")
        schemas[place] = _within(bounded_schema(_parameters(tool), max_tokens), place)
        of_call = {"name": {"const": tool_name(tool)}, "arguments": {"$ref": f"#/$defs/{place}"}}
        forms.append({"type": "object", "properties": of_call, "required": list(of_call)})
    if answer is not None:
        schemas["answer"] = _within(_open(answer.schema), "answer")
        forms.append({"$ref": "#/$defs/answer"})
    one = forms[0] if len(forms) == 1 else {"anyOf": forms}
    named = "tools" if answer is None else f"tools or {answer.written_as}"
    return StructuredOutputs(json={**one, "$defs": schemas}, written_as=named)


def _within(schema: Any, place: str) -> Any:
    """Return a schema as it stands among ``$defs`` of another one, at a place."""
    if not isinstance(schema, Mapping):
        return schema
    return _placed({key: one for key, one in schema.items() if key not in WHOLE}, place)


def _placed(value: Any, place: str) -> Any:
    """Return a schema, or a part of one, whose references to itself lead to its place."""
    if isinstance(value, list):
        return [_placed(one, place) for one in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _placed(one, place) for key, one in value.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = f"#/$defs/{place}{reference[1:]}"
    return found


def _open(schema: Any) -> Any:
    """Return a schema of any object with that said: xgrammar closes what a reference leads to."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object" or "properties" in schema:
        return schema
    return {"additionalProperties": True, **schema}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    found = tool["function"].get("parameters") or {}
    return {"type": "object", "properties": {}, **found}
