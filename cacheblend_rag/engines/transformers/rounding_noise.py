"""Measures a model's rounding error by Monte Carlo arithmetic (see blend/rounding.py).

A model in 16 bits gives different logits when a text is prefilled in two parts, since kernels of
other shapes round differently. The possible difference depends on the model, so it is measured: the
model is run again while the last bit of each module's output is changed at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag.blend.rounding import TOLERANCE, is_low, with_noise

COPIES = 2
STEP = 0.5
"""Of a unit in the last place: half of the numbers stay as they are."""
FACTOR = 1.5
"""How many times the measured rounding error a difference may be. On real models reading a text in
two parts makes up to 0.4 times that, one position too many 2.5 times and more."""
LEAST_ULPS, MOST = 4.0, 0.25
"""Differences that are always, or never, taken for rounding: in units in the last place and as a
share of the logits' spread."""
QUANTIZED_TOLERANCE = 0.2
"""Of models whose weights are quantized: some quantize activations by the rows they come with."""


@dataclass(frozen=True)
class ModelNoise:
    """Samples of the rounding error of a model's logits.

    logits: (copies, tokens, vocabulary) float32. eps: of the type that the model computes in.
    """

    logits: Tensor
    eps: float


def model_noise(model: PreTrainedModel, logits: Callable[[], Tensor]) -> ModelNoise | None:
    """Return the rounding error of a model in 16 bits, None of another one.

    logits: has the model compute them, (tokens, vocabulary).
    """
    if model.dtype not in {torch.bfloat16, torch.float16}:
        return None
    wanted, eps = logits(), torch.finfo(model.dtype).eps
    draw = torch.Generator(wanted.device).manual_seed(6)
    with _noisy(model, draw, STEP * eps):
        return ModelNoise(torch.stack([logits() - wanted for _ in range(COPIES)]), eps)


def same_logits(
    found: Tensor, wanted: Tensor, noise: ModelNoise | None, *, quantized: bool
) -> bool:
    """Whether logits, (tokens, vocabulary) float32, are equal except for rounding.

    noise: see ``model_noise``. In float32 every token's logits must be the same; in 16 bits the
    median token counts, since rounding sends a few tokens to other experts.
    """
    spread = _centred(wanted).norm(dim=-1)
    off = _centred(found - wanted).norm(dim=-1) / spread
    if quantized:
        return bool(off.median() <= QUANTIZED_TOLERANCE)
    if noise is None:
        return bool((off <= TOLERANCE).all())
    usual = float((_centred(noise.logits).norm(dim=-1) / spread).median())
    return bool(off.median() <= min(max(FACTOR * usual, LEAST_ULPS * noise.eps), MOST))


def _centred(logits: Tensor) -> Tensor:
    """Logits without what all tokens of the vocabulary have in common: it changes no answer."""
    return logits - logits.mean(-1, keepdim=True)


@contextmanager
def _noisy(model: PreTrainedModel, draw: torch.Generator, step: float) -> Iterator[None]:
    """Change the last bit of the outputs of the model's modules at random."""

    def changed(part: Any) -> Any:
        if isinstance(part, Tensor) and is_low(part):
            return with_noise(part, draw, step)
        if type(part) is tuple:
            return tuple(changed(each) for each in part)
        return part

    with ExitStack() as hooks:
        for module in model.modules():
            handle = module.register_forward_hook(lambda _, __, done: changed(done))
            hooks.callback(handle.remove)
        yield
