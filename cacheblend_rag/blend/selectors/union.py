"""Shares the budget among several selectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector
from cacheblend_rag.blend.selectors.probe import Probe
from cacheblend_rag.errors import ConfigError

MEMBERS: Mapping[str, float] = {"question": 0.7, "prior": 0.3}


@dataclass(frozen=True)
class Union(Selector):
    """Each member's best tokens, by its share of the budget; what several choose counts once.

    members: shares by selector, which add up to 1. options: a member's own options, by its name.
    It needs what its members need. The score of a token is the share divided by the token's rank,
    of the member for which that is greatest: so any number of best tokens is shared out as asked.
    Related: FusionRAG (arXiv 2601.12904), which unites a stored set with the question's.
    """

    members: Mapping[str, float] = field(default_factory=lambda: dict(MEMBERS))
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from cacheblend_rag.blend.selectors import make_selector

        shares = _shares(self.members)
        for name in self.options:
            if name not in shares:
                raise ConfigError(f"options of {name!r}: it is none of members={[*shares]}")
        made = {name: make_selector(name, self.options.get(name)) for name in shares}
        for name, selector in made.items():
            if selector.fixed_ratio is not None:
                raise ConfigError(f"members={dict(self.members)}: {name!r} ranks nothing")
        object.__setattr__(self, "_made", made)
        for need in ("needs_fresh_kv", "needs_question", "needs_prior"):
            any_does = any(getattr(selector, need) for selector in made.values())
            object.__setattr__(self, need, any_does)
        if any(probe != self.probe for probe in self._probes):
            raise ConfigError(
                f"members={dict(self.members)} observe different attention of the question: give "
                "them the same span, layers, heads, tokens and draft in options"
            )

    @property
    def probe(self) -> Probe:
        return self._probes[0] if self._probes else Probe()

    @property
    def _probes(self) -> list[Probe]:
        made: Mapping[str, Selector] = vars(self)["_made"]
        return [selector.probe for selector in made.values() if selector.needs_question]

    def score(self, evidence: Evidence) -> Tensor:
        made: Mapping[str, Selector] = vars(self)["_made"]
        parts = [
            share * _by_rank(made[name].score(evidence).cpu())
            for name, share in self.members.items()
        ]
        best = torch.stack(parts).amax(0)
        return best.masked_fill(best == 0, -torch.inf)


def _by_rank(scores: Tensor) -> Tensor:
    """Return (tokens,) float32, 1 / rank from the highest score on; 0 for -inf."""
    order = torch.sort(scores, descending=True, stable=True).indices
    ranks = torch.empty_like(scores, dtype=torch.float32)
    ranks[order] = 1 / torch.arange(1, scores.numel() + 1, device=scores.device).float()
    return ranks.masked_fill(scores == -torch.inf, 0.0)


def _shares(members: Any) -> Mapping[str, float]:
    """Return the members of a union; raises ConfigError unless they are shares of 1."""
    wanted = 'must hold shares above 0 that add up to 1, such as {"question": 0.7, "prior": 0.3}'
    is_named = isinstance(members, Mapping) and len(members) > 0
    if not is_named or not all(_is_share(share) for share in members.values()):
        raise ConfigError(f"members={members!r:.100} {wanted}")
    if not math.isclose(sum(members.values()), 1, abs_tol=1e-6):
        raise ConfigError(f"members={members!r:.100} {wanted}")
    shares: Mapping[str, float] = members
    return shares


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
