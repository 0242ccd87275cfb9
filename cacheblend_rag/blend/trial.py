"""The trial of a model: whether its layers, driven one by one on chosen rows, do as in it.

Names say little about models and nothing about new ones, so each model is tried when it is loaded:

- what it hands its first layer must be what ``embed`` says;
- a layer must compute the same far on in a text as at its beginning, but for its rotary embedding:
  its queries and keys there must be those of the beginning, turned, and its values and its output
  the same; how keys turn is found by that;
- each layer, driven on rows that do not stand together, must give what it gives in the model,
  behind enough made-up KV that its sliding window shows.

Layers are compared one by one on the model's own hidden states, so that rounding does not add up,
and what differs can be named. A model in bfloat16 or float16 is compared in float32, one layer at a
time, where its engine can run a layer so; elsewhere its rounding error is measured (``rounding``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import Attention, attend_fused
from cacheblend_rag.blend.rotary import Layout, Rotation, Table, find_layout, turns_into
from cacheblend_rag.blend.rounding import (
    ROUNDING_FACTOR,
    TOLERANCE,
    beyond_rounding,
    close,
    is_low,
    layer_noise,
)
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
"""Made-up tokens before those that are tried: a window of 4,096 shows."""
ODD_ROWS = (1, 2, 5, 11, 17, 18)
"""Some rows of the trial that are run apart from the others."""

TURN_ULPS = 5
"""Units in the last place by which a pair of key components may be off: of the table's turns, the
products and the sum, at both positions."""
TURN_STEPS = 1.6
"""Of a KV cache that rounds more than the model: queries may come rounded so, too."""
EMBEDDING_ULPS, OUTPUT_ULPS = 0.5, 4.0
TRAIT_STEPS = 8
"""Steps a factor of two: engines' rounding is far below one, another magnitude of YaRN above."""
LARGEST_MADE_UP = 240.0
"""8-bit caches and float16 hold it."""
EDGE_MARGIN = 2
"""Made-up tokens on both sides of the edges of the rows' windows, with large values, too."""
ANGLE_ROUNDING = 2.4e-7
"""Of float32, for each position: a model's own rotary table is that far off."""


class TriedStack(DecoderStack, Protocol):
    """A stack before it is known how its keys turn."""

    layouts: Sequence[Layout | None] | None

    def tables(self, offset: int) -> list[Table | None]:
        """Return each layer's rotary table for a move by ``offset``; None where it has none."""


@dataclass(frozen=True)
class Reference:
    """What a model itself does with some tokens behind made-up KV.

    token_ids: (tokens,) int64. start: position of the first; the made-up KV is that of all
    positions before. inputs, outputs: hidden states, (1, tokens, hidden), before and after each
    layer; in float32 where the layer was run so.
    """

    token_ids: Tensor
    start: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def trial_tokens(vocabulary: int, device: torch.device) -> Tensor:
    """Return the tokens (TRIAL_TOKENS,) that models are tried with, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (TRIAL_TOKENS,), generator=generator).to(device)


def tokens_behind(windows: Sequence[int | None], context_window: int) -> int:
    """Return how many made-up tokens are to stand before the trial's, so that windows show."""
    widest = max((window for window in windows if window and window <= MOST_BEHIND), default=0)
    return max(0, min(widest + TRIAL_TOKENS, MOST_BEHIND, context_window - TRIAL_TOKENS))


def made_up(
    stack: DecoderStack, ids: Tensor, tokens: int, dtype: torch.dtype | None = None
) -> FusedKV:
    """Return room for the trial's tokens behind ``tokens`` of made-up KV, sized as real KV is.

    ids: (tokens,), the trial's. dtype: the model's own by default. Each component of a layer's keys
    and values has the mean and the spread that it has in the trial's tokens. Keys differ so little
    that each of them gets a share of attention, and values at the edge of a sliding window are so
    large that one key more or less in the window shows.
    """
    shape = stack.geometry
    fused = FusedKV(replace(shape, dtype=dtype or shape.dtype), tokens + TRIAL_TOKENS)
    draw = torch.Generator(shape.device).manual_seed(1)
    hidden = stack.embed(ids[None])
    positions = torch.arange(tokens, tokens + ids.numel(), device=ids.device)
    inputs = stack.position_inputs(positions[None])
    for layer in range(shape.layers):
        call = probe_layer(stack, layer, hidden, inputs)
        keys, values = fused.of_layer(layer)
        keys.copy_(_alike(call.key, keys.shape, draw, _even_spread(call)))
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


def _even_spread(call: AttentionCall) -> float:
    """Return what the spread of keys is multiplied by, so that logits differ by one or less."""
    kv_heads = call.key.shape[1]
    query = call.query[0].float().reshape(kv_heads, -1, *call.query.shape[2:])
    std = call.key[0].float().std(1)[:, None, None]
    logits = float(((query * std).norm(dim=-1) * call.scaling).mean())
    return min(1.0, 1.0 / max(logits, 1e-6))


