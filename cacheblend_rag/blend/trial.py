"""The trial of a model: whether its layers, driven one by one on chosen rows, do as in it.

Names say little about models and nothing about new ones, so each model is tried when it is loaded:

- what it hands its first layer must be what ``embed`` says;
- its keys, moved by an offset, must be the keys it computes there: how they turn is found by that;
- each layer, driven on rows that do not stand together, must give what it gives in the model,
  behind enough made-up KV that its sliding window shows.

Layers are compared one by one on the model's own hidden states, so that rounding does not add up,
and what differs can be named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import Attention, attend_fused
from cacheblend_rag.blend.rotary import Layout, Table, find_layout
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import (
    Attend,
    AttentionCall,
    DecoderStack,
    on_all_ranks,
    probe_layer,
)
from cacheblend_rag.errors import UnsupportedModelError

TRIAL_TOKENS = 24
TRIAL_OFFSET = 1_000
MOST_BEHIND = 4_224
"""Made-up tokens before those that are tried: a window of 4,096 shows."""
ODD_ROWS = (1, 2, 5, 11, 17, 18)
"""Some rows of the trial that are run apart from the others."""

TOLERANCE = 1e-3
LOW_TOLERANCE = 5e-2
"""In bfloat16 and float16. It and the next hold for the median token: for rounding, a few may meet
other experts."""
TRAIT_STEPS = 8
"""Steps a factor of two: engines' rounding is far below one, another magnitude of YaRN above."""
ROUNDED_TOLERANCE = 0.2
"""Of attention over KV of 8 bits: rounding alone makes some 6 % in a layer."""
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
    layer.
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


def made_up(stack: DecoderStack, tokens: int, like: AttentionCall) -> FusedKV:
    """Return room for the trial's tokens behind ``tokens`` of made-up KV, sized as real KV is."""
    fused = FusedKV(stack.geometry, tokens + TRIAL_TOKENS)
    generator = torch.Generator(stack.geometry.device).manual_seed(1)
    for kv, real in ((fused.keys, like.key), (fused.values, like.value)):
        for layer in kv:
            layer.normal_(0.0, float(real.float().std()), generator=generator)
    return fused


def find_layouts(stack: TriedStack, ids: Tensor, context_window: int) -> list[Layout | None]:
    """Return how each layer turns its keys; raises UnsupportedModelError when that is not found.

    ids: (tokens,). context_window: keys are tried near its end, too, where a rotary that changes
    with the length of the prompt would show.
    """
    count = ids.numel()
    offsets = sorted({min(TRIAL_OFFSET, context_window - count), context_window - count})
    positions = torch.arange(count, device=ids.device)[None]
    near, *far = (stack.position_inputs(positions + offset) for offset in (0, *offsets))
    tables = [stack.tables(offset) for offset in offsets]
    hidden = stack.embed(ids[None])
    layouts: list[Layout | None] = []
    for layer in range(stack.geometry.layers):
        keys = probe_layer(stack, layer, hidden, near).key
        moved = [probe_layer(stack, layer, hidden, inputs).key for inputs in far]
        handed = [table for at in tables if (table := at[layer]) is not None]
        found = find_layout(handed, keys, moved, _close_keys(max(offsets)))
        if not all(on_all_ranks(stack, [found != "unknown"])) or found == "unknown":
            what = (
                "its rotary embedding cannot be undone by an offset"
                if handed
                else "its layers are handed no rotary table"
            )
            raise UnsupportedModelError(
                f"{what}: keys of layer {layer}, moved by {max(offsets)} positions, are not those "
                "that it computes there"
            )
        layouts.append(found)
    _check_alike(layouts, tables[0])
    return layouts


def _check_alike(layouts: Sequence[Layout | None], tables: Sequence[Table | None]) -> None:
    """Raise UnsupportedModelError unless layers that turn keys turn the same components."""
    kinds = {
        (layout.interleaved, layout.turns(*table)[0].numel())
        for layout, table in zip(layouts, tables, strict=True)
        if layout is not None and table is not None
    }
    if len(kinds) > 1:
        raise UnsupportedModelError("its layers turn different components of their keys")


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
    alike = found.shape == wanted.shape and close(found, wanted)
    if not all(on_all_ranks(stack, [alike])):
        raise UnsupportedModelError(
            "its first layer gets more than the tokens' embeddings (learned positions?)"
        )


def check_layers(
    stack: DecoderStack,
    reference: Reference,
    fused: FusedKV,
    attention: Attention | None = None,
    *,
    rounded: bool = False,
) -> None:
    """Raise UnsupportedModelError unless each layer gives alone what it gives in the model.

    fused: the made-up KV, with room for the tokens' own. attention: as for BlendPass. rounded:
    whether the model itself keeps KV in fewer bits, an fp8 cache say.
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
    for layer, (before, wanted) in enumerate(zip(reference.inputs, reference.outputs, strict=True)):
        call = probe_layer(stack, layer, before, stack.position_inputs(every.device[None]))
        fused.write(layer, every, call.key, call.value)
        found = torch.empty_like(wanted)
        for rows, here in parts:
            hidden, inputs = before.index_select(1, here), stack.position_inputs(rows.device[None])
            attend = _over(fused, rows, attention or attend_fused)
            found.index_copy_(1, here, stack.run_layer(layer, hidden, inputs, attend))
        if not all(on_all_ranks(stack, [close(found, wanted, before, rounded=rounded)])):
            raise UnsupportedModelError(
                f"layer {layer}, driven alone on some of its rows, gives another result than in "
                "the model"
            )


def _over(fused: FusedKV, rows: Rows, attention: Attention) -> Attend:
    return lambda call: attention(call, fused, rows)


def _close_keys(offset: int) -> Callable[[Tensor, Tensor], bool]:
    def close(found: Tensor, wanted: Tensor) -> bool:
        tolerance = (LOW_TOLERANCE if _is_low(wanted) else TOLERANCE) + offset * ANGLE_ROUNDING
        difference = (found.float() - wanted.float()).abs().max()
        return bool(difference <= tolerance * wanted.float().abs().max().clamp(min=1e-6))

    return close


def close(
    found: Tensor, wanted: Tensor, before: Tensor | None = None, *, rounded: bool = False
) -> bool:
    """Whether two results, (1, tokens, width), are the same but for rounding.

    before: what a layer added its own to, so that a large residual hides nothing. rounded: whether
    they were made of something less precise than they are.
    """
    tolerance = LOW_TOLERANCE if _is_low(wanted) else TOLERANCE
    tolerance = ROUNDED_TOLERANCE if rounded else tolerance
    rounding = 4 * torch.finfo(wanted.dtype).eps * wanted.float().norm(dim=-1)
    added = (wanted.float() - (0.0 if before is None else before.float())).norm(dim=-1)
    off = (found.float() - wanted.float()).norm(dim=-1)
    near = float((off <= tolerance * added + rounding).float().mean())
    return near >= (1.0 if tolerance == TOLERANCE else 0.5)


def _is_low(part: Tensor) -> bool:
    return part.dtype in {torch.bfloat16, torch.float16}
