"""Runs a model's own forward: over a prompt, then token by token, for several texts at once.

Texts that decode at the same time share one forward pass where possible. Projections, norms and
experts run on all of them at once; attention runs text by text, since each has a KV cache of its
own length. No KV is copied or padded.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.attention import attend_to
from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.answer import RawLogprob
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.memory import give_back_unused, lack_of_memory
from cacheblend_rag.reason import ReasonCode

SCORED_ROWS = 256
"""So many tokens' logits are held at once while a prompt is scored."""


def raw_logprob(logits: Tensor, token: int, most: int) -> RawLogprob:
    """Return the log-probability of a token and of the ``most`` likely ones, by logits."""
    shares = logits.float().log_softmax(-1)
    top = shares.topk(most)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return RawLogprob(token, float(shares[token]), tuple(pairs))


@dataclass(frozen=True)
class OrdinaryPrefill:
    """How a model is run without blending.

    stack: of a model that can be blended; its KV goes into a FusedCache. cache_name: the argument
    for the cache of another model; "" if no cache works, so that each token computes
    the whole text again. decodes_batches: whether texts with a FusedCache each may be decoded
    together.
    """

    model: PreTrainedModel
    stack: TransformersStack | None = None
    cache_name: str = "past_key_values"
    decodes_batches: bool = False

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the arguments that the model takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    def prefill(self, token_ids: Sequence[int], reserve: int) -> tuple[Cache | None, Tensor]:
        """Return the cache of a prompt, and the next token's logits.

        reserve: capacity for tokens to be decoded. Logits: (1, vocabulary) float32.
        """
        cache = self._empty_cache(len(token_ids), reserve)
        return cache, self._run(token_ids, cache)[:, -1]

    def scored(
        self, token_ids: Sequence[int], reserve: int, most: int
    ) -> tuple[Cache | None, Tensor, list[RawLogprob]]:
        """Return as ``prefill`` does, and the log-probability of each token; NaN for the first.

        most: so many of the most likely tokens are told, too.
        """
        cache = self._empty_cache(len(token_ids), reserve)
        # Only our cache is known to take several tokens behind others, whatever the layers.
        rows = SCORED_ROWS if isinstance(cache, FusedCache) else len(token_ids)
        told = [RawLogprob(token_ids[0], math.nan, ())]
        for start in range(0, len(token_ids), rows):
            part = token_ids[start : start + rows]
            logits = self._run(part, cache, start=start, keep=len(part))[0]
            following = token_ids[start + 1 : start + 1 + len(part)]
            told += [raw_logprob(row, token, most) for row, token in zip(logits, following)]  # noqa: B905
        return cache, logits[-1:], told

    def _empty_cache(self, tokens: int, reserve: int) -> Cache | None:
        if self.stack is not None:
            fused = FusedKV(self.stack.geometry, tokens, reserve)
            return FusedCache(fused, 0, self.stack.windows)
        return DynamicCache(config=self.model.config) if self.cache_name else None

    def decode(self, cache: Cache | None, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after ``token_ids``; ``cache`` holds all of them but the last."""
        return self.continued(cache, token_ids, 1)

    def continued(self, cache: Cache | None, token_ids: Sequence[int], count: int) -> Tensor:
        """Return the logits after each of the last tokens, (count, vocabulary) float32.

        cache: holds all but those, and gets them, too; without one the whole text is computed.
        """
        start = 0 if cache is None else len(token_ids) - count
        return self._run(token_ids[start:], cache, start=start, keep=count)[0]

    def _run(
        self, token_ids: Sequence[int], cache: Cache | None, start: int = 0, keep: int = 1
    ) -> Tensor:
        """Return (1, keep, vocabulary) float32 logits, of the last tokens."""
        ids = token_tensor(token_ids, self.model.device)[None]
        options: dict[str, Any] = {}
        if "logits_to_keep" in self.parameters:
            options["logits_to_keep"] = keep
        if cache is not None:
            options[self.cache_name] = cache
            if "position_ids" in self.parameters:
                positions = torch.arange(start, start + len(token_ids), device=ids.device)
                options["position_ids"] = positions[None]
        out = self.model(input_ids=ids, use_cache=cache is not None, **options)
        return cast(Tensor, out.logits[:, -keep:].float())


GROWTH_TOKENS = 256


class FusedCache(Cache):  # type: ignore[misc] # base is untyped
    """A cache that decodes in place: no step copies KV; sliding-window layers keep all of it.

    fused: the prompt's KV, or an empty buffer that prefill will fill.
    length: tokens of it that hold KV already.
    windows: each layer's sliding window in tokens, or None. A layer with one attends to the tokens
    in it alone, as long as all windows are of one size: the model builds one mask for all of them.
    """

    def __init__(
        self, fused: FusedKV, length: int, windows: Sequence[int | None] | None = None
    ) -> None:
        self.fused = fused
        depth = fused.keys.shape[0]
        if windows is None or len({window for window in windows if window}) != 1:
            windows = (None,) * depth
        super().__init__(layers=[_FusedLayer(fused, i, length, windows[i]) for i in range(depth)])


def _grow(fused: FusedKV, tokens: int) -> None:
    """Make room for at least so many tokens, keeping what is there."""
    capacity = fused.keys.shape[2]
    for name in ("keys", "values"):
        old: Tensor = getattr(fused, name)
        new = old.new_empty(*old.shape[:2], max(tokens, capacity + GROWTH_TOKENS), old.shape[3])
        new[:, :, :capacity] = old
        setattr(fused, name, new)


class _FusedLayer(DynamicLayer):  # type: ignore[misc] # base is untyped
    """One layer's view of the fused buffer.

    It refers to the buffer, not to the cache: a reference cycle would keep the KV alive until the
    next garbage collection.
    """

    def __init__(self, fused: FusedKV, layer: int, length: int, window: int | None) -> None:
        super().__init__()
        self.fused, self.layer, self.length, self.window = fused, layer, length, window
        self.is_sliding = window is not None
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.shape[2]
        fused = self.fused
        if end > fused.keys.shape[2]:
            _grow(fused, end)
        if (
            key_states.shape[1::2] != fused.keys.shape[1::2]
            or value_states.shape != key_states.shape
        ):
            raise UnsupportedModelError(
                "its layers do not cache the keys and values they use",
                ReasonCode.UNSUPPORTED_ATTENTION,
            )
        first = self._first_seen()
        self.length = end
        return (
            _extended(fused.keys, self.layer, key_states, start, first),
            _extended(fused.values, self.layer, value_states, start, first),
        )

    def crop(self, max_length: int) -> None:
        """Forget the KV of all later tokens."""
        self.length = min(self.length, max_length)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_seen()
        return self.length + query_length - first, first

    def _first_seen(self) -> int:
        """Return the first position that any of the next tokens attends to."""
        return 0 if self.window is None else max(0, self.length - self.window + 1)


def _extended(held: Tensor, layer: int, new: Tensor, start: int, first: int) -> Tensor:
    """Write new KV at ``start``; return the layer's from ``first`` to its end, not copied.

    held: (layers, kv_heads, capacity, head_dim). new, and what is returned: (1, kv_heads, tokens,
    head_dim). As few operations as can be: on a CPU a step's time is partly theirs.
    """
    of_layer, count = held.narrow(0, layer, 1), new.shape[2]
    of_layer.narrow(2, start, count).copy_(new)
    return of_layer.narrow(2, first, start + count - first)


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
