"""The guard: watches the quality of blended answers, raises the recompute ratio, stops blending.

A hook draws a share of the answers. In idle time, an IdleJob compares what the model predicts along
such an answer after the blended prompt, and after full prefill of the text that the prompt's chunks
were computed in. ``GuardState`` decides what follows.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from threading import Lock
from typing import Literal

from cacheblend_rag.engines.answer import NOT_STEERED, Generation, Request, Steering
from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.lifetime import IdleJob, IdleQueue
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import GuardReport
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.settings.engine import GuardConfig
from cacheblend_rag.text.chunk import Chunk, Context

logger = logging.getLogger(__name__)

PRIORITY = -1
"""Of its idle jobs: filling, whose chunks the next requests may need, comes first."""
ANSWER_TOKENS = 16
"""Most tokens of an answer that are compared, from its first on."""
MOST_WAITING = 8
"""Most samples that wait in memory for idle time; further ones are dropped."""
MOST_TOKENS = 16384
"""Longest prompt that is compared, in tokens, with the documents' texts that its chunks were
computed after."""
SEED = 0
"""Of the draw of requests: the same requests in the same order give the same samples."""


@dataclass(eq=False)
class _Sample:
    """A request to compare, the first tokens of its answer, and what came of it."""

    state: GuardState
    request: Request
    answer: tuple[int, ...]
    outcome: Outcome = "dropped"


class Guard:
    """An AnswerHook that samples blended answers, and steers later requests.

    backend: compares; may be a weak proxy. lead_in: that chunks are computed after. idle: runs the
    comparisons.
    """

    def __init__(self, backend: Backend, lead_in: LeadIn, idle: IdleQueue) -> None:
        self._backend, self._lead_in, self._idle = backend, lead_in, idle
        self._lock, self._draw = Lock(), Random(SEED)
        self._state: GuardState | None = None

    @property
    def config(self) -> GuardConfig | None:
        """Its settings; None while it is off."""
        return None if self._state is None else self._state.config

    def use(self, config: GuardConfig | None, own_ratio: float) -> None:
        """Begin anew with other settings, or off; own_ratio: of the engine's config."""
        self._draw = Random(SEED)
        self._state = None if config is None else GuardState(config, own_ratio)

    def steer(self, config: BlendConfig) -> tuple[BlendConfig, Steering]:
        """Return the config that a request is served with now, and why."""
        state = self._state
        if state is None:
            return config, NOT_STEERED
        now = Steering(steps=state.steps)
        diverged = f"answers diverged by more than {_limit(state)}"
        if state.is_stopped:
            refusal = Reason(ReasonCode.GUARD_STOPPED, f"blending has stopped: {diverged}")
            return config, replace(now, refusal=refusal)
        raised = with_least_ratio(config, state.ratio)
        if raised == config:
            return config, now
        why = Reason(ReasonCode.GUARD_RAISED, f"at least {state.ratio:g}: {diverged}")
        return raised, replace(now, raised=why)

    def see(self, request: Request, answer: Generation) -> None:
        """Draw whether a blended answer is compared, and queue it if so."""
        state = self._state
        if state is None or not _is_blended(answer):
            return
        with self._lock:
            if self._draw.random() >= state.config.sample_share:
                return
            served = as_served(request.config)
            first = answer.token_ids[:ANSWER_TOKENS]
            sample = _Sample(state, replace(request, config=served), first)
            is_short = len(request.prepared.token_ids) <= MOST_TOKENS
            if is_short and state.waiting < MOST_WAITING and self._queue(sample):
                state.waiting += 1
            else:
                state.take(sample.outcome)

    def report(self) -> GuardReport:
        """Return the counts, and the divergence, since the guard was turned on."""
        state = self._state
        if state is None:
            return GuardReport()
        with self._lock:
            return state.report()

    def _queue(self, sample: _Sample) -> bool:
        job = IdleJob(
            "guard",
            partial(self._compared, sample),
            priority=PRIORITY,
            ended=partial(self._ended, sample),
            waits=not self._backend.fills_last,
        )
        return self._idle.add(job)

    # In the idle queue's thread

    def _compared(self, sample: _Sample) -> Generator[None, None, None]:
        """Compare a sample, unless it is known by now that it counts for nothing."""
        state, prepared = sample.state, sample.request.prepared
        if state is not self._state:
            return
        if sample.request.steering.steps != state.steps:
            sample.outcome = "outdated"
            return
        most = min(MOST_TOKENS, self._backend.context_window - len(sample.answer))
        asked = with_reference(prepared, sample.answer, self._lead_in, most)
        if asked is None:
            sample.outcome = "unknown"
            return
        found = yield from self._backend._compare(sample.request, asked)
        sample.outcome = "dropped" if found is None else found

    def _ended(self, sample: _Sample) -> None:
        """Take what came of a sample into account, and tell of the step that follows."""
        state = sample.state
        with self._lock:
            state.waiting -= 1
            step = state.take(sample.outcome)
        if step is not None and state is self._state:
            _log(state, step)


def _limit(state: GuardState) -> str:
    return f"{state.config.limit:g} nats per token from full prefill"


def _log(state: GuardState, step: Step) -> None:
    if step == "stop":
        logger.warning(
            "guard: blending has stopped, since answers diverge by more than %s; "
            "engine.reset_guard() begins again",
            _limit(state),
        )
    elif step == "up":
        logger.warning(
            "guard: the recompute ratio is at least %g now, since answers diverge by more than %s",
            state.ratio,
            _limit(state),
        )
    else:
        logger.info("guard: the recompute ratio is at least %g now, less than before", state.ratio)


