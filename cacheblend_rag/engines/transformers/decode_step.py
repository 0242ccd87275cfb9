"""The decode steps of texts that are at work at the same time, run together where possible.

A batch is one forward pass. Projections, norms and experts run on all texts at once; attention runs
text by text, since each has a KV cache of its own length. No KV is copied or padded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheblend_rag.blend.attention import attend_to
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.memory import give_back_unused, lack_of_memory

logger = logging.getLogger(__name__)

_told: set[type[BaseException]] = set()
"""Kinds of errors that a batch has failed with: each is logged once."""


@dataclass(eq=False)
class DecodeStep:
    """One decode step of one text.

    ordinary: how the model was run when the text was prefilled. cache: of all tokens but the last.
    token_ids: the prompt and the answer so far.
    """

    ordinary: OrdinaryPrefill
    cache: Cache | None
    token_ids: Sequence[int]
    _result: Tensor | BaseException | None = None

    @property
    def may_share(self) -> bool:
        """Whether it may be run together with other texts' steps."""
        return self.ordinary.decodes_batches and isinstance(self.cache, FusedCache)

    def run(self) -> None:
        """Run it by itself."""
        try:
            self._result = self.ordinary.decode(self.cache, self.token_ids)
        except BaseException as error:  # whatever it is: the thread must go on
            self._result = error

    def end(self, logits: Tensor) -> None:
        """Set its result, (1, vocabulary) float32."""
        self._result = logits

    def take(self) -> Tensor:
        """Return the logits, (1, vocabulary) float32, once it has been run; raises its error."""
        result, self._result = self._result, None
        try:
            if isinstance(result, BaseException):
                raise result
            return cast(Tensor, result)
        finally:
            del result  # else its traceback would keep it, and the KV, in a circle of references


def run_steps(steps: Sequence[DecodeStep]) -> None:
    """Run one decode step of each text, together where that is possible.

    A batch that fails is halved, down to single steps, so that an error is of the text it is about.
    """
    shared = [step for step in steps if step.may_share]
    for step in steps:
        if not step.may_share:
            step.run()
    _run_together(shared)


def _run_together(steps: Sequence[DecodeStep]) -> None:
    if len(steps) == 1:
        steps[0].run()
    elif steps and not _has_run(steps):
        give_back_unused()
        middle = len(steps) // 2
        _run_together(steps[:middle])
        _run_together(steps[middle:])


def _has_run(steps: Sequence[DecodeStep]) -> bool:
    """Run steps as one forward pass; returns whether that was possible."""
    stack = cast(TransformersStack, steps[0].ordinary.stack)
    caches = [cast(FusedCache, step.cache) for step in steps]
    try:
        logits = decode_batch(stack, caches, [step.token_ids[-1] for step in steps])
    except BaseException as error:
        if type(error) not in _told:
            _told.add(type(error))
            why = lack_of_memory(error) or f"{type(error).__name__}: {error}"
            logger.warning("%d requests decode in smaller batches: %s", len(steps), why)
        return False
    for step, row in zip(steps, logits[:, None], strict=True):
        step.end(row)
    return True


def decode_batch(
    stack: TransformersStack, caches: Sequence[FusedCache], token_ids: Sequence[int]
) -> Tensor:
    """Return the logits after each text's last token, (texts, vocabulary) float32.

    caches: each text's KV but the last token's, which it gets; after an error each holds what it
    held before. token_ids: each text's last token.
    """
    lengths = [cache.get_seq_length() for cache in caches]
    device = stack.geometry.device

    def attend(call: AttentionCall) -> Tensor:
        return torch.cat([_attended(call, row, cache) for row, cache in enumerate(caches)])

    ids = torch.tensor(token_ids, device=device)[:, None]
    positions = torch.tensor(lengths, device=device)[:, None]
    try:
        return stack.next_logits(ids, positions, attend)
    except BaseException:
        for cache, length in zip(caches, lengths, strict=True):
            cache.crop(length)
        raise


def _attended(call: AttentionCall, row: int, cache: FusedCache) -> Tensor:
    """Write one text's new KV into its cache; return its attention, (1, 1, heads, head_dim)."""
    here = slice(row, row + 1)
    keys, values = cache.layers[call.layer].update(call.key[here], call.value[here])
    if call.window is not None:
        first = max(0, keys.shape[2] - call.window)
        keys, values = keys[:, :, first:], values[:, :, first:]
    return attend_to(replace(call, query=call.query[here]), keys, values)
