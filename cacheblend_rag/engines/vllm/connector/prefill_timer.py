"""PrefillTimer: how long vLLM's own prefill takes, so that blending can be weighed against it.

vLLM's model runs between the calls that it makes to a connector in each step. What the connector
does itself in one of them is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self

import torch

from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.prefill.controller import Rates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

LEAST_TOKENS = 256
"""A step without so many tokens of one prompt tells nothing: decoding has a pace of its own."""
KEPT_STEPS = 8
"""Steps of which a device has not said yet how long they took; the oldest are forgotten."""

Spans = tuple[tuple[int, int], ...]
"""Tokens [first, end) of each request."""


def computed_spans(step: SchedulerOutput) -> Spans:
    """Return what vLLM computes of each request in a step; nothing where it is not to be timed."""
    counts = step.num_scheduled_tokens
    if max(counts.values(), default=0) < LEAST_TOKENS:
        return ()
    cached = step.scheduled_cached_reqs
    firsts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    firsts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return tuple((firsts[name], firsts[name] + count) for name, count in counts.items())


class Event(Protocol):
    """A moment of a device's work, as ``torch.Event`` is."""

    def record(self) -> None:
        """Let it be when the work is done that is queued so far."""

    def query(self) -> bool:
        """Whether it has come."""

    def elapsed_time(self, end: Self, /) -> float:
        """Return the milliseconds from this to another one; both have come."""


class HostEvent:
    """A moment of the host."""

    def record(self) -> None:
        """Let it be now."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """It has come."""
        return True

    def elapsed_time(self, end: HostEvent, /) -> float:
        """Return the milliseconds from this to another one."""
        return (end._at - self._at) * 1000


class PrefillTimer:
    """Records the rate of vLLM's own prefill.

    costs: of each layer. make_event: for a moment of the device. A device is never waited for: what
    a step took is noted once it is known.
    """

    def __init__(
        self,
        costs: tuple[LayerCost, ...],
        rates: Rates,
        make_event: Callable[[], Event] = HostEvent,
    ) -> None:
        self._costs, self._rates, self._make_event = costs, rates, make_event
        self._spans: Spans = ()
        self._marks: list[Event] = []
        self._steps: deque[tuple[Spans, list[Event]]] = deque(maxlen=KEPT_STEPS)

    @classmethod
    def of(cls, device: torch.device, costs: tuple[LayerCost, ...], rates: Rates) -> PrefillTimer:
        """Return what times a device."""
        if device.type == "cpu":
            return cls(costs, rates)
        return cls(costs, rates, lambda: torch.Event(device, enable_timing=True))

    def begin(self, spans: Spans) -> None:
        """Note that a step begins, in which these are computed."""
        self._settle()
        self._spans, self._marks = spans, []
        self.mark()

    def mark(self) -> None:
        """Note that work other than the model's begins, or that it has ended."""
        if self._spans:
            mark = self._make_event()
            mark.record()
            self._marks.append(mark)

    def end(self) -> None:
        """Note that the model has run."""
        self.mark()
        if self._spans:
            self._steps.append((self._spans, self._marks))
        self._spans, self._marks = (), []
        self._settle()

    def _settle(self) -> None:
        """Record the steps that the device is done with."""
        while self._steps and self._steps[0][1][-1].query():
            spans, marks = self._steps.popleft()
            parts = zip(marks[::2], marks[1::2], strict=True)
            seconds = sum(begun.elapsed_time(ended) for begun, ended in parts) / 1000
            self._rates.record("prefill", sum(self._work(*span) for span in spans), seconds)

    def _work(self, first: int, end: int) -> float:
        return prefill_cost(self._costs, end) - prefill_cost(self._costs, first)
