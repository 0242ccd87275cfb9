"""Hooks that are called with each answer of an engine, before its caller gets it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cacheblend_rag.engines.answer import Generation, Request

logger = logging.getLogger(__name__)

AnswerHook = Callable[[Request, Generation], Generation | None]
"""Called with a request (its prompt is ``request.prepared``) and its answer, which may be a
cancelled one. Returns None, or a changed answer, with other reports of chunks for example. It runs
in the thread that made the answer, and other requests may wait for it: longer work, and every call
of the engine, belongs in an IdleJob."""


class AfterAnswer:
    """The hooks of one engine, called in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[AnswerHook] = []
        self._failed: set[int] = set()  # by id: hooks need not be hashable

    def add(self, hook: AnswerHook) -> None:
        """Call a hook with each answer from now on, after the hooks added before."""
        self._hooks.append(hook)

    def run(self, request: Request, answer: Generation) -> Generation:
        """Call all hooks; returns the answer as the last of them left it.

        A hook's exceptions are logged, once per hook, and do not fail the request.
        """
        for hook in tuple(self._hooks):
            try:
                answer = hook(request, answer) or answer
            except Exception:
                if id(hook) not in self._failed:
                    self._failed.add(id(hook))
                    logger.exception("%r failed after an answer; the answer is served anyway", hook)
        return answer
