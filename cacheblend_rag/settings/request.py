"""BlendConfig: how one request's cached chunk KV is fused."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Count, Ratio, Settings, as_tuple
from cacheblend_rag.settings.options import (
    AUTO,
    DEFAULT_RATIO,
    PROTECTED_SHARE,
    RATIO_BOUNDS,
)


def _rising(layers: tuple[int, ...]) -> tuple[int, ...]:
    if layers[0] < 1:
        raise ConfigError(
            f"check_layers={layers} must be at least 1 each: the KV of layer 0 is exact and ranks "
            "nothing"
        )
    if any(b <= a for a, b in pairwise(layers)):
        raise ConfigError(f"check_layers={layers} must rise strictly")
    return layers


def _falling(ratios: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if any(b > a for a, b in pairwise(ratios or ())):
        raise ConfigError(f"recompute_ratios={ratios} must not rise: check layers only drop rows")
    return ratios


def _bounds(ratios: tuple[float, float]) -> tuple[float, float]:
    if ratios[0] > ratios[1]:
        raise ConfigError(f"ratio_bounds={ratios} must not fall")
    return ratios


class BlendConfig(Settings):
    """How one request's cached chunk KV is fused."""

    _noun: ClassVar[str] = "setting of a request"

    recompute_ratio: Ratio | Literal["auto"] = DEFAULT_RATIO
    """Share of chunk tokens recomputed, 0 (plain reuse) to 1 (ordinary prefill); ``auto`` is the
    largest whose recompute takes no longer than loading the chunks does."""
    check_layers: Annotated[
        tuple[int, ...],
        Field(min_length=1),
        BeforeValidator(as_tuple),
        AfterValidator(_rising),
    ] = (1,)
    """Layers at which a selector that needs fresh KV compares it with cached KV; ignored by
    selectors that choose rows before layer 0."""
    recompute_ratios: Annotated[
        tuple[Ratio, ...] | None,
        BeforeValidator(as_tuple),
        AfterValidator(_falling),
    ] = None
    """One ratio per check layer, never rising; None uses recompute_ratio for all."""
    selector: Annotated[str, Field(min_length=1)] = "question_mid"
    """Name of the rule that ranks tokens (see ``cacheblend_rag.blend.selectors``)."""
    selector_options: Annotated[dict[str, Any], Field(strict=False)] = Field(default_factory=dict)
    """The selector's own fields, such as ``{"deviation": "k"}`` for ``hkvd``."""
    min_tokens: Count = 256
    """Prompts with fewer reusable chunk tokens are served by ordinary prefill."""
    protect_context: Ratio = PROTECTED_SHARE
    """In a contextual chunk whose own document context is absent from the prompt, never recompute
    the tokens that depend on that context most, since fresh KV would forget it: the fewest that
    hold this share of the chunk's prior, less those whose keys the context changed by less than
    half their length. 1 protects every token, 0 none; a chunk stored without a prior is protected
    whole, unless this is 0. Off at ratio 1."""
    cost_model: bool = True
    """Compute a chunk, or the whole prompt, if that is measured to be faster than loading and
    blending. Off: stored chunks are blended however long that takes, so that quality comparisons
    and benchmarks do not depend on the machine's load."""
    reuse_prefix: bool = True
    """Prefix caching: reuse the KV of a prefix that earlier requests had, too, and store this
    prompt's. The prefix is the text up to the first chunk; without chunks, the whole prompt and its
    answer. In vLLM its own prefix cache does so, block by block. Off: measurements do not depend on
    earlier requests, and no KV of prompts is stored; in vLLM the request shares no cached block."""
    trace: bool = False
    """Put the chosen tokens and their scores, and how far fresh KV is from stored KV, into the
    report. It costs a little: fresh KV is compared in each layer, scores are copied back from the
    accelerator, and vLLM computes such a request anew each time."""
    ratio_bounds: Annotated[
        tuple[Ratio, Ratio],
        BeforeValidator(as_tuple),
        AfterValidator(_bounds),
    ] = RATIO_BOUNDS
    """The smallest and the largest ratio that ``auto`` may choose."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        ratios, layers = self.recompute_ratios, self.check_layers
        if ratios is None:
            return self
        if self.recompute_ratio == AUTO:
            raise ConfigError(f'recompute_ratio="{AUTO}" chooses one: leave recompute_ratios out')
        if len(ratios) != len(layers):
            raise ConfigError(
                f"recompute_ratios={ratios} must hold one ratio for each of check_layers={layers}"
            )
        return self

    def with_ratio(self, recompute_ratio: float) -> BlendConfig:
        """Return a copy with one ratio, used after every check layer."""
        return self.with_changes(recompute_ratio=recompute_ratio, recompute_ratios=None)

    @property
    def ratio(self) -> float:
        """The recompute ratio; the largest allowed one if the engine chooses."""
        chosen = self.recompute_ratio
        return self.ratio_bounds[1] if isinstance(chosen, str) else chosen

    def ratio_at(self, check: int) -> float:
        """Return the recompute ratio after the ``check``-th check layer."""
        return self.ratio if self.recompute_ratios is None else self.recompute_ratios[check]