def _edges(window: int | None, tokens: int, values: Tensor) -> Tensor:
    """Return what made-up values are multiplied by, (1, tokens, 1)."""
    factors = torch.ones(1, values.shape[1], 1, device=values.device)
    if window is not None:
        first = max(0, tokens - window - EDGE_MARGIN)
        last = max(0, tokens + TRIAL_TOKENS - window + EDGE_MARGIN)
        factors[:, first:last] = max(1, min(window, tokens)) ** 0.5
    return factors


def find_layouts(
    stack: TriedStack, ids: Tensor, context_window: int, *, cache_step: float | None = None
) -> list[Layout | None]:
    """Return how each layer turns its keys; raises UnsupportedModelError when that is not found.

    Also raises it when a layer depends on positions in another way: chunk KV is computed at other
    positions than it is used at, which only a rotary embedding allows for.

    ids: (tokens,). context_window: layers are tried near its end, too, where a rotary that changes
    with the length of the prompt would show. cache_step: see ``check_layers``.
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
        tolerances = [_turn_tolerance(near.call.key, offset) for offset in offsets]
        keys = [there.call.key for there in far]
        found = find_layout(handed, near.call.key, keys, tolerances)
        if not all(on_all_ranks(stack, [found != "unknown"])) or found == "unknown":
            what = (
                "its rotary embedding cannot be undone by an offset"
                if handed
                else "its layers are handed no rotary table"
            )
            raise UnsupportedModelError(
                f"{what}: keys of layer {layer}, moved by {max(offsets)} positions, are not those "
                "that it computes there",
                ReasonCode.UNSUPPORTED_POSITIONS,
            )
        tolerances = [max(by, TURN_STEPS * (cache_step or 0.0)) for by in tolerances]
        moves = [found.move(*table) for table in handed] if found else [None] * len(far)
        differs = [near.differs(*there) for there in zip(far, moves, tolerances, strict=True)]
        _check_shift(stack, layer, dict(zip(offsets, differs, strict=True)))
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
        """Name what else than keys changes with the absolute position; None if nothing does."""
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


def _turn_tolerance(keys: Tensor, offset: int) -> float:
    rounding = max(TOLERANCE, TURN_ULPS * torch.finfo(keys.dtype).eps)
    return rounding + offset * ANGLE_ROUNDING


def _check_shift(stack: DecoderStack, layer: int, differs: Mapping[int, str | None]) -> None:
    """Raise UnsupportedModelError if a layer changes by positions; differs: what, by offset."""
    for offset, what in differs.items():
        if not all(on_all_ranks(stack, [what is None])):
            raise UnsupportedModelError(
                f"it depends on absolute positions beyond its rotary embedding: the "
                f"{what or 'result'} of layer {layer} changes by position {offset}",
                ReasonCode.UNSUPPORTED_POSITIONS,
            )


def _check_alike(layouts: Sequence[Layout | None], tables: Sequence[Table | None]) -> None:
    """Raise UnsupportedModelError unless layers that turn keys turn the same components."""
    kinds = {
        (layout.interleaved, layout.turns(*table)[0].numel())
        for layout, table in zip(layouts, tables, strict=True)
        if layout is not None and table is not None
    }
    if len(kinds) > 1:
        raise UnsupportedModelError(
            "its layers turn different components of their keys",
            ReasonCode.UNSUPPORTED_POSITIONS,
        )


def key_traits(stack: DecoderStack, ids: Tensor) -> list[int]:
    """Return how large a model's keys are and how fast each layer turns them, in coarse steps.

    ids: (tokens,). Engines that compute the same keys agree about it, whatever they round; engines
    that read a model's rotary settings differently do not.
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
    widened: Callable[[int], AbstractContextManager[None]] | None = None,
) -> None:
    """Raise UnsupportedModelError unless each layer gives alone what it gives in the model.

    fused: the made-up KV, with room for the tokens' own. attention: as for BlendPass. cache_step:
    of the model's own KV cache where that rounds more than the model, see ``rounding``. quantized:
    whether its weights are, so that layers may round more than their results' type says. widened:
    has a layer run in float32; given where the reference was computed so.
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
            attend = _over(fused, rows, attention or attend_fused)
            found.index_copy_(1, here, stack.run_layer(layer, hidden, inputs, attend))
        if not is_low(wanted) and cache_step is None:
            alike = all(on_all_ranks(stack, [close(found, wanted, before, ulps=OUTPUT_ULPS)]))
            if alike or not quantized:
                return alike
        noise = layer_noise(stack, layer, before, rows=every, fused=fused, cache_step=cache_step)
        alike = beyond_rounding(found, wanted, noise) <= ROUNDING_FACTOR
        return all(on_all_ranks(stack, [alike]))

    for layer, (before, wanted) in enumerate(zip(reference.inputs, reference.outputs, strict=True)):
        with nullcontext() if widened is None else widened(layer):
            alike = is_faithful(layer, before, wanted)
        if not alike:
            raise UnsupportedModelError(
                f"layer {layer}, driven alone on some of its rows, gives another result than in "
                "the model"
            )


def _over(fused: FusedKV, rows: Rows, attention: Attention) -> Attend:
    return lambda call: attention(call, fused, rows)
