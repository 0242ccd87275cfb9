"""The guard: watches the quality of blended answers, raises the recompute ratio, stops blending.

A hook draws a share of the answers. In idle time, an IdleJob compares what the model predicts along
such an answer after the blended prompt, and after full prefill of the text that the prompt's chunks
were computed in (``reference.py``). ``GuardState`` decides what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from threading import Lock

from cacheblend_rag.engines.answer import NOT_STEERED, Generation, Request, Steering
from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.guard_state import GuardState, Outcome, Step
from cacheblend_rag.engines.idle import IdleJob, IdleQueue
from cacheblend_rag.engines.reference import with_reference
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import GuardReport
from cacheblend_rag.settings import AUTO, BlendConfig
from cacheblend_rag.settings.engine import GuardConfig

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
            served = as_served(request.config, answer.report.recompute_ratio)
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
    """Return a config whose ratios are at least so large, those that ``auto`` may choose, too."""
    low, high = config.ratio_bounds
    if config.recompute_ratio == AUTO:
        return config.with_changes(ratio_bounds=(max(low, least), max(high, least)))
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


def as_served(config: BlendConfig, ratio: float) -> BlendConfig:
    """Return a config that blends again what was blended, whatever is measured meanwhile.

    ratio: that the request was served with.
    """
    if config.recompute_ratio == AUTO:
        config = config.with_ratio(ratio)
    return config.with_changes(cost_model=False, trace=False)
