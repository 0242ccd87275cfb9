"""Prefills requests by a blend pass if there is KV to reuse, else by the model's own prefill."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.answer import FULL_PREFILL, Request
from cacheblend_rag.engines.backend import STOPPED, UNSUPPORTED
from cacheblend_rag.engines.transformers.cache import GROWTH_TOKENS
from cacheblend_rag.engines.transformers.model_steps import run_steps, run_when_idle
from cacheblend_rag.engines.transformers.prefill import (
    Prefilled,
    PromptChunks,
    blended_prefill,
    ordinary_prefill,
)
from cacheblend_rag.engines.transformers.priority_lock import PriorityLock
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.watched_model import TriedModel
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import NO_ROOM, give_back_unused, lack_of_memory, no_room
from cacheblend_rag.prefill.comparing import Compared, Comparison, compare
from cacheblend_rag.prefill.policy import NO_CHUNK
from cacheblend_rag.prefill.prompt_pass import NotWorthLoading, PromptPass
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import PrefillReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prefiller:
    """A tested model with its store, and the lock of all engines around it."""

    tried: TriedModel
    store: TieredKVStore
    lock: PriorityLock

    def run(self, request: Request) -> Prefilled | None:
        """Prefill, blended if there is something to reuse; None if cancelled meanwhile.

        Other requests may use the model while this one waits for the store.
        """
        chunks = PromptChunks(request.prepared, self.store)
        reserve = min(request.sampling.max_tokens, GROWTH_TOKENS)
        is_refused = request.full or request.steering.refusal is not None
        if self.tried.stack is None or is_refused or not chunks.placed:
            return self._ordinarily(request, reserve, self._told_unasked(request))
        blended = self._blended(self.tried.stack, request, chunks, reserve)
        if not isinstance(blended, NotWorthLoading):
            return blended
        told = PrefillReport(blended.why, chunks=blended.chunks)
        return self._ordinarily(request, reserve, told)

    def compare(self, request: Request, compared: Compared) -> Steps[Comparison | None]:
        """Compare a blended prompt with full prefill while no request wants the model.

        Returns None if it can no longer be blended, or if there is no memory for it.
        """
        try:
            return (yield from self._compared(request, compared))
        except Exception as error:
            lack = lack_of_memory(error)
            if lack is None:
                raise
        give_back_unused()  # after the handler: the error's traceback kept the passes
        logger.warning(
            "an answer after %d tokens is not compared: %s (%s)", compared.longest, NO_ROOM, lack
        )
        return None

    def _compared(self, request: Request, compared: Compared) -> Steps[Comparison | None]:
        stack, chunks = self.tried.stack, PromptChunks(request.prepared, self.store)
        if stack is None:
            return None
        with chunks.source(stack, request.config) as source:
            blended = PromptPass(
                stack,
                torch.tensor(compared.prompt, device=stack.geometry.device),
                chunks.placed,
                source,
                request.config,
                reserve=len(compared.answer) - 1,
                needs_hidden=False,
            )
            steps = compare(
                stack, lambda last: stack.logits(last.transpose(0, 1)), compared, blended
            )
            done = yield from run_when_idle(self.lock, steps)
        return done if isinstance(done, Comparison) else None

    def _blended(
        self, stack: TransformersStack, request: Request, chunks: PromptChunks, reserve: int
    ) -> Prefilled | NotWorthLoading | None:
        """Prefill by a blend pass; one that runs out of memory is abandoned and freed."""
        try:
            return self._run_pass(stack, request, chunks, reserve)
        except Exception as error:
            lack = lack_of_memory(error)
            if lack is None:
                raise
        # After the handler: the error's traceback kept the pass, and so would a logged one.
        give_back_unused()
        logger.warning(
            "a prompt of %d tokens is not blended: %s (%s)", len(chunks.token_ids), NO_ROOM, lack
        )
        return NotWorthLoading(no_room(lack), chunks.missed(NO_ROOM))

    def _run_pass(
        self, stack: TransformersStack, request: Request, chunks: PromptChunks, reserve: int
    ) -> Prefilled | NotWorthLoading | None:
        with chunks.source(stack, request.config) as source:
            steps = blended_prefill(
                stack, chunks, source, request.config, reserve, controller=self.tried.controller
            )
            return run_steps(self.lock, steps, request.cancel, source)

    def _ordinarily(self, request: Request, reserve: int, told: PrefillReport) -> Prefilled | None:
        """Serve a prompt by the model's own prefill, and record its duration."""
        ids, controller = request.prepared.token_ids, self.tried.controller
        steps = ordinary_prefill(self.tried.ordinary, ids, reserve, told)
        done = run_steps(self.lock, steps, request.cancel)
        if done is not None and controller is not None:
            work = prefill_cost(controller.costs, len(ids))
            controller.rates.record("prefill", work, done.seconds["recompute"])
        return done

    def _told_unasked(self, request: Request) -> PrefillReport:
        """Return the report of a prompt that is not blended, without asking the store."""
        placed, refusal = request.prepared.placed, self.tried.refusal
        if request.full:
            return PrefillReport(FULL_PREFILL)
        if not placed:
            return PrefillReport(NO_CHUNK)
        if (stopped := request.steering.refusal) is not None:
            return PrefillReport(stopped, chunks=[chunk.report(STOPPED) for chunk in placed])
        assert refusal is not None  # noqa: S101 (otherwise the store is asked)
        why = Reason(refusal.code, f"{UNSUPPORTED}: {refusal}")
        return PrefillReport(why, chunks=[chunk.report(UNSUPPORTED) for chunk in placed])
