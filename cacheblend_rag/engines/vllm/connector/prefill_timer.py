"""Measures the speed of vLLM's own prefill, for comparison with blending.

vLLM's model runs between its calls to the connector in each step. The time of the connector's own
work in these calls is subtracted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.engines.vllm.connector.pace import HostEvent, MakeEvent
from cacheblend_rag.prefill.policy import Rates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

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
    """Records the rate of vLLM's own prefill.

    costs: of each layer. The device is never waited for: a step's time is recorded once it is
    known.
    """

    def __init__(
        self, costs: tuple[LayerCost, ...], rates: Rates, make_event: MakeEvent = HostEvent
    ) -> None:
        self._costs, self.rates, self._make_event = costs, rates, make_event
        self._spans: Spans = ()
        self._marks: list[Any] = []
        self._steps: deque[tuple[Spans, list[Any]]] = deque(maxlen=KEPT_STEPS)

    def begin(self, spans: Spans) -> None:
        """Mark the begin of a step that computes these tokens."""
        self._settle()
        self._spans, self._marks = spans, []
        self.mark()

    def mark(self) -> None:
        """Mark the begin or the end of work other than the model's."""
        if self._spans:
            mark = self._make_event()
            mark.record()
            self._marks.append(mark)

    def end(self) -> None:
        """Mark the end of the model's run."""
        self.mark()
        if self._spans:
            self._steps.append((self._spans, self._marks))
        self._spans, self._marks = (), []
        self._settle()

    def _settle(self) -> None:
        """Record the steps that the device has finished."""
        while self._steps and self._steps[0][1][-1].query():
            spans, marks = self._steps.popleft()
            parts = zip(marks[::2], marks[1::2], strict=True)
            seconds = sum(begun.elapsed_time(ended) for begun, ended in parts) / 1000
            work = (
                prefill_cost(self._costs, end) - prefill_cost(self._costs, first)
                for first, end in spans
            )
            self.rates.record("prefill", sum(work), seconds)
