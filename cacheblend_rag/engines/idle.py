"""Work for an engine's idle time: a bounded queue of jobs, and the thread that runs them.

A job is a generator. Each of its steps begins only while no request is running. A request does not
end a job, only pauses it; closing the engine ends it between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread, local
from typing import Any

from cacheblend_rag.errors import CacheBlendError

logger = logging.getLogger(__name__)

MOST_JOBS = 64
LOOK_SECONDS = 0.02
"""Seconds between checks whether the engine is idle."""

_here = local()
"""``is_idle`` is set in the threads of idle queues: requests made by jobs are idle work, too."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, eq=False)
class IdleJob:
    """Work for an engine's idle time.

    Args:
        kind: name of the kind of work, in the log.
        steps: called in the queue's thread to begin the work. Every ``yield`` ends a step; a step
            should take no longer than a request may wait.
        priority: jobs with a higher one run first; equal ones in the order in which they were
            added.
        ended: called once the job is over: done, failed, ended by closing, or never begun.
        waits: whether its steps wait until no request is running. False is for steps that only
            hand work to somebody who does it last, such as vLLM's workers.
        most: while so many of its kind wait, it is refused.
    """

    kind: str
    steps: Callable[[], Generator[object, None, None]]
    priority: int = 0
    ended: Callable[[], None] = _nothing
    waits: bool = True
    most: int = MOST_JOBS


class Activity:
    """Counts the running requests of an engine and its siblings.

    Requests of idle jobs do not count, since the jobs would wait for themselves.
    """

    def __init__(self) -> None:
        self._lock, self._requests = Lock(), 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        return not self._requests

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request while in this context."""
        counted = 0 if getattr(_here, "is_idle", False) else 1
        with self._lock:
            self._requests += counted
        try:
            yield
        finally:
            with self._lock:
                self._requests -= counted


class IdleQueue:
    """Runs jobs one after another, a step at a time, while ``engine`` is idle.

    Its thread begins with the first job and ends when none waits. ``engine``, an Engine, may be a
    weak proxy: when it is freed, its idle work is dropped.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock, self._ending = Lock(), Event()
        self._jobs: list[IdleJob] = []
        self._failing: set[str] = set()
        self._thread: Thread | None = None

    def add(self, job: IdleJob) -> bool:
        """Queue a job; returns False once closed, and while too many of its kind wait."""
        with self._lock:
            waiting = sum(one.kind == job.kind for one in self._jobs)
            if self._ending.is_set() or waiting >= job.most:
                return False
            if self._thread is None:
                thread = Thread(target=self._run, name="cacheblend-idle", daemon=True)
                thread.start()  # it waits for the lock
                self._thread = thread
            self._jobs.append(job)
            return True

    def close(self) -> None:
        """End the running job at its next step, and all others before they begin."""
        with self._lock:
            self._ending.set()
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    # In the thread

    def _run(self) -> None:
        _here.is_idle = True
        while (job := self._next()) is not None:
            try:
                self._do(job)
            except ReferenceError:  # the engine was dropped, without being closed
                self._ending.set()
            except BaseException as error:  # of a job of anybody's: the thread must go on
                self._tell(job, error)
            else:
                self._failing.discard(job.kind)

    def _next(self) -> IdleJob | None:
        with self._lock:
            if not self._jobs:
                self._thread = None
                return None
            job = max(self._jobs, key=lambda job: job.priority)  # the first of equal ones
            self._jobs.remove(job)
            return job

    def _do(self, job: IdleJob) -> None:
        try:
            if not self._may_go_on(job):
                return
            with closing(job.steps()) as steps:
                for _ in steps:
                    if not self._may_go_on(job):
                        return
        finally:
            job.ended()

    def _may_go_on(self, job: IdleJob) -> bool:
        """Wait until a job may take its next step; returns False once the engine is closed."""
        while not self._ending.is_set() and self._engine.is_open:
            if not job.waits or self._engine._is_idle():
                return True
            self._ending.wait(LOOK_SECONDS)
        return False

    def _tell(self, job: IdleJob, error: BaseException) -> None:
        """Warn of the first of several failures of a kind of work."""
        if self._ending.is_set() or job.kind in self._failing:
            return
        self._failing.add(job.kind)
        trace = None if isinstance(error, CacheBlendError) else error
        logger.warning("idle work %r failed: %s", job.kind, error, exc_info=trace)
