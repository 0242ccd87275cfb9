"""Rules: the ways of answering that an evaluation compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.settings import BlendConfig, LeadInConfig, LeadInKind

Options = Mapping[str, Mapping[str, Any]]
"""Selector options by selector name."""

ALWAYS: dict[str, Any] = {"min_tokens": 0, "cost_model": False, "reuse_prefix": False}
"""Settings of every compared rule: stored chunks are always blended, however short the prompt and
fast the machine, and prefix caching is off."""


@dataclass(frozen=True)
class Rule:
    """One way to answer: the lead-in of cached KV, the selector, and the recompute ratio.

    is_default: the engine's defaults, whatever the evaluation's own settings are.
    """

    lead_in: LeadInKind
    selector: str
    ratio: float
    is_default: bool = False

    @classmethod
    def reuse(cls, lead_in: LeadInKind) -> Rule:
        """Return plain reuse: nothing is recomputed."""
        return cls(lead_in, "none", 0.0)

    @classmethod
    def default(cls) -> Rule:
        """Return the rule of an engine that is given no settings."""
        config = BlendConfig()
        return cls(LeadInConfig().kind, config.selector, config.ratio, is_default=True)

    def config(self, base: BlendConfig, options: Options) -> BlendConfig:
        """Return the settings of its requests.

        base: what the rule is laid over, unless it is the default. options: by selector.
        """
        if self.is_default:
            return BlendConfig(**ALWAYS)
        return base.with_changes(
            selector=self.selector,
            recompute_ratio=self.ratio,
            recompute_ratios=None,
            selector_options=options.get(self.selector, {}),
            **ALWAYS,
        )


FULL = Rule("none", "full", 1.0)
"""Full prefill."""
NO_CONTEXT = Rule("none", "no_context", 1.0)
"""Full prefill of the prompt without its passages."""
PREFIX_CACHING = Rule("none", "prefix_caching", 1.0)
"""Full prefill of what follows the longest common prefix with the previous request."""
BASELINES = (FULL, NO_CONTEXT, PREFIX_CACHING)


def exactness(lead_in: LeadInKind) -> Rule:
    """Return the rule that recomputes everything: its divergence is rounding alone."""
    return Rule(lead_in, "all", 1.0)


def kv_before(config: BlendConfig, layers: int) -> float:
    """Return the share of the cached KV that is needed before layer 0 can run.

    layers: of the model.
    """
    return make_selector(config.selector, config.selector_options).kv_before(layers)
