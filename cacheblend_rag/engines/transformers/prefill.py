"""Prefills requests by a blend pass if there is KV to reuse, else by the model's own prefill.

Also scores given answers behind a prefilled prompt.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.answer import FULL_PREFILL, PROMPT_SCORED, RawLogprob, Request
from cacheblend_rag.engines.prefixes import Prefixes, PrefixKeys, StoredPrefix
from cacheblend_rag.engines.prepare import BLOCK_TOKENS
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers.loop import Turn, Work
from cacheblend_rag.engines.transformers.ordinary_prefill import (
    GROWTH_TOKENS,
    FusedCache,
    OrdinaryPrefill,
)
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.watched_model import TriedModel
from cacheblend_rag.errors import ConfigError, PromptTooLongError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import Lack, no_room, unless_lacking
from cacheblend_rag.prefill.chunk_loader import begin_reading
from cacheblend_rag.prefill.comparing import Compared, Comparison, compare
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import LEAST_SHARE, NO_CHUNK, config_for, missed
from cacheblend_rag.prefill.prompt_pass import ALL_EXACT, Destination, FusedPrompt, PromptPass
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.reason import Miss, Reason
from cacheblend_rag.report import BlendReport, ChunkReport, PrefillReport
from cacheblend_rag.settings import BlendConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Prefilled:
    """A prompt's KV, and the report of its prefill.

    cache: None if the model has none. logits: (1, vocabulary) float32 of the first new
    token. report: decoding adds its seconds to it. answer: the tokens decoded so far.
    prompt_logprobs: of the prompt's tokens, if they are asked for.
    """

    cache: Cache | None
    logits: Tensor
    report: PrefillReport
    answer: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[RawLogprob] = ()


class CancelledError(Exception):
    """The request was cancelled before its prompt was prefilled."""


@dataclass(eq=False)
class Prefill:
    """The prefill of one request, in steps which the model's loop runs.

    Three ways are tried in turn: reuse of the prompt's chunks and prefix, of its prefix alone, and
    the model's own prefill.

    tried: the tested model. prefixes: looks up and stores what prompts begin with.
    """

    request: Request
    tried: TriedModel
    store: TieredKVStore
    prefixes: Prefixes

    def __post_init__(self) -> None:
        # Why the ways that were tried did not work, and the time spent so far.
        self._told = PrefillReport()
        self._prefix: StoredPrefix | None = None
        # The chunks that the prefix holds, but for less than a block.
        self._held: list[PlacedChunk] = []
        # Whether the KV is that of full prefill; deletions of passages by now.
        self.is_exact, self._deletions = True, self.prefixes.passages.deletions
        # The chunks' reports, once the store was asked for them.
        self._found: list[ChunkReport] = []

    def run(self) -> Work[Prefilled | None]:
        """Prefill the prompt; None if the request is cancelled meanwhile."""
        chunks = [chunk.key for chunk in self._placed] if self._may_blend else []
        with self.store.reads.wanting(chunks):
            if chunks:
                yield Turn()
            try:
                self._check_wanted()
                yield from self._find_prefix()
                blended = (yield from self._with_chunks()) or (yield from self._with_prefix())
                return self._with_held(blended or self._ordinarily())
            except CancelledError:
                return None

    def keep(self, prefilled: Prefilled, *, whole: bool) -> None:
        """Queue the prefix of a finished request for the store: if exact, prompt and answer.

        Else it ends at the first chunk, and in a conversation where the text ends that others
        share. whole: whether what follows may be kept: all passages are still known.
        """
        keys, cache, prompt = self._prefix_keys, prefilled.cache, self.request.prepared
        if keys is not None and isinstance(cache, FusedCache):
            is_whole = whole and self.is_exact and not prompt.conversation_key
            held = (*self._token_ids, *prefilled.answer)[: cache.get_seq_length()]
            blocks = keys.blocks(held[: None if is_whole else prompt.prefix_end])
            self.prefixes.put(blocks, cache.fused, self._own(blocks), self._deletions)

    def again(self) -> Prefill | None:
        """Return the prefill in full of the prompt up to its last chunk, for idle time.

        None unless it was blended, and an earlier prompt began alike.
        """
        keys, prompt = self._prefix_keys, self.request.prepared
        if keys is None or self.is_exact or prompt.conversation_key:
            return None
        end = self._placed[-1].end
        if not self.prefixes.comes_again(keys.blocks(self._token_ids[:end]), end):
            return None
        encoded = replace(prompt.encoded, token_ids=prompt.token_ids[: end + 1])
        config = self.request.config.with_changes(recompute_ratio=1.0, trace=False)
        prompt = replace(prompt, encoded=encoded)
        request = replace(self.request, prepared=prompt, config=config, cancel=Cancellation())
        # Pauses between steps of idle work are no measure of any speed.
        return replace(self, request=request, tried=replace(self.tried, controller=None))

    def compare(self, compared: Compared) -> Work[Comparison | None]:
        """Compare the blended prompt with full prefill.

        Returns None if it can no longer be blended, or if there is no memory for it.
        """
        done = yield from unless_lacking(self._compared(compared))
        if not isinstance(done, Lack):
            return done
        tokens = compared.longest
        logger.warning(
            "an answer after %d tokens is not compared: %s (%s)", tokens, Miss.NO_ROOM, done.why
        )
        return None

    # The request

    @property
    def _token_ids(self) -> Sequence[int]:
        return self.request.prepared.token_ids

    @property
    def _placed(self) -> Sequence[PlacedChunk]:
        return self.request.prepared.parts

    @property
    def _may_blend(self) -> bool:
        """Whether the store is asked for the chunks."""
        is_refused = self.request.full or self.request.steering.refusal is not None
        return self.tried.stack is not None and not is_refused

    @property
    def _reserve(self) -> int:
        """For how many tokens of the answer the prompt's KV has room at first."""
        return min(self.request.sampling.max_tokens, GROWTH_TOKENS)

    @cached_property
    def _prefix_keys(self) -> PrefixKeys | None:
        """Makes the keys of the prompt's prefix blocks; None without prefix caching."""
        request = self.request
        if self.tried.stack is None or not request.config.reuse_prefix or request.full:
            return None
        return self.prefixes.keys(self.tried.identity, request.prepared.cache_salt)

    def _own(self, blocks: Sequence[KVKey]) -> int:
        """Return how many of the prompt's blocks come before its first chunk."""
        end = self.request.prepared.prefix_end
        return len(blocks) if end is None else end // BLOCK_TOKENS

    def _check_wanted(self) -> None:
        if self.request.cancel.is_set():
            raise CancelledError

    def _tell(self, why: PrefillReport) -> None:
        """Replace what is told by another report, which has taken as long."""
        self._told = replace(why, seconds=self._told.seconds, starts=self._told.starts)

    # The three ways

    def _find_prefix(self) -> Work[None]:
        """Look up the stored blocks of the prompt's prefix."""
        if self._prefix_keys is None:
            return
        # The last token is always computed: it yields the logits.
        prompt = self.request.prepared
        end = prompt.prefix_end if prompt.conversation_key else None
        blocks = self._prefix_keys.blocks(self._token_ids[:-1][:end])
        looking = self.prefixes.find(blocks, self._own(blocks))
        if looking is None:
            return
        yield [looking]
        self._check_wanted()
        self._prefix, end = (found := looking.result()), found.tokens
        self._held = [c for c in self._placed if c.start < end and c.end < end + BLOCK_TOKENS]
        self._told.seconds["look_up"], self._told.starts["look_up"] = found.seconds, found.began

    def _with_chunks(self) -> Work[Prefilled | None]:
        """Reuse the chunks and the prefix; None if no chunk is reused, which is told."""
        if not self._placed or not self._may_blend:
            self._tell(self._unasked())
            return None
        end = 0 if self._prefix is None else self._prefix.tokens
        left = [chunk.behind(end) for chunk in self._placed if chunk not in self._held]
        config = config_for(self.request.config, left, len(self._token_ids))
        done = (yield from self._blended(config, left)) if left else None
        self.is_exact = done is None or done.report.ratio == 1
        return done

    def _unasked(self) -> PrefillReport:
        """Return the report of a prompt for whose chunks the store is not asked."""
        if self.request.full:
            is_scored = self.request.sampling.prompt_logprobs is not None
            return PrefillReport(PROMPT_SCORED if is_scored else FULL_PREFILL)
        if not self._placed:
            return PrefillReport(NO_CHUNK)
        why, miss = self.request.steering.refusal, Miss.GUARD_STOPPED
        if (refusal := self.tried.refusal) is not None and why is None:
            miss = Miss.UNSUPPORTED_MODEL
            why = Reason(refusal.code, f"{miss}: {refusal}")
        return PrefillReport(why, chunks=[chunk.report(miss) for chunk in self._placed])

    def _with_prefix(self) -> Work[Prefilled | None]:
        """Reuse the prefix alone, if it is worth a pass."""
        least = 1 if self._held else max(1, LEAST_SHARE * len(self._token_ids))
        if self._prefix is None or self._prefix.tokens < least:
            return None
        why, cost_model = self._told, self.request.config.cost_model
        config = BlendConfig(
            selector="none", recompute_ratio=0.0, min_tokens=0, cost_model=cost_model
        )
        done = yield from self._blended(config, ())
        self._tell(why)
        if done is None:
            return None
        names = ("compute_share", "prefix_tokens", "seconds", "starts", "load_by_tier")
        own = {name: getattr(done.report, name) for name in names}
        return replace(done, report=replace(why, **own))

    def _with_held(self, prefilled: Prefilled) -> Prefilled:
        """Add to the report the chunks whose KV came from the prefix cache."""
        report, end = prefilled.report, prefilled.report.prefix_tokens
        told = {chunk.start: chunk.report(None).held(end) for chunk in self._held}
        if any(chunk.hit for chunk in told.values()):
            own = end - sum(min(c.end, end) - c.start for c in self._held if c.start < end)
            report = replace(report, reason=None, prefix_tokens=own)
            if self.is_exact:
                report = replace(report, ratio=0.0, selector_reason=ALL_EXACT)
        others = (chunk for chunk in report.chunks if chunk.start not in told)
        return replace(prefilled, report=replace(report, chunks=[*told.values(), *others]))

    def _ordinarily(self) -> Prefilled:
        """Run the model's own prefill, and record its duration."""
        self._check_wanted()
        ordinary, controller, ids = self.tried.ordinary, self.tried.controller, self._token_ids
        watch = Stopwatch(ordinary.model.device, self._told.seconds, self._told.starts)
        told, scored = self.request.sampling.prompt_logprobs, list[RawLogprob]()
        if told is None:
            cache, logits = ordinary.prefill(ids, self._reserve)
        else:
            cache, logits, scored = ordinary.scored(ids, self._reserve, told)
        watch.lap("recompute")
        if controller is not None:
            work = prefill_cost(controller.costs, len(ids))
            controller.rates.record("prefill", work, watch.seconds["recompute"])
        return Prefilled(cache, logits, self._told, prompt_logprobs=scored)

    # A pass

    def _blended(
        self, config: BlendConfig, placed: Sequence[PlacedChunk]
    ) -> Work[Prefilled | None]:
        """Prefill by a blend pass; None if it is refused, which is told.

        A pass that runs out of memory is abandoned and freed. placed: the chunks to reuse.
        """
        done = yield from unless_lacking(self._pass(config, placed))
        if isinstance(done, Prefilled):
            return done
        if isinstance(done, PrefillReport):
            self._told = done
            return None
        tokens = len(self._token_ids)
        logger.warning(
            "a prompt of %d tokens is not blended: %s (%s)", tokens, Miss.NO_ROOM, done.why
        )
        chunks = missed(self._found, Miss.NO_ROOM) or [
            chunk.report(Miss.NO_ROOM) for chunk in placed
        ]
        self._tell(PrefillReport(no_room(done.why), chunks=chunks))
        return None

    def _pass(
        self, config: BlendConfig, placed: Sequence[PlacedChunk]
    ) -> Work[Prefilled | PrefillReport]:
        """Load, select and recompute: one chunk, then one block of rows in one layer, at a time."""
        stack = cast(TransformersStack, self.tried.stack)
        parts = [*([] if self._prefix is None else self._prefix.placed), *placed]
        with begin_reading(self.store, parts, stack) as source:
            work = PromptPass(
                stack,
                token_tensor(self._token_ids, stack.geometry.device),
                parts,
                source,
                config,
                destination=Destination(self._reserve, graphed=stack.graphed),
                controller=self.tried.controller,
                request_id=self.request.request_id,
            )
            work.watch.seconds.update(self._told.seconds)
            work.watch.starts.update(self._told.starts)
            try:
                done = yield from _while_wanted(work.steps(), self.request.cancel, source)
            finally:
                self._found = work.found
            if not isinstance(done, FusedPrompt):
                return done
            logits = stack.logits(cast(Tensor, done.hidden))
            work.watch.lap("first_token")
            cache = FusedCache(done.fused, len(self._token_ids), stack.windows)
            return Prefilled(cache, logits, done)

    def _compared(self, compared: Compared) -> Work[Comparison | None]:
        stack, config = self.tried.stack, self.request.config
        if stack is None:
            return None
        ids = token_tensor(compared.prompt, stack.geometry.device)
        room = Destination(len(compared.answer) - 1, needs_hidden=False)
        with begin_reading(self.store, self._placed, stack) as source:
            blended = PromptPass(stack, ids, self._placed, source, config, destination=room)
            steps = compare(
                stack, lambda last: stack.logits(last.transpose(0, 1)), compared, blended
            )
            done = yield from _while_wanted(steps, Cancellation(), source)
        return done if isinstance(done, Comparison) else None


