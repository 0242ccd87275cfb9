"""Distinguishes rounding differences between two results from real ones.

In float32 a fixed tolerance is enough: rounding is far below every fault of interest. In bfloat16
and float16 the rounding error of a layer is measured instead, by Monte Carlo
arithmetic (Parker, 1997): the layer is run again with the last bit of its inputs, and of every
intermediate result of attention, changed at random. The resulting change of the layer's output is
the effect of rounding. Two results that are further apart than that differ for another reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.blend.attention import capped, mask_of, softmax
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack

TOLERANCE = 1e-3
"""Relative error allowed in float32; it also covers TF32 matrix products."""
ROUNDING_FACTOR = 1.5
"""How many times the measured rounding error a difference may be. On real models, layers that agree
are up to 0.4 times that apart, 1.2 times with attention whose logits are in 16 bits."""
NOISY_COPIES = 2
EIGHT_BIT_STEP = 0.125
"""Relative step between neighbouring float8_e4m3 numbers, at most."""
EIGHT_BIT_LEAST = 2.0**-9
"""Absolute step between the smallest float8_e4m3 numbers."""


def cache_step(stored: torch.dtype, computed: torch.dtype) -> float | None:
    """Return the relative step between neighbouring numbers of a KV cache.

    stored, computed: dtypes of the cache and of the model. None if the cache is as precise.
    """
    if stored.itemsize >= computed.itemsize:
        return None
    return EIGHT_BIT_STEP if stored.itemsize == 1 else torch.finfo(stored).eps


def is_low(part: Tensor) -> bool:
    """Whether a tensor is in bfloat16 or float16."""
    return part.dtype in {torch.bfloat16, torch.float16}


def close(found: Tensor, wanted: Tensor, before: Tensor | None = None, *, ulps: float) -> bool:
    """Whether each token's result, (1, tokens, width), is as wanted, except for rounding.

    before: the residual to which the layer added its output; differences are compared with the
    output alone, since a large residual would hide them. ulps: how many units in the last place
    the result may be off in addition to TOLERANCE.
    """
    wide = wanted.float()
    rounding = ulps * torch.finfo(wanted.dtype).eps * wide.norm(dim=-1)
    added = (wide - (0.0 if before is None else before.float())).norm(dim=-1)
    off = (found.float() - wide).norm(dim=-1)
    return bool((off <= TOLERANCE * added + rounding).all())


def with_noise(part: Tensor, draw: torch.Generator, step: float | None = None) -> Tensor:
    """Return a tensor with each number changed at random by up to one relative step.

    step: by default the unit in the last place of the tensor's own type.
    """
    step = torch.finfo(part.dtype).eps if step is None else step
    random = torch.rand(part.shape, generator=draw, device=part.device)
    return (part.float() * (1 + step * (2 * random - 1))).to(part.dtype)


def layer_noise(
    stack: DecoderStack,
    layer: int,
    hidden: Tensor,
    *,
    rows: Rows,
    fused: FusedKV,
    cache_step: float | None = None,
) -> Tensor:
    """Return samples of the rounding error of a layer's output: (copies, 1, rows, hidden) float32.

    hidden: (1, rows, hidden), the layer's input. fused: KV that the rows attend to besides their
    own. cache_step: of the model's own KV cache if it is less precise, see ``cache_step``.
    All noisy copies and one without noise are run as one batch of rows.
    """
    draw = torch.Generator(hidden.device).manual_seed(4)
    count, batch = len(rows), 1 + NOISY_COPIES
    noisy = [with_noise(hidden, draw) for _ in range(NOISY_COPIES)]
    kept_keys, kept_values = fused.layer(layer)

    def attend(call: AttentionCall) -> Tensor:
        attended = []
        for copy in range(batch):
            part = call.part(copy * count, (copy + 1) * count)
            keys, values = kept_keys.clone(), kept_values.clone()
            keys[:, :, rows.device], values[:, :, rows.device] = part.key, part.value
            noise = draw if copy else None
            if noise is not None and cache_step is not None:
                keys, values = (_as_stored(kv, draw, cache_step) for kv in (keys, values))
            attended.append(attend_unfused(part, keys, values, rows=rows, draw=noise))
        return torch.cat(attended, 1)

    positions = stack.position_inputs(rows.device.repeat(batch)[None])
    done = stack.run_layer(layer, torch.cat((hidden, *noisy), 1), positions, attend)
    exact, *changed = torch.split(done.float(), count, 1)
    return torch.stack([copy - exact for copy in changed])


def beyond_rounding(found: Tensor, wanted: Tensor, noise: Tensor) -> float:
    """Return the distance of two results, in units of the measured rounding error.

    found, wanted: (1, tokens, width). noise: (copies, 1, tokens, width), see ``layer_noise``.
    Each number is compared with the rounding error of its token and its component, so that
    components with outliers do not hide the others. The median token counts, since rounding sends
    a few tokens to other experts.
    """
    power = noise.square().mean(0)
    token, component = power.mean(2, keepdim=True), power.mean(1, keepdim=True)
    expected = token * component / power.mean().clamp(min=torch.finfo(torch.float32).tiny)
    own = torch.finfo(wanted.dtype).eps * wanted.float().abs() / 2
    expected = (expected + own.square()).clamp(min=torch.finfo(torch.float32).tiny)
    off = ((found.float() - wanted.float()).square() / expected).mean(-1).sqrt().median()
    usual = (noise.square() / expected).mean(-1).sqrt().median().clamp(min=1.0)
    return float(off / usual)


def _as_stored(part: Tensor, draw: torch.Generator, step: float) -> Tensor:
    least = EIGHT_BIT_LEAST if step == EIGHT_BIT_STEP else 0.0
    random = 2 * torch.rand(part.shape, generator=draw, device=part.device) - 1
    return with_noise(part, draw, step) + (least * random).to(part.dtype)


def attend_unfused(
    call: AttentionCall,
    keys: Tensor,
    values: Tensor,
    *,
    rows: Rows,
    draw: torch.Generator | None,
) -> Tensor:
    """Unfused attention, with noise on each intermediate result if ``draw`` is given.

    keys, values: (1, kv_heads, tokens, head_dim). Returns (1, rows, heads, head_dim). All steps get
    the noise of the model's dtype, since kernels differ in which results they keep in float32.
    """
    step = torch.finfo(call.query.dtype).eps

    def noisy(part: Tensor) -> Tensor:
        return part if draw is None else with_noise(part, draw, step)

    (_, heads, count, width), (kv_heads, tokens) = call.query.shape, keys.shape[1:3]
    query = noisy(call.query[0].float()).reshape(kv_heads, -1, width)
    logits = noisy(query @ noisy(keys[0].float()).transpose(1, 2) * call.scaling)
    copies, seen = heads // kv_heads, slice(0, tokens)
    mask = mask_of(rows, seen, call.window, copies=copies, dtype=logits.dtype)
    shares = noisy(softmax(noisy(capped(logits, call.softcap)) + mask, call.sinks))
    done = noisy(shares @ noisy(values[0].float()))
    return done.view(heads, count, width).transpose(0, 1)[None].to(call.query.dtype)
