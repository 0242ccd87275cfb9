"""The tools of a request: the form that holds an answer to a call, and the calls in an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.structured import (
    MOST_DEPTH,
    StructuredOutputs,
    bounded_schema,
    is_deep,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chat import ChatPrompt
from cacheblend_rag.text.tool_calls import OPENINGS, ContentStream, find_calls
from cacheblend_rag.text.tools import Tool, ToolCall, named_tool, tool_name

DEFINED = ("$defs", "definitions")
"""Where a JSON schema defines others by name."""
WHOLE = ("$schema", "$id")
"""Keywords of a whole document: within another one they would change what references mean."""


@dataclass(frozen=True)
class ToolUse:
    """What one request's answer may call.

    chat: the messages, and the tools. tokenizer: of the model.
    """

    chat: ChatPrompt
    tokenizer: Any

    @classmethod
    def of(cls, prepared: PreparedPrompt, tokenizer: Any) -> Self | None:
        """Return the tools of a prepared prompt, None if its model is told of none."""
        source = prepared.source
        chat = source.prompt if isinstance(source, TurnPrompt) else source
        if not isinstance(chat, ChatPrompt) or not chat.told_tools:
            return None
        return cls(chat, tokenizer)

    def constrained(self, sampling: ResolvedSampling) -> ResolvedSampling:
        """Return sampling that holds the answer to a call if the request insists on one.

        Where it may call or answer, ``structured_outputs`` is the form of an answer without calls,
        as in vLLM and OpenAI's API: JSON may be either. A form that is no JSON rules calls out.
        """
        choice, form = self.chat.tool_choice, sampling.structured_outputs
        answer = form if self.may_answer_in(form) else None
        if choice == "auto" and answer is None:
            return sampling
        wanted = named_tool(choice)
        tools = [one for one in self.chat.tools if wanted in (None, tool_name(one))]
        held_to = call_form(tools, sampling.max_tokens, answer)
        return sampling.with_changes(structured_outputs=held_to)

    def may_answer_in(self, form: StructuredOutputs | None) -> bool:
        """Whether an answer may be in a form, or a call."""
        return self.chat.tool_choice == "auto" and form is not None and form.is_json

    def read(
        self, text: str, token_ids: Sequence[int], *, is_json: bool
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Return an answer's text without its calls, and the calls; one if the chat says so.

        is_json: whether it was held to JSON, so that calls are plain JSON, too.
        """
        if not is_json and self._hides_an_opening(token_ids):
            whole = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))
            content, calls = find_calls(whole, self._known)
        else:
            content, calls = find_calls(text, self._known, is_json=is_json)
        if not calls:
            return text, ()
        return content, calls if self.chat.parallel_tool_calls else calls[:1]

    def content_stream(self, *, is_json: bool) -> ContentStream:
        """Return what tells the answer's content from its calls; is_json: as for ``read``."""
        return ContentStream(self._known, is_json=is_json)

    @property
    def _known(self) -> frozenset[str]:
        return frozenset(map(tool_name, self.chat.tools))

    def _hides_an_opening(self, token_ids: Sequence[int]) -> bool:
        """Whether a special token that opens calls is missing in the text."""
        openings = {text for text in OPENINGS if text in self.tokenizer.all_special_tokens}
        special = set(self.tokenizer.convert_tokens_to_ids(list(openings)))
        return not special.isdisjoint(token_ids)


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
        schemas |= _hoisted(bounded_schema(_parameters(tool), max_tokens), place)
        of_call = {"name": {"const": tool_name(tool)}, "arguments": {"$ref": f"#/$defs/{place}"}}
        forms.append({"type": "object", "properties": of_call, "required": list(of_call)})
    if answer is not None:
        own = answer.schema
        schemas |= _hoisted(_open(own), "answer") if isinstance(own, Mapping) else {"answer": own}
        forms.append({"$ref": "#/$defs/answer"})
    one = forms[0] if len(forms) == 1 else {"anyOf": forms}
    named = "tools" if answer is None else f"tools or {answer.written_as}"
    return StructuredOutputs(json={**one, "$defs": schemas}, written_as=named)


def _hoisted(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a schema, and those that it defines, by their places in another one's ``$defs``."""
    named = {key: schema[key] for key in DEFINED if isinstance(schema.get(key), Mapping)}
    own = {key: value for key, value in schema.items() if key not in named and key not in WHOLE}
    found: dict[str, Any] = {place: own}
    places = dict[str, str]()
    for key, defined in named.items():
        for name, value in defined.items():
            found[f"{place}_{name}"] = value
            places[f"#/{key}/{_escaped(name)}"] = f"#/$defs/{place}_{_escaped(name)}"

    def moved(reference: str) -> str:
        head = "/".join(reference.split("/", 3)[:3])
        if head in places:
            return places[head] + reference[len(head) :]
        own_part = reference == "#" or reference.startswith("#/")
        return f"#/$defs/{place}{reference[1:]}" if own_part else reference

    return {key: _with_references(value, moved) for key, value in found.items()}


def _open(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema of any object with that said: xgrammar closes what a reference leads to."""
    is_any = schema.get("type") == "object" and "properties" not in schema
    return {"additionalProperties": True, **schema} if is_any else schema


def _escaped(name: str) -> str:
    """Return a name as JSON pointers write it."""
    return name.replace("~", "~0").replace("/", "~1")


def _with_references(value: Any, moved: Callable[[str], str]) -> Any:
    """Return a schema, or a part of one, in which each reference was moved."""
    if isinstance(value, Mapping):
        found = {key: _with_references(one, moved) for key, one in value.items()}
        if isinstance(found.get("$ref"), str):
            found["$ref"] = moved(found["$ref"])
        return found
    return [_with_references(one, moved) for one in value] if isinstance(value, list) else value


def _parameters(tool: Tool) -> Mapping[str, Any]:
    found = tool["function"].get("parameters") or {}
    return {"type": "object", "properties": {}, **found}