def _while_wanted(steps: Steps[T], cancel: Cancellation, source: LayerSource) -> Work[T]:
    """Run steps, each once what it takes from ``source`` has been read; raises CancelledError."""
    while not cancel.is_set():
        try:
            next(steps)
        except StopIteration as done:
            return cast(T, done.value)
        yield source.awaited()
    raise CancelledError


@dataclass(frozen=True)
class ContinuationScore:
    """The model's predictions at each step of a given answer.

    Args:
        log_probs: (tokens, vocabulary) float32, natural logarithms, on the host; row i predicts the
            answer's token i after the prompt and its first i tokens.
        report: how the prompt was prefilled.
    """

    log_probs: Tensor
    report: BlendReport


def check_scored(
    prompt_tokens: int, continuations: Sequence[Sequence[int]], context_window: int
) -> None:
    """Check continuations before they are scored.

    Raises ConfigError for one without tokens, and PromptTooLongError if the longest does not fit
    behind the prompt.
    """
    if not all(continuations):
        raise ConfigError("continuation is empty: give at least one token to score")
    tokens = prompt_tokens + max(map(len, continuations), default=0)
    if tokens > context_window:
        raise PromptTooLongError(tokens, context_window)


def forced_log_probs(
    ordinary: OrdinaryPrefill, prefilled: Prefilled, token_ids: Sequence[int], answer: Sequence[int]
) -> Tensor:
    """Return the log-probabilities at each step of an answer, (tokens, vocabulary) float32.

    token_ids: the prompt's; whatever was decoded behind it before is forgotten. The prompt's KV is
    as before afterwards.
    """
    logits, more = prefilled.logits, len(answer) - 1
    if more:
        cache = _reusable(prefilled.cache)
        if isinstance(cache, FusedCache):
            cache.crop(len(token_ids))
        later = ordinary.continued(cache, (*token_ids, *answer[:-1]), more)
        logits = torch.cat([logits, later])
    return logits.log_softmax(-1).cpu()


def decodable(prefilled: Prefilled) -> Prefilled:
    """Return a prefilled prompt whose KV cache decoding may extend, so that the original can still
    be used to score answers.
    """
    return replace(prefilled, cache=_reusable(prefilled.cache), answer=[])


def _reusable(cache: Cache | None) -> Cache | None:
    """Return a cache that may be written to; only ours can be cut back, whatever the layers."""
    return cache if isinstance(cache, FusedCache) else copy.deepcopy(cache)
