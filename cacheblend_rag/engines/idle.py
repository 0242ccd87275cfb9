"""Work for an engine's idle time: a bounded queue of jobs, and the thread that runs them.

A job is a generator: each step of it begins only while no request is at work, and whatever ends the
job (a request does not; closing the engine does) ends it between two steps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from cacheblend_rag.errors import CacheBlendError

logger = logging.getLogger(__name__)

MOST_JOBS = 64
"""Jobs that wait at most; further ones are not taken."""
REST_SECONDS = 60.0
"""After a failure no job of its kind is taken for so long."""
LOOK_SECONDS = 0.02
"""Between two looks at whether the engine is idle."""

_thread = threading.local()
"""``is_idle`` is set in the threads of idle queues: what jobs ask an engine is idle work, too."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, eq=False)
class IdleJob:
    """Work for an engine's idle time.

    Args:
        kind: what kind of work it is; after a failure, jobs of its kind are not taken for a while.
        steps: begins the work, in the queue's thread. Every ``yield`` ends a step; each should take
            no longer than a request may wait.
        priority: jobs with a higher one go first; of equal ones, those that were added first.
        when_failed: what a warning says first, once a job of this kind has failed.
        ended: is called once the job is over: done, failed, ended by closing, or never begun.
    """

    kind: str
    steps: Callable[[], Generator[object, None, None]]
    priority: int = 0
    when_failed: str = "idle work is not done"
    ended: Callable[[], None] = _nothing


class IdleEngine(Protocol):
    """What a queue asks of the engine that it works for."""

    @property
    def is_open(self) -> bool:
        """Whether its idle time is still of use."""

    def _is_idle(self) -> bool:
        """Whether no request is at work."""


class Activity:
    """Counts the requests that are at work on an engine and its siblings.

    What idle jobs ask the engine does not count: they would wait for themselves.
    """

    def __init__(self) -> None:
        self._lock, self._requests = threading.Lock(), 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is at work."""
        return not self._requests

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request as long as this is entered."""
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

    Its thread starts with the first job and ends when none waits. Nothing is raised to whoever adds
    a job. ``engine`` may be a weak proxy: with the engine, its idle work is dropped.
    """

    def __init__(self, engine: IdleEngine) -> None:
        self._engine, self._pid = engine, os.getpid()
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._jobs: list[IdleJob] = []
        self._resting: dict[str, float] = {}
        self._worker: threading.Thread | None = None

    def accepts(self, kind: str) -> bool:
        """Whether jobs of a kind are taken: not once closed or in a fork, nor after a failure."""
        is_over = self._ending.is_set() or os.getpid() != self._pid
        return not is_over and monotonic() >= self._resting.get(kind, 0.0)

    def add(self, job: IdleJob) -> bool:
        """Queue a job; returns whether it was taken."""
        if not self.accepts(job.kind):
            return False
        with self._lock:
            # Again, under the lock: whoever closes the queue takes out what was added until then.
            if len(self._jobs) >= MOST_JOBS or not self.accepts(job.kind) or not self._start(job):
                return False
            self._jobs.append(job)
            return True

    def close(self) -> None:
        """End the job that runs at its next step, and drop all others. Does nothing in a fork."""
        if os.getpid() != self._pid:
            return  # its thread, and whoever held its lock, are the parent's
        with self._lock:
            self._ending.set()
            worker = self._worker
        self._drop(lambda job: True)
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _start(self, job: IdleJob) -> bool:
        """Start the thread where there is none; returns whether there is one."""
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
        """Give up jobs that wait. They are told without the lock: they may add others."""
        with self._lock:
            dropped = [job for job in self._jobs if is_meant(job)]
            self._jobs = [job for job in self._jobs if not is_meant(job)]
        for job in dropped:
            job.ended()

    # In the thread

    def _run(self) -> None:
        _thread.is_idle = True
        while (job := self._next()) is not None:
            try:
                self._do(job)
            except ReferenceError:  # the engine was dropped, without being closed
                self._ending.set()
            except Exception as error:
                self._rest(job, error)
            job.ended()

    def _next(self) -> IdleJob | None:
        with self._lock:
            if not self._jobs:
                self._worker = None
                return None
            job = max(self._jobs, key=lambda job: job.priority)  # the first of equal ones
            self._jobs.remove(job)
            return job

    def _do(self, job: IdleJob) -> None:
        if not self._wait_until_idle():
            return
        with closing(job.steps()) as steps:
            for _ in steps:
                if not self._wait_until_idle():
                    return

    def _wait_until_idle(self) -> bool:
        """Wait for the engine's idle time; returns False once there is none to come."""
        while not self._ending.is_set() and self._engine.is_open:
            if self._engine._is_idle():
                return True
            self._ending.wait(LOOK_SECONDS)
        return False

    def _rest(self, failed: IdleJob, error: Exception) -> None:
        """Take no job like the one that failed for a while."""
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
