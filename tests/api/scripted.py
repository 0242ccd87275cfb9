"""An engine that answers what a test says: pieces of text, calls of tools, log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_rag import SamplingParams, TokenLogprob, ToolCall
from cacheblend_rag.engines.answer import Delta, Request
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer

TEMPLATE = (
    "{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} w9{% endif %}"
)


@dataclass
class Script:
    """What an answer is: the pieces of its text, its calls, the error that it ends with."""

    pieces: Sequence[str] = ("Hello", ", ", "wörld")
    calls: Sequence[ToolCall] = ()
    error: Exception | None = None
    reason: Any = "stop"
    may_go_on: threading.Event | None = None
    sampled: list[SamplingParams] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


class ScriptedEngine(ToyEngine):
    """Answers every prompt by its script, and keeps what it was asked."""

    def __init__(self, tokenizer: Any = None, **settings: Any) -> None:
        if tokenizer is None:
            tokenizer = make_tokenizer()
            tokenizer.chat_template = TEMPLATE
        self.script = Script()
        super().__init__(tokenizer, **settings)

    def _check_sampling(self, sampling: Any) -> None:
        """Its answers have the form that the test says, whatever is asked for."""

    def _answer(self, request: Request) -> Iterator[Delta]:
        script, told = self.script, []
        script.sampled.append(request.sampling)
        script.prompts.append(request.prepared)
        _, report = self._prefilled(request)
        for index, piece in enumerate(script.pieces):
            wanted = request.sampling.logprobs
            top = tuple((at, f"t{at}", -1.0 - at) for at in range(wanted or 0))
            lines = (TokenLogprob(index, piece, -0.5, top),) if wanted is not None else ()
            told += lines
            yield Delta(piece, logprobs=lines)
            while script.may_go_on and not script.may_go_on.wait(0.01):
                if request.cancel.is_set():
                    script.cancelled.set()
                    return
        if script.error:
            raise script.error
        text = "".join(script.pieces)
        last = self._answered(request, text, range(len(script.pieces)), script.reason, report)
        answer = replace(
            last.generation,
            content=text,
            tool_calls=tuple(script.calls),
            logprobs=tuple(told) if request.sampling.logprobs is not None else None,
        )
        yield Delta("", answer)
