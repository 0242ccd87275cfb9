"""The guard: watches the quality of blended answers, raises the recompute ratio, stops blending.

A hook draws a share of the answers. In idle time, an IdleJob compares what the model predicts along
such an answer after the blended prompt, and after full prefill of the text that the prompt's chunks
were computed in (``reference_of``). ``GuardState`` decides what follows.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from threading import Lock
from typing import Literal

from cacheblend_rag.engines.answer import NOT_STEERED, Generation, Request, Steering
from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.guard_state import GuardState, Step
from cacheblend_rag.engines.idle import IdleJob, IdleQueue
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import GuardReport
from cacheblend_rag.settings import AUTO, BlendConfig
from cacheblend_rag.settings.engine import GuardConfig
from cacheblend_rag.text.chunk import Chunk, Context

logger = logging.getLogger(__name__)

KIND = "guard"
"""Of the idle jobs."""
PRIORITY = -1
"""Filling, whose chunks the next requests may need, comes first."""
SEED = 0
"""Of the draw of requests: the same requests in the same order give the same samples."""
Fate = Literal["compared", "unknown", "dropped", "outdated"]
"""What became of a sampled request, as GuardReport counts it."""


@dataclass(frozen=True)
class _Sample:
    """A request to compare, and the first tokens of its answer."""

    request: Request
    answer: tuple[int, ...]


class Guard:
    """An AnswerHook that samples blended answers, and steers later requests.

    backend: compares; may be a weak proxy. lead_in: that chunks are computed after. idle: runs the
    comparisons.
    """

    def __init__(self, backend: Backend, lead_in: LeadIn, idle: IdleQueue) -> None:
        self._backend, self._lead_in, self._idle = backend, lead_in, idle
        self._lock = Lock()
        self._has_job = self._is_at_work = False
        self._begin(None)

    @property
    def config(self) -> GuardConfig | None:
        """Its settings; None while it is off."""
        return self._config

    def use(self, config: GuardConfig | None, own_ratio: float) -> None:
        """Begin anew with other settings, or off; own_ratio: of the engine's config.

        Raises ConfigError when the engine cannot compare.
        """
        if config is not None and not self._backend.compares:
            raise ConfigError(
                f"guard: a {self._backend.name} engine cannot compare answers: leave it out"
            )
        with self._lock:
            self._begin(config, own_ratio)

    def _begin(self, config: GuardConfig | None, own_ratio: float = 0.0) -> None:
        self._config, self._own_ratio = config, own_ratio
        self._state = None if config is None else GuardState(config, own_ratio)
        self._draw = Random(SEED)
        self._waiting: deque[_Sample] = deque()
        self._counts, self._steps = Counter[Fate](), Counter[Step]()
        self._sums = Comparison(0.0)

    def steer(self, config: BlendConfig) -> tuple[BlendConfig, Steering]:
        """Return the config that a request is served with now, and why."""
        state = self._state
        if state is None:
            return config, NOT_STEERED
        now = Steering(steps=state.steps)
        limit = f"{state.config.limit:g} nats per token"
        if state.is_stopped:
            why = f"blending has stopped: answers diverged by more than {limit} from full prefill"
            return config, replace(now, refusal=Reason(ReasonCode.GUARD_STOPPED, why))
        raised = with_least_ratio(config, state.ratio)
        if raised == config:
            return config, now
        why = f"at least {state.ratio:g}: answers diverged by more than {limit} from full prefill"
        return raised, replace(now, raised=Reason(ReasonCode.GUARD_RAISED, why))

    def see(self, request: Request, answer: Generation) -> None:
        """Draw whether a blended answer is compared, and queue it if so."""
        config = self._config
        if config is None or not _is_blended(request, answer):
            return
        with self._lock:
            if self._draw.random() >= config.sample_share:
                return
            is_long = len(request.prepared.token_ids) > config.most_tokens
            if is_long or len(self._waiting) >= config.most_waiting:
                self._counts["dropped"] += 1
                return
            sampled = replace(
                request, config=as_served(request.config, answer.report.recompute_ratio)
            )
            first = answer.token_ids[: config.answer_tokens]
            self._waiting.append(_Sample(sampled, first))
            self._queue()

    def report(self) -> GuardReport:
        """Return the counts, and the divergence, since the guard was turned on."""
        with self._lock:
            state, counts = self._state, self._counts
            if state is None:
                return GuardReport()
            compared = max(1, counts["compared"])
            return GuardReport(
                compared=counts["compared"],
                unknown=counts["unknown"],
                outdated=counts["outdated"],
                dropped=counts["dropped"],
                waiting=len(self._waiting) + self._is_at_work,
                divergence=self._sums.blend / compared,
                prefill_divergence=self._sums.prefill / compared,
                excess=state.mean,
                ratio=state.ratio,
                stopped=state.is_stopped,
                raised=self._steps["up"],
                lowered=self._steps["down"],
            )

    def _queue(self) -> None:
        """Queue a job for the oldest sample, or drop all if it is refused; with the lock held."""
        job = IdleJob(
            KIND,
            self._work,
            priority=PRIORITY,
            when_failed="answers are not compared with full prefill",
            ended=self._ended,
            waits=not self._backend.fills_last,
        )
        self._has_job = self._has_job or self._idle.add(job)
        if not self._has_job:
            self._counts["dropped"] += len(self._waiting)
            self._waiting.clear()

    # In the idle queue's thread

    def _work(self) -> Generator[None, None, None]:
        """Compare the oldest sample, and take the result into account."""
        with self._lock:
            config, state = self._config, self._state
            sample = self._waiting.popleft() if self._waiting else None
            self._is_at_work = sample is not None
        if sample is None or config is None or state is None:
            return
        fate: Fate = "dropped"
        compared: Comparison | None = None
        try:
            if _is_outdated(sample, state):
                fate = "outdated"
            elif (asked := self._asked(sample, config)) is None:
                fate = "unknown"
            else:
                compared = yield from self._backend._compare(sample.request, asked)
        finally:
            with self._lock:
                self._is_at_work = False
                if state is self._state:
                    self._take(sample, compared, fate)

    def _asked(self, sample: _Sample, config: GuardConfig) -> Compared | None:
        """Return what is compared; None if the reference is too long."""
        room = self._backend.context_window - len(sample.answer)
        most = min(config.most_tokens, room)
        return with_documents(sample.request.prepared, sample.answer, self._lead_in, most)

    def _take(self, sample: _Sample, compared: Comparison | None, fate: Fate) -> None:
        """Count a sample, and take the step that follows from it; with the lock held."""
        state = self._state
        if compared is None or state is None or _is_outdated(sample, state):
            self._counts["outdated" if compared is not None else fate] += 1
            return
        self._counts["compared"] += 1
        self._sums = Comparison(
            self._sums.blend + compared.blend, self._sums.prefill + compared.prefill
        )
        step = state.observe(compared.blend, compared.prefill)
        if step is not None:
            self._steps[step] += 1
            self._log(state, step)

    def _log(self, state: GuardState, step: Step) -> None:
        limit = f"{state.config.limit:g} nats per token"
        if step == "stop":
            logger.warning(
                "guard: blending has stopped, since answers diverge by more than %s from full "
                "prefill; engine.reset_guard() begins again",
                limit,
            )
        elif step == "up":
            logger.warning(
                "guard: the recompute ratio is at least %g now, since answers diverge by more "
                "than %s from full prefill",
                state.ratio,
                limit,
            )
        else:
            logger.info(
                "guard: the recompute ratio is at least %g now, less than before", state.ratio
            )

    def _ended(self) -> None:
        """Queue a job for samples that wait by now; it is refused after a failure."""
        with self._lock:
            self._has_job = False
            if self._waiting:
                self._queue()


def with_least_ratio(config: BlendConfig, least: float) -> BlendConfig:
    """Return a config whose ratios are at least so large, those that ``auto`` may choose, too."""
    low, high = config.ratio_bounds
    if config.recompute_ratio == AUTO:
        return config.with_changes(ratio_bounds=(max(low, least), max(high, least)))
    ratios = config.recompute_ratios
    return config.with_changes(
        recompute_ratio=max(config.ratio, least),
        recompute_ratios=None if ratios is None else [max(ratio, least) for ratio in ratios],
    )


def _is_outdated(sample: _Sample, state: GuardState) -> bool:
    """Whether a sample was served before the latest step."""
    return sample.request.steering.steps != state.steps


def _is_blended(request: Request, answer: Generation) -> bool:
    """Whether an answer is one of those to draw from."""
    report = answer.report
    is_whole = answer.finish_reason != "cancelled" and bool(answer.token_ids)
    return is_whole and not request.full and report.blended and report.recompute_ratio < 1


def as_served(config: BlendConfig, ratio: float) -> BlendConfig:
    """Return a config that blends again what was blended, whatever is measured meanwhile.

    ratio: that the request was served with.
    """
    if config.recompute_ratio == AUTO:
        config = config.with_ratio(ratio)
    return config.with_changes(cost_model=False, trace=False)


def with_documents(
    prepared: PreparedPrompt, answer: Sequence[int], lead_in: LeadIn, most_tokens: int
) -> Compared | None:
    """Return the comparison of a prompt with its reference; None if that is too long."""
    reference = reference_of(prepared, lead_in, most_tokens)
    if reference is None:
        return None
    is_prompt = reference == prepared.token_ids
    return Compared(prepared.token_ids, tuple(answer), None if is_prompt else reference)


def reference_of(
    prepared: PreparedPrompt, lead_in: LeadIn, most_tokens: int
) -> tuple[int, ...] | None:
    """Return the prompt's tokens with each contextual chunk preceded by its document's text.

    That is the text that its KV was computed after: within the document window, without what the
    reference holds already. Without contextual chunks it is the prompt. None if it would be longer
    than ``most_tokens``.
    """
    reference: list[int] = []
    held: set[Context] = set()
    done = 0
    for span, placed in zip(prepared.encoded.spans, prepared.placed, strict=True):
        reference += prepared.token_ids[done : span.start]
        if placed.protected:
            reference += _missing(span.chunk, lead_in, held)
        reference += prepared.token_ids[span.start : span.end]
        held.add(Context(span.chunk.context).then(span.chunk.text))
        done = span.end
        if len(reference) > most_tokens:
            return None
    reference += prepared.token_ids[done:]
    return tuple(reference) if len(reference) <= most_tokens else None


def _missing(chunk: Chunk, lead_in: LeadIn, held: set[Context]) -> Iterator[int]:
    """Yield the tokens of a chunk's context after the longest part of it that is held."""
    pieces = lead_in.window_of(chunk)
    ends = [index for index, (context, _) in enumerate(pieces, start=1) if context in held]
    for context, tokens in pieces[max(ends, default=0) :]:
        held.add(context)
        yield from tokens
