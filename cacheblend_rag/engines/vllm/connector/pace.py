"""Bounds how long blending works between two steps of vLLM, and times vLLM's own prefill.

``OwnTime`` measures the total time of slices, without other work in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.prefill.policy import Rates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class Slices:
    """How long to work between two of vLLM's steps, in seconds.

    busy: while other requests run. idle: while none does; the longest that a new request waits.
    """

    busy: float
    idle: float

    @classmethod
    def of(cls, device: torch.device, busy: float | None = None) -> Slices:
        """Return a device's default: decode steps take 8 ms on a GPU, 30 to 100 ms on a CPU."""
        usual, idle_slices = (0.03, 8) if device.type == "cpu" else (0.005, 4)
        busy = usual if busy is None else busy
        return cls(busy, busy * idle_slices)


class HostEvent:
    """An event on the host, like ``torch.Event`` on a device."""

    def record(self) -> None:
        """Record the current time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return True: it has been reached."""
        return True

    def synchronize(self) -> None:
        """Return at once, for the same reason."""

    def elapsed_time(self, end: HostEvent, /) -> float:
        """Return the milliseconds from this to another one."""
        return (end._at - self._at) * 1000


MakeEvent = Callable[[], Any]
"""Returns a new event, which can be recorded, asked for and waited for."""


def events_of(device: torch.device) -> MakeEvent:
    """Return the maker of a device's events."""
    if device.type == "cpu":
        return HostEvent
    return lambda: torch.Event(device, enable_timing=True)


class OwnTime:
    """A clock that runs only inside its ``with`` block."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, 0.0
        self._runs = False

    def __enter__(self) -> Self:
        self._since, self._runs = time.perf_counter(), True
        return self

    def __exit__(self, *_: object) -> None:
        self._total, self._runs = self.seconds(), False

    def seconds(self) -> float:
        """Return the seconds that it has run."""
        return self._total + (time.perf_counter() - self._since if self._runs else 0.0)


class Pace:
    """Keeps the host one step ahead of the device, and no further.

    An accelerator queues work faster than it executes it, so by the host's clock alone
    a slice would queue work for many times its length. Waiting for the step before the last one
    keeps the device busy and the time correct.
    """

    def __init__(self, make_event: MakeEvent) -> None:
        self._make_event = make_event
        self._before: Any = None

    def is_over(self, until: float) -> bool:
        """Record that a step was queued, wait for the one before; return whether time is up."""
        queued = self._make_event()
        queued.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = queued
        return time.perf_counter() >= until


LEAST_TOKENS = 256
"""Least tokens of one prompt in a timed step: decoding has another speed."""
KEPT_STEPS = 8
"""Most steps whose device times are not known yet; the oldest are forgotten."""

Spans = tuple[tuple[int, int], ...]
"""Tokens [first, end) of each request."""


def computed_spans(step: SchedulerOutput) -> Spans:
    """Return the tokens that vLLM computes per request in a step; empty if not to be timed."""
    counts = step.num_scheduled_tokens
    if max(counts.values(), default=0) < LEAST_TOKENS:
        return ()
    cached = step.scheduled_cached_reqs
    firsts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    firsts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return tuple((firsts[name], firsts[name] + count) for name, count in counts.items())


class PrefillTimer:
    """Records the rate of vLLM's own prefill, for comparison with blending.

    costs: of each layer. The device is never waited for: a step's time is recorded once it is
    known.
    """

    def __init__(
        self, costs: tuple[LayerCost, ...], rates: Rates, make_event: MakeEvent = HostEvent
    ) -> None:
        self._costs, self.rates, self._make_event = costs, rates, make_event
        self._spans: Spans = ()
        self._begun: Any = None
        self._steps: deque[tuple[Spans, Any, Any]] = deque(maxlen=KEPT_STEPS)

    def begin(self, spans: Spans) -> None:
        """Mark the begin of a step that computes these tokens."""
        self._settle()
        self._spans, self._begun = spans, self._mark() if spans else None

    def leave_out(self) -> None:
        """Do not time this step: it has other work, too."""
        self._spans = ()

    def end(self) -> None:
        """Mark the end of the model's run."""
        if self._spans:
            self._steps.append((self._spans, self._begun, self._mark()))
        self._spans = ()
        self._settle()

    def _mark(self) -> Any:
        mark = self._make_event()
        mark.record()
        return mark

    def _settle(self) -> None:
        """Record the steps that the device has finished."""
        while self._steps and self._steps[0][-1].query():
            spans, begun, ended = self._steps.popleft()
            work = (
                prefill_cost(self._costs, end) - prefill_cost(self._costs, first)
                for first, end in spans
            )
            self.rates.record("prefill", sum(work), begun.elapsed_time(ended) / 1000)
