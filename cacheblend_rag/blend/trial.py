"""At load, tests whether layers, run one at a time on some rows, reproduce the model's outputs.

No list of model names decides; each model is tested:

- the inputs of its first layer must equal those of ``embed``;
- a layer must compute the same at large positions as at small ones, except for its rotary
  embedding: its queries and keys there must be those at small positions, rotated, and its values
  and its output the same; this also finds how keys are rotated;
- each layer, run on rows that are not contiguous, must give the same output as in the model,
  after enough synthetic KV to exceed its sliding window.

Layers are compared one by one on the model's own hidden states, so that rounding does not
accumulate and the error names the layer. Of a model in bfloat16 or float16 the rounding error is
measured (``rounding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import Attention
from cacheblend_rag.blend.rotary import Layout, Rotation, Table, find_layout, turns_into
from cacheblend_rag.blend.rounding import (
    ROUNDING_FACTOR,
    TOLERANCE,
    beyond_rounding,
    close,
    is_low,
    layer_noise,
)
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import (
    Attend,
    AttentionCall,
    DecoderStack,
    on_all_ranks,
    probe_layer,
)
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import ReasonCode

TRIAL_TOKENS = 24
TRIAL_OFFSET = 1_000
MOST_BEHIND = 4_224
"""Synthetic tokens before the tested ones: enough to exceed a window of 4,096."""
ODD_ROWS = (1, 2, 5, 11, 17, 18)
"""Some rows of the test that are run separately from the others."""

TURN_ULPS = 5
"""Units in the last place by which a pair of key components may be off: from rounding of the
table, the products and the sum, at both positions."""
TURN_STEPS = 1.6
"""The same for a KV cache that is less precise than the model: queries may be rounded like it."""
EMBEDDING_ULPS, OUTPUT_ULPS = 0.5, 4.0
TRAIT_STEPS = 8
"""Steps per factor of two: engines' rounding is far below one step, a wrong YaRN scale above."""
LARGEST_MADE_UP = 240.0
"""A limit that 8-bit caches and float16 can represent."""
EDGE_MARGIN = 2
"""Synthetic tokens on both sides of the edges of the rows' windows, which get large values."""
ANGLE_ROUNDING = 2.4e-7
"""Relative error per position in float32: a model's own rotary table is that far off."""


class TriedStack(DecoderStack, Protocol):
    """A stack whose rotary layouts are not known yet."""

    layouts: Sequence[Layout | None] | None

    def tables(self, offset: int) -> list[Table | None]:
        """Return each layer's rotary table for a move by ``offset``; None if it has none."""


@dataclass(frozen=True)
class Reference:
    """The model's own results for some tokens after synthetic KV.

    token_ids: (tokens,) int64. start: position of the first; the synthetic KV fills all
    positions before. inputs, outputs: hidden states, (1, tokens, hidden), before and after each
    layer; in float32 if the layer was run so.
    """

    token_ids: Tensor
    start: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def trial_tokens(vocabulary: int, device: torch.device) -> Tensor:
    """Return the tokens (TRIAL_TOKENS,) that models are tested with, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (TRIAL_TOKENS,), generator=generator).to(device)


def tokens_behind(windows: Sequence[int | None], context_window: int) -> int:
    """Return how many synthetic tokens to put before the test's, to exceed sliding windows."""
    widest = max((window for window in windows if window and window <= MOST_BEHIND), default=0)
    return max(0, min(widest + TRIAL_TOKENS, MOST_BEHIND, context_window - TRIAL_TOKENS))


def made_up(stack: DecoderStack, ids: Tensor, tokens: int) -> FusedKV:
    """Return a buffer with ``tokens`` of synthetic KV, and room for the test's tokens after them.

    ids: (tokens,), the test's. Each component of a layer's keys and values has the mean and the
    spread that it has in the test's tokens. Keys differ so little that each of them gets a share of
    attention, and values at the edge of a sliding window are so large that one key too many or too
    few in the window changes the result.
    """
    shape = stack.geometry
    fused = FusedKV(shape, tokens + TRIAL_TOKENS)
    draw = torch.Generator(shape.device).manual_seed(1)
    hidden = stack.embed(ids[None])
    positions = torch.arange(tokens, tokens + ids.numel(), device=ids.device)
    inputs = stack.position_inputs(positions[None])
    for layer in range(shape.layers):
        call = probe_layer(stack, layer, hidden, inputs)
        keys, values = fused.of_layer(layer)
        keys.copy_(_alike(call.key, keys.shape, draw, even_spread(call)))
        values.copy_(_alike(call.value, values.shape, draw) * _edges(call.window, tokens, values))
        for part in (keys, values):
            part.clamp_(-LARGEST_MADE_UP, LARGEST_MADE_UP)
    return fused


