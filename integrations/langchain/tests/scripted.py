"""Engines whose answers are scripted, by holding them to a text, or remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag import (
    ChatPrompt,
    Delta,
    Engine,
    StructuredOutputs,
    TransformersEngine,
    TurnPrompt,
)
from cacheblend_rag.engines.answer import Request


@dataclass(frozen=True)
class Asked:
    """What an answer is scripted for.

    Args:
        role: of the last message. text: of the last message that a user said.
        tools: names of the tools that it may call. forced: whether it must call one.
        has_form: whether it must have a form otherwise.
    """

    role: str
    text: str
    tools: tuple[str, ...]
    forced: bool
    has_form: bool


Call = tuple[str, dict[str, Any]]
Script = Callable[[Asked], str | Call | None]
"""Returns a text, or a call's tool and arguments; None leaves the answer to the model."""


def scripted(engine: Engine, script: Script) -> Engine:
    """Let an engine's answers be what a script says, and return it."""
    start = engine._start

    def follow(request: Request) -> Any:
        asked = _asked(request)
        said = script(asked)
        if said is None:
            return start(request)
        is_json = asked.forced or asked.has_form
        text = said if isinstance(said, str) else call_text(*said, is_json=is_json)
        held = StructuredOutputs(choice=(text,))
        sampling = request.sampling.with_changes(structured_outputs=held)
        return start(replace(request, sampling=sampling))

    vars(engine)["_start"] = follow
    return engine


def remembering(engine: TransformersEngine) -> TransformersEngine:
    """Let an engine compute each greedy answer once, and return it.

    LangChain's tests ask the same question in many ways: invoked, streamed, asynchronously.
    """
    answer, known = engine._answer, dict[Any, list[Delta]]()

    def follow(request: Request, push: Callable[[Delta], None]) -> Iterator[Any]:
        key = (request.prepared.token_ids, request.sampling)
        if request.sampling.temperature or key not in known:
            pieces: list[Delta] = []

            def take(piece: Delta) -> None:
                pieces.append(piece)
                push(piece)

            yield from answer(request, take)
            known[key] = pieces
        else:
            for piece in known[key]:
                push(piece)
        return known[key][-1]

    vars(engine)["_answer"] = follow
    return engine


def call_text(name: str, arguments: dict[str, Any], *, is_json: bool = False) -> str:
    """A call as a model writes it, or is held to."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return call if is_json else f"<tool_call>\n{call}\n</tool_call>"


def _asked(request: Request) -> Asked:
    source: Any = request.prepared.source
    if isinstance(source, TurnPrompt):
        source = source.prompt
    chat = source if isinstance(source, ChatPrompt) else ChatPrompt(source)
    choice = chat.tool_choice
    names = [tool["function"]["name"] for tool in chat.tools]
    if isinstance(choice, dict):
        names = [choice["function"]["name"]]
    users = [message["content"] for message in chat.messages if message["role"] == "user"]
    return Asked(
        role=chat.messages[-1]["role"],
        text=users[-1] if users else "",
        tools=tuple(names) if choice != "none" else (),
        forced=choice not in ("auto", "none"),
        has_form=request.sampling.structured_outputs is not None,
    )