def with_least_ratio(config: BlendConfig, least: float) -> BlendConfig:
    """Return a config whose ratios are at least so large."""
    checks = range(len(config.check_layers))
    ratios = [max(config.ratio_at(check), least) for check in checks]
    is_list = isinstance(config.recompute_ratio, tuple)
    return config.with_changes(recompute_ratio=ratios if is_list else ratios[0])


def _is_blended(answer: Generation) -> bool:
    """Whether an answer is one of those to draw from."""
    report = answer.report
    is_whole = answer.finish_reason != "cancelled" and bool(answer.token_ids)
    why = report.selector_reason
    is_exact = report.recompute_ratio == 1 or (why is not None and why.code == ReasonCode.EXACT)
    return is_whole and report.blended and not is_exact


def as_served(config: BlendConfig) -> BlendConfig:
    """Return a config that blends again what was blended, whatever is measured meanwhile."""
    return config.with_changes(cost_model=False, trace=False)


# What follows from the samples

Step = Literal["up", "down", "stop"]
Outcome = Comparison | Literal["unknown", "outdated", "dropped"]
"""What came of a sample: divergences, or why there are none, as GuardReport counts it."""

WINDOW = 512
"""Size of the moving window, in samples; also the fewest samples between two steps down."""
FEWEST = WINDOW // 4
"""Smallest divisor of the mean excess, so that a few samples cannot decide."""
ENOUGH = 0.5
"""The recompute ratio is lowered when the mean divergence is below this share of the limit."""
LEAST_EXCESS = -0.25
"""A sample whose blend is nearer than ordinary prefill counts at most so much; it bounds what one
sample can hide."""
MOST_PATIENCE = 64
"""Most windows between a step and a step down."""


def bounded(divergence: float) -> float:
    """Return a divergence in nats as a number from 0 to 1, so that no sample outweighs all."""
    return -math.expm1(-max(0.0, divergence))


class GuardState:
    """The state of a guard since it was turned on: samples go in, steps come out.

    Ordinary prefill is the only remedy, so what counts of a sample is its *excess*: how much nearer
    to the reference ordinary prefill is than the blend, both as ``bounded``. If the reference is
    ordinary prefill itself, that is the blend's divergence. If it is nearly never positive, as
    where contextual KV knows documents that the prompt lacks, the ratio is never raised.

    The mean of the latest samples since a step decides: above the limit the ratio steps up, well
    below it, a window after the step at the earliest, down again.

    steps: how many there were. waiting: how many samples wait, or are being compared.
    """

    def __init__(self, config: GuardConfig, own_ratio: float) -> None:
        """own_ratio: of the engine's config; lower ones are no remedy and are left out."""
        self.config = config
        self._ratios = (0.0, *(ratio for ratio in config.ratios if ratio > own_ratio), 1.0)
        self._level = self.steps = self.waiting = 0
        self._patience, self._seen = 1, 0
        self._excess: deque[float] = deque(maxlen=WINDOW)
        self._counts = Counter[str]()
        self._blend = self._prefill = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether blending has stopped; it stays so."""
        return self._level == len(self._ratios) - 1

    @property
    def ratio(self) -> float:
        """The least recompute ratio now; 0 at first, 1 once stopped."""
        return self._ratios[self._level]

    @property
    def mean(self) -> float:
        """Mean excess of the latest samples since the last step, from -0.25 to 1."""
        return sum(self._excess) / max(1, len(self._excess))

    def take(self, outcome: Outcome) -> Step | None:
        """Take a sample, served at the present level, into account; returns the step that follows.

        Divergences are in nats per token.
        """
        if not isinstance(outcome, Comparison):
            self._counts[outcome] += 1
            return None
        self._counts["compared"] += 1
        self._blend += outcome.blend
        self._prefill += outcome.prefill
        step = self._step(bounded(outcome.blend) - bounded(outcome.prefill))
        if step is not None:
            self._counts[step] += 1
        return step

    def report(self) -> GuardReport:
        """Return the counts, and the divergence."""
        counts = self._counts
        compared = max(1, counts["compared"])
        return GuardReport(
            compared=counts["compared"],
            unknown=counts["unknown"],
            outdated=counts["outdated"],
            dropped=counts["dropped"],
            waiting=self.waiting,
            divergence=self._blend / compared,
            prefill_divergence=self._prefill / compared,
            excess=self.mean,
            ratio=self.ratio,
            stopped=self.is_stopped,
            raised=counts["up"],
            lowered=counts["down"],
        )

    def _step(self, excess: float) -> Step | None:
        if self.is_stopped:
            return None
        self._excess.append(max(LEAST_EXCESS, excess))
        self._seen += 1
        if sum(self._excess) > bounded(self.config.limit) * max(len(self._excess), FEWEST):
            return self._up()
        waited = self._seen >= self._patience * WINDOW
        if self._level and waited and self.mean < bounded(self.config.limit * ENOUGH):
            return self._to(self._level - 1, "down")
        return None

    def _up(self) -> Step:
        if self.steps:  # a lower ratio was not enough: be slower to try it again
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        level = self._level + 1
        return self._to(level, "stop" if level == len(self._ratios) - 1 else "up")

    def _to(self, level: int, step: Step) -> Step:
        self._level, self.steps = level, self.steps + 1
        self._excess.clear()
        self._seen = 0
        return step


# What an answer is compared with: the text that its chunks were computed in


def with_reference(
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
        held.add(span.chunk.passage)
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
