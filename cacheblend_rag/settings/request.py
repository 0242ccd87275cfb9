"""BlendConfig: how one request's cached chunk KV is fused."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from cacheblend_rag.settings.base import AsTuple, Count, Ratio, Rising, Settings
from cacheblend_rag.settings.options import DEFAULT_RATIO

RatioChoice = Ratio | tuple[Ratio, ...]
"""A ratio, or one for each check layer."""


def _falling(ratio: RatioChoice) -> RatioChoice:
    if isinstance(ratio, tuple) and any(b > a for a, b in pairwise(ratio)):
        raise ValueError("must be a list that does not rise: check layers only drop rows")
    return ratio


def _check_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    if layers[0] < 1:
        raise ValueError("must be at least 1 each: the KV of layer 0 is exact and ranks nothing")
    return layers


class BlendConfig(Settings):
    """How one request's cached chunk KV is fused."""

    _noun: ClassVar[str] = "setting of a request"

    recompute_ratio: Annotated[RatioChoice, AsTuple, AfterValidator(_falling)] = DEFAULT_RATIO
    """Share of chunk tokens recomputed, 0 (plain reuse) to 1 (ordinary prefill); of several check
    layers, a list of one ratio each, never rising."""
    check_layers: Annotated[
        tuple[int, ...], Field(min_length=1), AsTuple, Rising, AfterValidator(_check_layers)
    ] = (1,)
    """Layers at which a selector that needs fresh KV compares it with cached KV; ignored by
    selectors that choose rows before layer 0."""
    selector: Annotated[str, Field(min_length=1)] = "question_mid"
    """Name of the rule that ranks tokens (see ``cacheblend_rag.blend.selectors``)."""
    selector_options: Annotated[dict[str, Any], Field(strict=False)] = Field(default_factory=dict)
    """The selector's own fields, such as ``{"deviation": "k"}`` for ``hkvd``."""
    min_tokens: Count = 160
    """Prompts with fewer reusable chunk tokens are served by ordinary prefill; for those with more,
    see ``cost_model``."""
    protect_context: Ratio = 0.9
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
    prompt's. The prefix is the text up to the first chunk, or all that was computed in full, with
    the answer. In vLLM its own prefix cache does so, block by block. Off: measurements do not
    depend on earlier requests, and no KV of prompts is stored; in vLLM the request shares no block.
    """
    trace: bool = False
    """Put the chosen tokens and their scores, and how far fresh KV is from stored KV, into the
    report. It costs a little: fresh KV is compared in each layer, scores are copied back from the
    accelerator, and vLLM computes such a request anew each time."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        ratios, layers = self.recompute_ratio, self.check_layers
        if isinstance(ratios, tuple) and len(ratios) != len(layers):
            raise ValueError(
                f"recompute_ratio={ratios} must hold one ratio for each of check_layers={layers}"
            )
        return self

    def with_ratio(self, recompute_ratio: float) -> Self:
        """Return a copy with another ratio, which is that of every check layer."""
        return self.with_changes(recompute_ratio=recompute_ratio)

    def with_selector(self, selector: str) -> Self:
        """Return a copy with ``selector``; if it is another one, with default options."""
        options = self.selector_options if selector == self.selector else {}
        return self.with_changes(selector=selector, selector_options=options)

    @property
    def ratio(self) -> float:
        """The recompute ratio: the last check layer's."""
        return self.ratio_at(len(self.check_layers) - 1)

    def ratio_at(self, check: int) -> float:
        """Return the recompute ratio after the ``check``-th check layer."""
        chosen = self.recompute_ratio
        return chosen[check] if isinstance(chosen, tuple) else chosen
