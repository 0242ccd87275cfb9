"""Prefills requests by a blend pass if there is KV to reuse, else by the model's own prefill."""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.engines.answer import FULL_PREFILL, Request
from cacheblend_rag.engines.backend import STOPPED, UNSUPPORTED
from cacheblend_rag.engines.batch_order import chunks_of
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers.cache import GROWTH_TOKENS, FusedCache
from cacheblend_rag.engines.transformers.loop import Turn, Work
from cacheblend_rag.engines.transformers.prefill import (
    NOT_ASKED,
    Prefilled,
    PromptChunks,
    blended_prefill,
    ordinary_prefill,
    while_wanted,
)
from cacheblend_rag.engines.transformers.prefixes import PrefixWriter
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.watched_model import TriedModel
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import NO_ROOM, give_back_unused, lack_of_memory, no_room
from cacheblend_rag.prefill.comparing import Compared, Comparison, compare
from cacheblend_rag.prefill.policy import LEAST_SHARE, NO_CHUNK, config_for
from cacheblend_rag.prefill.prefix import PrefixKeys, StoredPrefix
from cacheblend_rag.prefill.prompt_pass import PromptPass
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import PrefillReport
from cacheblend_rag.settings import BlendConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prefiller:
    """A tested model with its store; prefills in steps, which the model's loop runs.

    namespace: whose prompts share what they begin with. lookups: threads that look up prefixes.
    """

    tried: TriedModel
    store: TieredKVStore
    namespace: str
    lookups: Executor

    @cached_property
    def _prefixes(self) -> PrefixKeys | None:
        """Makes the keys of prefix blocks; None if stored KV is quantized, so not exact."""
        if self.tried.stack is None or self.store.precision != "native":
            return None
        return PrefixKeys.of(self.tried.identity, self.namespace)

    def run(self, request: Request) -> Work[Prefilled | None]:
        """Prefill, blended if there is something to reuse; None if cancelled meanwhile."""
        is_asked = self.tried.stack is not None and not _is_refused(request)
        chunks = chunks_of(request.prepared.parts) if is_asked else {}
        with self.store.reads.wanting(chunks):
            if chunks:
                yield Turn(chunks)
            return None if request.cancel.is_set() else (yield from self._run(request))

    def _run(self, request: Request) -> Work[Prefilled | None]:
        prompt, stack = request.prepared, self.tried.stack
        reserve = min(request.sampling.max_tokens, GROWTH_TOKENS)
        prefix, told = (yield from self._stored_prefix(request)), None
        asked, parts = _asked(prefix), prompt.parts
        if stack is not None and not _is_refused(request) and parts:
            chunks = PromptChunks(
                prompt, self.store, parts, prefix, asked=asked, request_id=request.request_id
            )
            blended = yield from self._blended(stack, request, chunks, reserve)
            if not isinstance(blended, PrefillReport):
                return blended
            told = blended
        told = told or _with_times(self._told_unasked(request), asked)
        if stack and prefix and prefix.tokens >= max(1, LEAST_SHARE * len(prompt.token_ids)):
            chunks = PromptChunks(
                prompt, self.store, (), prefix, asked=told, request_id=request.request_id
            )
            continued = yield from self._blended(stack, request, chunks, reserve)
            if continued is None:
                return None
            if isinstance(continued, Prefilled):
                return _told(continued, told)
            told = _with_times(told, continued)
        return (yield from self._ordinarily(request, reserve, told))

    def keep(self, request: Request, prefilled: Prefilled, writer: PrefixWriter) -> None:
        """Queue the prefix of a finished request for the store.

        Chunks are never part of it, even if their KV was computed: ``evict_document`` must remove
        all KV of a document, and chunks rarely recur in the same order. The prefix ends at the
        first chunk; without chunks it is the whole prompt and its answer. In a conversation it
        ends where the text ends that others share.
        """
        names, cache, prompt = self._names(request), prefilled.cache, request.prepared
        if names is None or not isinstance(cache, FusedCache):
            return
        held = (*prompt.token_ids, *prefilled.answer)[: cache.get_seq_length()]
        writer.put(names.blocks(held[: prompt.prefix_end]), cache.fused)

    def keeps(self, request: Request) -> bool:
        """Whether the prefix of a request may be kept after its answer."""
        return self._names(request) is not None

    def _names(self, request: Request) -> PrefixKeys | None:
        """Return what makes the keys of a request's prefix blocks; None without prefix caching."""
        if self._prefixes is None or not request.config.reuse_prefix or request.full:
            return None
        return self._prefixes.salted(request.prepared.cache_salt)

    def _stored_prefix(self, request: Request) -> Work[StoredPrefix | None]:
        """Look up the stored blocks of a prompt's prefix; None if cancelled meanwhile."""
        names, prompt = self._names(request), request.prepared
        if names is None:
            return None
        # The last token is always computed: it yields the logits.
        before = prompt.token_ids[:-1][: prompt.prefix_end]
        try:
            found = self.lookups.submit(StoredPrefix.find, self.store, names.blocks(before))
        except RuntimeError:  # the interpreter ends
            return None
        yield [found]
        return None if request.cancel.is_set() else found.result()

    def compare(self, request: Request, compared: Compared) -> Work[Comparison | None]:
        """Compare a blended prompt with full prefill.

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

    def _compared(self, request: Request, compared: Compared) -> Work[Comparison | None]:
        stack, prompt = self.tried.stack, request.prepared
        chunks = PromptChunks(prompt, self.store, prompt.parts)
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
            done = yield from while_wanted(steps, Cancellation(), source)
        return done if isinstance(done, Comparison) else None

    def _blended(
        self,
        stack: TransformersStack,
        request: Request,
        chunks: PromptChunks,
        reserve: int,
    ) -> Work[Prefilled | PrefillReport | None]:
        """Prefill by a blend pass; one that runs out of memory is abandoned and freed."""
        try:
            return (yield from self._run_pass(stack, request, chunks, reserve))
        except Exception as error:
            lack = lack_of_memory(error)
            if lack is None:
                raise
        # After the handler: the error's traceback kept the pass, and so would a logged one.
        give_back_unused()
        logger.warning(
            "a prompt of %d tokens is not blended: %s (%s)", len(chunks.token_ids), NO_ROOM, lack
        )
        return _with_times(
            PrefillReport(no_room(lack), chunks=chunks.missed(NO_ROOM)), chunks.asked
        )

    def _run_pass(
        self,
        stack: TransformersStack,
        request: Request,
        chunks: PromptChunks,
        reserve: int,
    ) -> Work[Prefilled | PrefillReport | None]:
        config = request.config
        if not chunks.placed:
            config = BlendConfig(selector="none", recompute_ratio=0.0, cost_model=config.cost_model)
        else:
            config = config_for(config, chunks.placed, len(chunks.token_ids))
        with chunks.source(stack, config) as source:
            steps = blended_prefill(
                stack, chunks, source, config, reserve, controller=self.tried.controller
            )
            return (yield from while_wanted(steps, request.cancel, source))

    def _ordinarily(
        self, request: Request, reserve: int, told: PrefillReport
    ) -> Work[Prefilled | None]:
        """Serve a prompt by the model's own prefill, and record its duration."""
        ids, controller = request.prepared.token_ids, self.tried.controller
        steps = ordinary_prefill(self.tried.ordinary, ids, reserve, told)
        done = yield from while_wanted(steps, request.cancel)
        if done is not None and controller is not None:
            work = prefill_cost(controller.costs, len(ids))
            controller.rates.record("prefill", work, done.report.seconds["recompute"])
        return done

    def _told_unasked(self, request: Request) -> PrefillReport:
        """Return the report of a prompt that is not blended, without asking the store."""
        placed, refusal = request.prepared.parts, self.tried.refusal
        if request.full:
            return PrefillReport(FULL_PREFILL)
        if not placed:
            return PrefillReport(NO_CHUNK)
        if (stopped := request.steering.refusal) is not None:
            return PrefillReport(stopped, chunks=[chunk.report(STOPPED) for chunk in placed])
        assert refusal is not None  # noqa: S101 (otherwise the store is asked)
        why = Reason(refusal.code, f"{UNSUPPORTED}: {refusal}")
        return PrefillReport(why, chunks=[chunk.report(UNSUPPORTED) for chunk in placed])


def _is_refused(request: Request) -> bool:
    """Whether a request is served by ordinary prefill, whatever is stored."""
    return request.full or request.steering.refusal is not None


def _told(continued: Prefilled, told: PrefillReport) -> Prefilled:
    """Return a prefill that continued from a stored prefix, with why it reuses no chunk."""
    own = continued.report
    report = replace(
        told,
        compute_share=own.compute_share,
        prefix_tokens=own.prefix_tokens,
        seconds=own.seconds,
        starts=own.starts,
        load_by_tier=own.load_by_tier,
    )
    return replace(continued, report=report)


def _asked(prefix: StoredPrefix | None) -> PrefillReport:
    """Return what looking up a prefix has taken."""
    if prefix is None:
        return NOT_ASKED
    return PrefillReport(seconds={"look_up": prefix.seconds}, starts={"look_up": prefix.began})


def _with_times(told: PrefillReport, spent: PrefillReport) -> PrefillReport:
    """Return a report with the times spent so far."""
    return replace(told, seconds=spent.seconds, starts=spent.starts)
