"""Continuous batching: all requests that wait for their next token get it from one forward pass.

There is no thread for this: one of the requests that wait runs the model for all of them. Before a
step it waits a moment for those that were just prefilled, or got a token from the last step. One
that comes later, such as a stream whose reader is slow, joins the next step, and is not waited for
again until it comes in time.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import cast
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cacheblend_rag.engines.lifetime import working
from cacheblend_rag.engines.transformers.batched_decode import decode_batch
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.decoding import NextLogits
from cacheblend_rag.engines.transformers.model_steps import PriorityLock, inference, lock_of
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.memory import give_back_unused, lack_of_memory

logger = logging.getLogger(__name__)

PATIENCE = 0.5
"""How long a step waits for the requests of the last one, as a share of the time that took."""
LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 0.005, 0.05

_schedulers: WeakKeyDictionary[PreTrainedModel, DecodeScheduler] = WeakKeyDictionary()
_schedulers_lock = threading.Lock()


def scheduler_of(model: PreTrainedModel) -> DecodeScheduler:
    """Return the scheduler of all engines around a model."""
    lock = lock_of(model)
    with _schedulers_lock:
        return _schedulers.setdefault(model, DecodeScheduler(lock))


@dataclass(eq=False)
class _Decoding:
    """A request that decodes.

    ordinary: how the model is run, as tested when the request was prefilled. wanted_by: when the
    step after its last one begins at the latest. is_prompt: whether it came by then the last time.
    """

    ordinary: OrdinaryPrefill
    cache: FusedCache
    wanted_by: float = math.inf
    is_prompt: bool = True


@dataclass(eq=False)
class _Step:
    """One decode step of a request.

    token_ids: the prompt and the tokens decoded so far. result: (1, vocabulary), or its error.
    """

    request: _Decoding
    token_ids: Sequence[int]
    result: Tensor | Exception | None = None
    is_done: bool = False

    def end(self, result: Tensor | Exception) -> None:
        """Set its result."""
        self.result, self.is_done = result, True

    def run_alone(self) -> None:
        """Run it by itself; an error is its result."""
        request = self.request
        try:
            self.end(request.ordinary.decode(request.cache, self.token_ids))
        except Exception as error:
            self.end(error)
        except BaseException:
            request.cache.crop(len(self.token_ids) - 1)  # another thread will run it
            raise

    def take(self) -> Tensor:
        """Return the logits, or raise the error."""
        result, self.result = self.result, None
        try:
            if isinstance(result, Exception):
                raise result
            return cast(Tensor, result)
        finally:
            del result  # else its traceback would keep it, and the KV, in a circle of references


class DecodeScheduler:
    """Runs the decode steps of all requests around one model together.

    lock: the model's. It is held for one step at a time, so that prefills run in between.
    """

    def __init__(self, lock: PriorityLock) -> None:
        self._lock, mutex = lock, threading.Lock()
        self._stepped, self._gathered = threading.Condition(mutex), threading.Condition(mutex)
        self._mutex = mutex
        self._decoding: set[_Decoding] = set()
        self._waiting: list[_Step] = []
        self._returning: set[_Decoding] = set()
        self._is_led, self._next_by, self._has_warned = False, 0.0, False

    @contextmanager
    def decoding(self, ordinary: OrdinaryPrefill, cache: Cache | None) -> Iterator[NextLogits]:
        """Let a prefilled request take part in steps; yields a function that waits for its next.

        ordinary: how the model is run, as tested when the request was prefilled. If it cannot
        decode several texts together, the request's steps are run alone.
        """
        if not ordinary.decodes_batches or not isinstance(cache, FusedCache):
            yield lambda token_ids: self._run_alone(ordinary, cache, token_ids)
            return
        request = _Decoding(ordinary, cache)
        self._join(request)
        try:
            yield lambda token_ids: self._next_logits(request, token_ids)
        finally:
            self._leave(request)

    def _run_alone(
        self, ordinary: OrdinaryPrefill, cache: Cache | None, token_ids: Sequence[int]
    ) -> Tensor:
        with working(), self._lock.taken(), inference():
            return ordinary.decode(cache, token_ids)

    def _next_logits(self, request: _Decoding, token_ids: Sequence[int]) -> Tensor:
        step = _Step(request, token_ids)
        with self._lock.wanted():
            self._enter(step)
            try:
                while self._must_lead(step):
                    self._lead()
            finally:
                self._withdraw(step)
        return step.take()

    def _join(self, request: _Decoding) -> None:
        with self._mutex:
            self._decoding.add(request)
            self._returning.add(request)
            self._next_by = max(self._next_by, monotonic() + LEAST_PATIENCE_SECONDS)

    def _enter(self, step: _Step) -> None:
        with self._mutex:
            self._waiting.append(step)
            step.request.is_prompt = monotonic() <= step.request.wanted_by
            self._no_longer_returning(step.request)

    def _leave(self, request: _Decoding) -> None:
        with self._mutex:
            self._decoding.discard(request)
            self._no_longer_returning(request)

    def _no_longer_returning(self, request: _Decoding) -> None:
        self._returning.discard(request)
        if not self._returning:
            self._gathered.notify()

    def _withdraw(self, step: _Step) -> None:
        """Let a step whose thread was interrupted not be run."""
        with self._mutex:
            if step in self._waiting:
                self._waiting.remove(step)

    def _must_lead(self, step: _Step) -> bool:
        """Wait until a step is done; return True if this thread has to run it."""
        with self._mutex:
            self._stepped.wait_for(lambda: step.is_done or not self._is_led)
            if step.is_done:
                return False
            self._is_led = True
            return True

    def _lead(self) -> None:
        """Run all waiting decode steps as one forward pass."""
        batch: list[_Step] = []
        began = monotonic()
        try:
            self._gather()
            with working(), self._lock.taken(), inference():
                batch, began = self._taken(), monotonic()
                self._decode(batch)
        finally:
            self._finish(batch, monotonic() - began)

    def _gather(self) -> None:
        """Wait for new requests, and for those of the last step, that have not come yet."""
        with self._mutex:
            left = max(0.0, self._next_by - monotonic())
            self._gathered.wait_for(lambda: not self._returning, left)

    def _taken(self) -> list[_Step]:
        with self._mutex:
            batch, self._waiting = self._waiting, []
            return batch

    def _finish(self, batch: Sequence[_Step], seconds: float) -> None:
        with self._mutex:
            self._is_led = False
            # If this thread was interrupted, another one runs what it had not run.
            self._waiting += [step for step in batch if not step.is_done]
            came = {step.request for step in self._waiting}
            served = self._decoding.intersection(step.request for step in batch) - came
            self._returning = {request for request in served if request.is_prompt}
            patience = max(LEAST_PATIENCE_SECONDS, PATIENCE * seconds)
            self._next_by = monotonic() + min(patience, MOST_PATIENCE_SECONDS)
            for request in served:
                request.wanted_by = self._next_by
            self._stepped.notify_all()

    def _decode(self, batch: Sequence[_Step]) -> None:
        """Run steps together; a batch that fails is halved, down to single steps."""
        if len(batch) == 1:
            batch[0].run_alone()
        elif not self._decodes_together(batch):
            give_back_unused()
            middle = len(batch) // 2
            self._decode(batch[:middle])
            self._decode(batch[middle:])

    def _decodes_together(self, batch: Sequence[_Step]) -> bool:
        """Run steps as one forward pass; returns whether that was possible."""
        stack = cast(TransformersStack, batch[0].request.ordinary.stack)
        last = [step.token_ids[-1] for step in batch]
        try:
            logits = decode_batch(stack, [step.request.cache for step in batch], last)
        except Exception as error:
            if not self._has_warned:
                why = lack_of_memory(error) or f"{type(error).__name__}: {error}"
                logger.warning("%d requests decode in smaller batches: %s", len(batch), why)
            self._has_warned = True
            return False
        for step, row in zip(batch, logits[:, None], strict=True):
            step.end(row)
        return True
