"""Hooks that are called with each answer of an engine, before its caller gets it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from cacheblend_rag.engines.answer import Generation, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

AnswerHook = Callable[[Request, Generation], Generation | None]
"""Called with a request (its prompt is ``request.prepared``) and its answer, which may be a
cancelled one. Returns None, or a changed answer, with other reports of chunks for example. It runs
in the thread that made the answer, and other requests may wait for it: longer work, and every call
of the engine, belongs in an IdleJob."""


class RequestWatcher:
    """An AnswerHook that also sees requests begin, and requests that get no answer.

    Each method may be left as it is. One request has the same ``request_id`` in all of them.
    """

    def begins(self, request: Request) -> Request | None:
        """See a request before its work begins, in its caller's thread and context (contextvars).

        A request of a batch that found no memory beside the others begins twice.

        Args:
            request: checked and prepared.

        Returns:
            None, or a changed request, with other headers for example.
        """

    def __call__(self, request: Request, answer: Generation) -> Generation | None:
        """See an answer, as any AnswerHook.

        Args:
            request: as it was served.
            answer: as the hooks before left it; may be a cancelled one.

        Returns:
            None, or a changed answer.
        """

    def failed(self, request: Request, error: BaseException) -> None:
        """See that a request has ended without an answer.

        When a batch fails, its requests that were answered before fail with it.

        Args:
            request: as it was before ``begins`` changed it.
            error: what ended it. GeneratorExit, CancelledError or KeyboardInterrupt if nobody waits
                for its answer any more.
        """


class AfterAnswer:
    """The hooks of one engine, called in the order in which they were added.

    A hook's exceptions are logged, once per hook, and do not fail the request.
    """

    def __init__(self) -> None:
        self._hooks: list[AnswerHook] = []
        self._watchers: list[RequestWatcher] = []
        self._failed: set[int] = set()  # by id: hooks need not be hashable

    def add(self, hook: AnswerHook) -> None:
        """Call a hook with each answer from now on, after the hooks added before."""
        self._hooks.append(hook)
        if isinstance(hook, RequestWatcher):
            self._watchers.append(hook)

    def begin(self, request: Request) -> Request:
        """Tell watchers that a request begins; returns it as the last of them left it."""
        for watcher in tuple(self._watchers):
            request = self._called(watcher, watcher.begins, request) or request
        return request

    def run(self, request: Request, answer: Generation) -> Generation:
        """Call all hooks; returns the answer as the last of them left it."""
        for hook in tuple(self._hooks):
            answer = self._called(hook, hook, request, answer) or answer
        return answer

    def fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """Tell watchers that requests have ended with an error."""
        for request in requests if self._watchers else ():
            for watcher in tuple(self._watchers):
                self._called(watcher, watcher.failed, request, error)

    def _called(
        self, hook: AnswerHook, method: Callable[..., T | None], *given: object
    ) -> T | None:
        """Return what a hook's method returns; None if it fails."""
        try:
            return method(*given)
        except Exception:
            if id(hook) not in self._failed:
                self._failed.add(id(hook))
                logger.exception("%r failed; the request is served anyway", hook)
            return None
