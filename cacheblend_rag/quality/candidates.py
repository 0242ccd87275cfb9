"""The settings that are tried, and on how many prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.quality.rules import Options, Rule
from cacheblend_rag.settings import BlendConfig, LeadInConfig, LeadInKind, Profile

LEAD_INS: tuple[LeadInKind, ...] = ("instruction", "document")
SELECTORS = ("none", "question_mid", "hkvd")
RATIOS = (0.05, 0.08, 0.16, 0.25)
BASE, NO_OPTIONS = BlendConfig(), MappingProxyType[str, Mapping[str, Any]]({})
FIRST_RUNG, STEP = 8, 2
"""Prompts of the first rung, and the factor from one rung to the next."""


@dataclass(frozen=True)
class Candidate(Rule):
    """A rule, with the layers at which its selector compares KV; none for most selectors."""

    check_layers: tuple[int, ...] = ()

    def config(self, base: BlendConfig = BASE, options: Options = NO_OPTIONS) -> BlendConfig:
        """Return the settings of its requests; see Rule."""
        config = super().config(base, options)
        return config.with_changes(check_layers=self.check_layers) if self.check_layers else config

    @property
    def label(self) -> str:
        """A short name, such as ``document hkvd 0.16 at 1``."""
        layers = f" at {','.join(map(str, self.check_layers))}" if self.check_layers else ""
        return f"{self.lead_in} {self.selector} {self.ratio:g}{layers}"

    def profile(self, name: str, model: str, measured: dict[str, Any]) -> Profile:
        """Return it as a profile."""
        blend: dict[str, Any] = {"selector": self.selector, "recompute_ratio": self.ratio}
        if self.check_layers:
            blend["check_layers"] = self.check_layers
        return Profile(
            name=name,
            model=model,
            blend=BlendConfig(**blend),
            lead_in=LeadInConfig(kind=self.lead_in),
            measured=measured,
        )


def candidates(
    layers: int,
    *,
    lead_ins: Sequence[str] | None = None,
    selectors: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    check_layers: Sequence[int] | None = None,
) -> list[Candidate]:
    """Return lead-in x selector x ratio x check layer; nothing recomputed once for each lead-in.

    layers: of the model. What is None is chosen: LEAD_INS, SELECTORS, RATIOS, and as check layers
    the second one and one at a fifth of the depth. Raises ConfigError on an unknown name or an
    invalid ratio.
    """
    at = check_layers or sorted({1, max(1, layers // 5)})
    kinds = [LeadInConfig.of(one).kind for one in lead_ins or LEAD_INS]
    cells = product(kinds, selectors or SELECTORS, ratios or RATIOS)
    found = (one for cell in cells for one in _of_cell(*cell, at))
    return list(dict.fromkeys(found))


def _of_cell(
    lead_in: LeadInKind, selector: str, ratio: float, check_layers: Sequence[int]
) -> list[Candidate]:
    BlendConfig(recompute_ratio=ratio)
    needs_layer = make_selector(selector).needs_fresh_kv
    if selector == "none" or ratio == 0:
        return [Candidate(lead_in, "none", 0.0)]
    layers = [(layer,) for layer in check_layers] if needs_layer else [()]
    return [Candidate(lead_in, selector, ratio, check_layers=at) for at in layers]


def rungs(prompts: int, first: int = FIRST_RUNG) -> list[int]:
    """Return how many prompts each round uses: twice as many each time, all of them at last."""
    sizes = []
    while first < prompts:
        sizes.append(first)
        first *= STEP
    return [*sizes, prompts]