def _alike(
    real: Tensor, shape: Sequence[int], draw: torch.Generator, spread: float = 1.0
) -> Tensor:
    """Return random KV like ``real``, (1, kv_heads, tokens, head_dim)."""
    mean, std = (of(real[0].float(), 1)[:, None] for of in (torch.mean, torch.std))
    random = torch.randn(tuple(shape), generator=draw, device=real.device)
    return mean + spread * std * random


def even_spread(call: AttentionCall) -> float:
    """Return the factor on the spread of keys that makes logits differ by one or less."""
    kv_heads = call.key.shape[1]
    query = call.query[0].float().reshape(kv_heads, -1, *call.query.shape[2:])
    std = call.key[0].float().std(1)[:, None, None]
    logits = float(((query * std).norm(dim=-1) * call.scaling).mean())
    return min(1.0, 1.0 / max(logits, 1e-6))


def _edges(window: int | None, tokens: int, values: Tensor) -> Tensor:
    """Return the factors on synthetic values, (1, tokens, 1)."""
    factors = torch.ones(1, values.shape[1], 1, device=values.device)
    if window is not None:
        first = max(0, tokens - window - EDGE_MARGIN)
        last = max(0, tokens + TRIAL_TOKENS - window + EDGE_MARGIN)
        factors[:, first:last] = max(1, min(window, tokens)) ** 0.5
    return factors


def find_layouts(
    stack: TriedStack, ids: Tensor, context_window: int, *, cache_step: float | None = None
) -> list[Layout | None]:
    """Return how each layer rotates its keys; raises UnsupportedModelError if that is not found.

    Also raises it if a layer depends on positions in another way: chunk KV is used at other
    positions than those where it was computed, which only a rotary embedding can compensate.

    ids: (tokens,). context_window: layers are also tested near its end, to detect a rotary
    embedding that changes with the length of the prompt. cache_step: see ``check_layers``.
    """
    count = ids.numel()
    offsets = sorted({min(TRIAL_OFFSET, context_window - count), context_window - count})
    positions = torch.arange(count, device=ids.device)[None]
    places = [stack.position_inputs(positions + offset) for offset in (0, *offsets)]
    tables = [stack.tables(offset) for offset in offsets]
    hidden = stack.embed(ids[None])
    layouts: list[Layout | None] = []
    for layer in range(stack.geometry.layers):
        near, *far = (_run_alone(stack, layer, hidden, inputs) for inputs in places)
        handed = [table for at in tables if (table := at[layer]) is not None]
        tolerances = [turn_tolerance(near.call.key, offset) for offset in offsets]
        keys = [there.call.key for there in far]
        found = find_layout(handed, near.call.key, keys, tolerances)
        if not all(on_all_ranks(stack, [found != "unknown"])) or found == "unknown":
            what = (
                "its rotary embedding cannot be undone by an offset"
                if handed
                else "its layers get no rotary table"
            )
            raise UnsupportedModelError(
                f"{what}: keys of layer {layer}, moved by {max(offsets)} positions, differ from "
                "those computed there",
                ReasonCode.UNSUPPORTED_POSITIONS,
            )
        tolerances = [max(by, TURN_STEPS * (cache_step or 0.0)) for by in tolerances]
        moves = [found.move(*table) for table in handed] if found else [None] * len(far)
        for offset, there, by, tolerance in zip(offsets, far, moves, tolerances, strict=True):
            differing = near.differs(there, by, tolerance)
            if not all(on_all_ranks(stack, [differing is None])):
                raise UnsupportedModelError(
                    f"it depends on absolute positions beyond its rotary embedding: the "
                    f"{differing or 'result'} of layer {layer} changes at position {offset}",
                    ReasonCode.UNSUPPORTED_POSITIONS,
                )
        layouts.append(found)
    _check_alike(layouts, tables[0])
    return layouts


@dataclass(frozen=True)
class _RunAlone:
    """A layer run on the same hidden states and the same attention output, at some position."""

    call: AttentionCall
    before: Tensor
    output: Tensor

    def differs(self, far: _RunAlone, by: Rotation | None, tolerance: float) -> str | None:
        """Name a result, keys aside, that changes with the absolute position; None if none does."""
        here, there = self.call, far.call
        if not turns_into(here.query, there.query, by, tolerance):
            return "queries"
        if here.scaling != there.scaling:
            return "scaling"
        if not turns_into(here.value, there.value, None, tolerance):
            return "values"
        if not close(far.output, self.output, self.before, ulps=OUTPUT_ULPS):
            return "output"
        return None


def _run_alone(stack: DecoderStack, layer: int, hidden: Tensor, inputs: Any) -> _RunAlone:
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        draw = torch.Generator(hidden.device).manual_seed(2)
        query = call.query.transpose(1, 2)
        random = torch.randn(query.shape, generator=draw, device=hidden.device)
        return (random * call.value.float().std()).to(query.dtype)

    output = stack.run_layer(layer, hidden, inputs, attend)
    return _RunAlone(calls[0], hidden, output)


