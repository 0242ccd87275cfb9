"""Work for an engine's idle time: a bounded queue of jobs, and the thread that runs them.

A job is a generator. Each of its steps begins only while no request is running. A request does not
end a job, only pauses it; closing the engine ends it between two steps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from cacheblend_rag.errors import CacheBlendError

logger = logging.getLogger(__name__)

MOST_JOBS = 64
"""Most jobs that may wait; further ones are refused."""
REST_SECONDS = 60.0
"""Seconds after a failure in which jobs of its kind are refused."""
LOOK_SECONDS = 0.02
"""Seconds between checks whether the engine is idle."""

_thread = threading.local()
"""``is_idle`` is set in the threads of idle queues: requests made by jobs are idle work, too."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, eq=False)
class IdleJob:
    """Work for an engine's idle time.

    Args:
        kind: name of the kind of work; after a failure, jobs of its kind are refused for a while.
        steps: called in the queue's thread to begin the work. Every ``yield`` ends a step; a step
            should take no longer than a request may wait.
        priority: jobs with a higher one run first; equal ones in the order in which they were
            added.
        when_failed: the beginning of the warning after a failure.
        ended: called once the job is over: done, failed, ended by closing, or never begun.
        waits: whether its steps wait until no request is running. False is for steps that only
            hand work to somebody who does it last, such as vLLM's workers.
    """

    kind: str
    steps: Callable[[], Generator[object, None, None]]
    priority: int = 0
    when_failed: str = "idle work is not done"
    ended: Callable[[], None] = _nothing
    waits: bool = True


class Activity:
    """Counts the running requests of an engine and its siblings.

    Requests of idle jobs do not count, since the jobs would wait for themselves.
    """

    def __init__(self) -> None:
        self._lock, self._requests = threading.Lock(), 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        return not self._requests

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request while in this context."""
        counted = 0 if getattr(_thread, "is_idle", False) else 1
        with self._lock:
            self._requests += counted
        try:
            yield
        finally:
            with self._lock:
                self._requests -= counted


class IdleQueue:
    """Runs jobs one after another, a step at a time, while ``engine`` is idle.

    Its thread starts with the first job and ends when none waits. Adding a job raises nothing.
    ``engine``, an Engine, may be a weak proxy: when it is freed, its idle work is dropped.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._pid = engine, os.getpid()
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._jobs: list[IdleJob] = []
        self._resting: dict[str, float] = {}
        self._worker: threading.Thread | None = None

    def accepts(self, kind: str) -> bool:
        """Whether jobs of a kind are accepted: not once closed, in a fork, or after a failure."""
        is_over = self._ending.is_set() or os.getpid() != self._pid
        return not is_over and monotonic() >= self._resting.get(kind, 0.0)

    def add(self, job: IdleJob) -> bool:
        """Queue a job; returns whether it was accepted."""
        if not self.accepts(job.kind):
            return False
        with self._lock:
            # Again, under the lock: close() drops only the jobs that were added before it.
            if len(self._jobs) >= MOST_JOBS or not self.accepts(job.kind) or not self._start(job):
                return False
            self._jobs.append(job)
            return True

    def close(self) -> None:
        """End the running job at its next step, and drop all others. Does nothing in a fork."""
        if os.getpid() != self._pid:
            return  # its thread, and a holder of its lock, exist in the parent only
        with self._lock:
            self._ending.set()
            worker = self._worker
        self._drop(lambda job: True)
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _start(self, job: IdleJob) -> bool:
        """Start the thread if none is running; returns whether one is."""
        if self._worker is not None:
            return True
        worker = threading.Thread(target=self._run, name="cacheblend-idle", daemon=True)
        try:
            worker.start()  # it waits for the lock that the caller holds
        except RuntimeError as error:  # the system has no thread left
            logger.warning("%s: %s", job.when_failed, error)
            return False
        self._worker = worker
        return True

    def _drop(self, is_meant: Callable[[IdleJob], bool]) -> None:
        """Drop waiting jobs; their ``ended`` runs without the lock, since it may add others."""
        with self._lock:
            dropped = [job for job in self._jobs if is_meant(job)]
            self._jobs = [job for job in self._jobs if not is_meant(job)]
        for job in dropped:
            _end(job)

    # In the thread

    def _run(self) -> None:
        _thread.is_idle = True
        while (job := self._next()) is not None:
            try:
                self._do(job)
            except ReferenceError:  # the engine was dropped, without being closed
                self._ending.set()
            except BaseException as error:  # of a job of anybody's: the thread must go on
                self._rest(job, error)
            _end(job)

    def _next(self) -> IdleJob | None:
        with self._lock:
            if not self._jobs:
                self._worker = None
                return None
            job = max(self._jobs, key=lambda job: job.priority)  # the first of equal ones
            self._jobs.remove(job)
            return job

    def _do(self, job: IdleJob) -> None:
        if not self._may_go_on(job):
            return
        with closing(job.steps()) as steps:
            for _ in steps:
                if not self._may_go_on(job):
                    return

    def _may_go_on(self, job: IdleJob) -> bool:
        """Wait until a job may take its next step; returns False once the engine is closed."""
        while not self._ending.is_set() and self._engine.is_open:
            if not job.waits or self._engine._is_idle():
                return True
            self._ending.wait(LOOK_SECONDS)
        return False

    def _rest(self, failed: IdleJob, error: BaseException) -> None:
        """Refuse jobs of a failed job's kind for a while."""
        if self._ending.is_set():
            return
        self._resting[failed.kind] = monotonic() + REST_SECONDS
        self._drop(lambda job: job.kind == failed.kind)
        logger.warning(
            "%s for %g s: %s",
            failed.when_failed,
            REST_SECONDS,
            error,
            exc_info=None if isinstance(error, CacheBlendError) else error,
        )


def _end(job: IdleJob) -> None:
    """Call a job's ``ended``; what it raises is logged, since others depend on the caller."""
    try:
        job.ended()
    except Exception:
        logger.exception("the end of idle work %r failed", job.kind)
