"""Runs requests on a model in steps, one at a time, so that others run in between.

Requests take priority over background filling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from cacheblend_rag.blend.attention import without_cudnn
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.lifetime import working
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.kv.fetch import LayerSource

PATIENCE_SECONDS = 0.05
"""Seconds between checks whether a request that waits for its chunks was cancelled."""

STALLED_SECONDS = 0.5
"""Seconds of waiting for a chunk after which a request no longer keeps others from beginning."""

QUIET_SECONDS = 0.02
"""Seconds without use after which a model counts as idle; requests pause for less."""

_locks: WeakKeyDictionary[PreTrainedModel, PriorityLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()

T = TypeVar("T")


class PriorityLock:
    """A lock around one model: requests hold it for a layer or a decode step at a time."""

    def __init__(self) -> None:
        self._driving, self._counting = threading.RLock(), threading.Lock()
        self._wanted, self._left_at = 0, -QUIET_SECONDS

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Keep background work from the lock, without holding it."""
        with self._counting:
            self._wanted += 1
        try:
            yield
        finally:
            with self._counting:
                self._wanted, self._left_at = self._wanted - 1, time.monotonic()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock for a request."""
        with self.wanted(), self._driving:
            yield

    @property
    def is_quiet(self) -> bool:
        """Whether no request has used the model for long enough that it is idle."""
        return self._quiet_in() <= 0

    @contextmanager
    def left_over(self, patience_seconds: float) -> Iterator[bool]:
        """Hold the lock for background work if the model gets idle within ``patience_seconds``.

        Yields whether it did. A request that wants the lock meanwhile waits for its release.
        """
        end = time.monotonic() + patience_seconds
        while (wait := self._quiet_in()) > 0 and time.monotonic() < end:
            time.sleep(wait)
        is_mine = wait <= 0 and self._driving.acquire(blocking=False)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._driving.release()

    def _quiet_in(self) -> float:
        """Return the seconds until the model counts as idle."""
        with self._counting:
            if self._wanted:
                return QUIET_SECONDS
            return self._left_at + QUIET_SECONDS - time.monotonic()


def lock_of(model: PreTrainedModel) -> PriorityLock:
    """Return the lock of all engines around a model: running its layers patches it briefly."""
    with _locks_lock:
        return _locks.setdefault(model, PriorityLock())


@contextmanager
def inference() -> Iterator[None]:
    """Run the model without gradients, and its attention without cuDNN."""
    with torch.no_grad(), without_cudnn():
        yield


def run_steps(
    lock: PriorityLock,
    steps: Steps[T],
    cancel: Cancellation,
    *,
    source: LayerSource | None = None,
    stall: Callable[[], None] = lambda: None,
) -> T | None:
    """Run a request's steps, and wait in between for the KV of the next one.

    stall: called when that takes longer than ``STALLED_SECONDS``.
    Returns None if it is cancelled meanwhile.
    """
    while not cancel.is_set():
        with working(), lock.taken(), inference():
            try:
                next(steps)
            except StopIteration as done:
                return cast(T, done.value)
        stalled_at = time.monotonic() + STALLED_SECONDS
        while source is not None and not source.wait(PATIENCE_SECONDS):
            if cancel.is_set():
                return None
            if time.monotonic() > stalled_at:
                stall()
    return None


def in_turns(lock: PriorityLock, steps: Iterator[T]) -> Iterator[T]:
    """Run each step under the lock, so that other requests run in between."""
    while True:
        with working(), lock.taken(), inference():
            try:
                item = next(steps)
            except StopIteration:
                return
        yield item


def run_when_idle(lock: PriorityLock, steps: Steps[T]) -> Steps[T]:
    """Run each step under the lock while no request wants the model; yields in between."""
    while True:
        with lock.left_over(PATIENCE_SECONDS) as is_mine:
            if is_mine:
                with working(), inference():
                    try:
                        next(steps)
                    except StopIteration as done:
                        return cast(T, done.value)
        yield


def in_idle_turns(lock: PriorityLock, steps: Iterator[T | None]) -> Iterator[T | None]:
    """Run each step under the lock while no request wants the model; None while one does."""
    while True:
        item: T | None = None
        with lock.left_over(PATIENCE_SECONDS) as is_mine:
            if is_mine:
                with working(), inference():
                    try:
                        item = next(steps)
                    except StopIteration:
                        return
        yield item