def turn_tolerance(keys: Tensor, offset: int) -> float:
    """Return how far keys moved by ``offset`` may be off, relative to them."""
    rounding = max(TOLERANCE, TURN_ULPS * torch.finfo(keys.dtype).eps)
    return rounding + offset * ANGLE_ROUNDING


def _check_alike(layouts: Sequence[Layout | None], tables: Sequence[Table | None]) -> None:
    """Raise UnsupportedModelError unless layers with rotary rotate the same components."""
    kinds = {
        (layout.interleaved, layout.move(*table).cos.numel())
        for layout, table in zip(layouts, tables, strict=True)
        if layout is not None and table is not None
    }
    if len(kinds) > 1:
        raise UnsupportedModelError(
            "its layers rotate different components of their keys",
            ReasonCode.UNSUPPORTED_POSITIONS,
        )


def key_traits(stack: DecoderStack, ids: Tensor) -> list[int]:
    """Return the size of a model's keys and each layer's rotary frequencies, in coarse steps.

    ids: (tokens,). Engines that compute the same keys get the same result despite rounding;
    engines that interpret a model's rotary settings differently do not.
    """
    positions = torch.arange(ids.numel(), device=ids.device)[None]
    hidden, inputs = stack.embed(ids[None]), stack.position_inputs(positions)
    keys = probe_layer(stack, 0, hidden, inputs).key.float()
    by = stack.rotation(1)
    speeds = torch.atan2(by.sin, by.cos).abs().double()
    slow = [_steps(float(row[row > 0].log2().mean())) if row.any() else 0 for row in speeds.cpu()]
    return [_steps(float(keys.square().mean().sqrt().log2())), *slow]


def _steps(value: float) -> int:
    return round(value * TRAIT_STEPS)


def check_embedding(stack: DecoderStack, reference: Reference) -> None:
    """Raise UnsupportedModelError unless layer 0 gets the tokens' embeddings and nothing else."""
    found = stack.embed(reference.token_ids[None])
    wanted = reference.inputs[0]
    found = found.to(wanted.dtype)
    alike = found.shape == wanted.shape and close(found, wanted, ulps=EMBEDDING_ULPS)
    if not all(on_all_ranks(stack, [alike])):
        raise UnsupportedModelError(
            "its first layer gets more than the tokens' embeddings (learned positions?)",
            ReasonCode.UNSUPPORTED_POSITIONS,
        )


def check_layers(
    stack: DecoderStack,
    reference: Reference,
    fused: FusedKV,
    attention: Attention | None = None,
    *,
    cache_step: float | None = None,
    quantized: bool = False,
) -> None:
    """Raise UnsupportedModelError unless each layer, run alone, gives its result in the model.

    fused: the synthetic KV, with room for the tokens' own. attention: as for BlendPass. cache_step:
    of the model's own KV cache if it is less precise than the model, see ``rounding``. quantized:
    whether the weights are quantized, so that layers may round more than their dtype does.
    """
    positions = torch.arange(reference.token_ids.numel()) + reference.start
    odd = torch.zeros(positions.numel(), dtype=torch.bool)
    odd[list(ODD_ROWS)] = True
    device = stack.geometry.device
    parts = [
        (Rows.at(positions[part].numpy(), device), part.nonzero()[:, 0].to(device))
        for part in (odd, ~odd)
    ]
    every = Rows.at(positions.numpy(), device)

    def is_faithful(layer: int, before: Tensor, wanted: Tensor) -> bool:
        call = probe_layer(stack, layer, before, stack.position_inputs(every.device[None]))
        fused.write(layer, every, call.key, call.value)
        found = torch.empty_like(wanted)
        for rows, here in parts:
            hidden, inputs = before.index_select(1, here), stack.position_inputs(rows.device[None])
            attend = _over(fused, rows, attention or RowAttention())
            found.index_copy_(1, here, stack.run_layer(layer, hidden, inputs, attend))
        if not is_low(wanted) and cache_step is None:
            alike = all(on_all_ranks(stack, [close(found, wanted, before, ulps=OUTPUT_ULPS)]))
            if alike or not quantized:
                return alike
        noise = layer_noise(stack, layer, before, rows=every, fused=fused, cache_step=cache_step)
        alike = beyond_rounding(found, wanted, noise) <= ROUNDING_FACTOR
        return all(on_all_ranks(stack, [alike]))

    for layer, (before, wanted) in enumerate(zip(reference.inputs, reference.outputs, strict=True)):
        if not is_faithful(layer, before, wanted):
            raise UnsupportedModelError(
                f"layer {layer}, run alone on some rows, gives a different result than in the model"
            )


def _over(fused: FusedKV, rows: Rows, attention: Attention) -> Attend:
    return lambda call: attention(call, fused, rows)
