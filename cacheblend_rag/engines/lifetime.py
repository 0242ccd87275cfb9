"""Whether an engine is open, its idle work, and native work at the end of the interpreter.

A daemon thread that returns from native code after the interpreter has ended is killed there,
inside frames of C++ and Rust, which abort the process (SIGABRT). So threads announce such work; at
exit, running work may finish, and new work blocks until the process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread, local
from typing import Any, TypeVar

from cacheblend_rag.errors import CacheBlendError, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSED = "the engine is closed: open another"
ITS_OWN_THREAD = (
    "the engine is called in the thread that makes its answers (a hook after an answer?): call it "
    "from another thread"
)
WAIT_SECONDS = 10.0


class Lifetime:
    """The lifetime of an engine, which ends with that of the engine it is a sibling of.

    elder: the lifetime of the engine that a sibling was made from, None for any other engine.
    """

    def __init__(self, elder: Lifetime | None = None) -> None:
        self.elder = elder
        self._pid, self._closed = os.getpid(), False

    @property
    def is_open(self) -> bool:
        """Whether neither this engine nor the one it is a sibling of was closed."""
        return not self._closed and (self.elder is None or self.elder.is_open)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that opened the engine."""
        return os.getpid() != self._pid

    def end(self) -> bool:
        """Close; returns False if it was closed already."""
        was_closed, self._closed = self._closed, True
        return not was_closed

    def check(self) -> None:
        """Raise ConfigError if the engine is closed, or in a forked process."""
        if not self.is_open:
            raise ConfigError(CLOSED)
        if self.is_forked:
            raise ConfigError(
                f"the engine was opened in process {self._pid}, and its threads do not exist"
                f" in this forked one: open an engine in process {os.getpid()}"
            )


class _Gate:
    """Counts running work, and closes permanently."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._closed = False

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._working, WAIT_SECONDS)


_gate = _Gate()
working = _gate.open
"""``with working():`` around a short piece of native work; not within another."""

atexit.register(_gate.close)


async def in_thread(work: Callable[[], T]) -> T:
    """Return what work returns in a thread of its own, which never holds up the process's exit.

    Cancelling does not stop the work; then its result is lost.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], outcome: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if done.done() else settle(outcome))

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # the request's, whatever it is
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    threading.Thread(target=run, name="cacheblend-work", daemon=True).start()
    return await done


# Idle work: a bounded queue of jobs, and the thread that runs them. A job is a generator. Each of
# its steps begins only while no request is running. A request does not end a job, only pauses it;
# closing the engine ends it between two steps.

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
    """Runs background jobs in order, one step at a time, while the engine serves no request.

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
