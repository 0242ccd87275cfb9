"""Rules: the ways of answering that an evaluation compares, a default table or a full grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.quality.dataset import EvalQuestion
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


DEFAULT_RATIOS = (0.05, 0.1, 0.15)
DEFAULT_SELECTORS = ("hkvd", "prior", "random")
DEFAULT_LEAD_INS: tuple[LeadInKind, ...] = ("instruction", "document")

Cell = tuple[LeadInKind, str, tuple[float, ...]]
_DOCUMENTS: tuple[Cell, ...] = (
    ("instruction", "hkvd", (0.15,)),
    ("instruction", "prior", (0.15,)),
    ("instruction", "question_mid", (0.15,)),
    ("instruction", "random", (0.15,)),
    ("document", "hkvd", (0.15,)),
    ("document", "prior", (0.15,)),
)
_SINGLE_PASSAGES: tuple[Cell, ...] = (
    ("instruction", "hkvd", (0.05, 0.1, 0.15)),
    ("instruction", "question_mid", (0.15,)),
    ("instruction", "chunk_head", (0.15,)),
    ("instruction", "random", (0.15,)),
)


def grid_rules(
    ratios: Sequence[float] | None = None,
    selectors: Sequence[str] | None = None,
    lead_ins: Sequence[str] | None = None,
) -> list[Rule] | None:
    """Return every lead-in x selector x ratio, or None when none of the three is given.

    A missing one gets its default. Plain reuse comes first for each lead-in.
    Raises ConfigError on an unknown name or an invalid ratio.
    """
    if ratios is None and selectors is None and lead_ins is None:
        return None
    for ratio in ratios or ():
        BlendConfig(recompute_ratio=ratio)
    return _rules(
        [
            (LeadInConfig.of(lead_in).kind, selector, tuple(ratios or DEFAULT_RATIOS))
            for lead_in in lead_ins or DEFAULT_LEAD_INS
            for selector in selectors or DEFAULT_SELECTORS
        ]
    )


def default_rules(questions: Sequence[EvalQuestion]) -> list[Rule]:
    """Return a setting's default rules; plain reuse comes first for each lead-in."""
    single = all(len(d.chunks) == 1 for question in questions for d in question.documents)
    return _rules(_SINGLE_PASSAGES if single else _DOCUMENTS)


def complete(
    rules: Sequence[Rule], base: BlendConfig, options: Options, *, fidelity: bool
) -> list[Rule]:
    """Return the rules with those that must stand beside them.

    The engine's defaults are always among them, under ``is_default``, in place of a rule with the
    same settings. fidelity: plain reuse behind every used lead-in and behind the instruction, and
    random rows behind every used lead-in at each of its ratios, come before them.
    base, options: as Rule.config takes them.
    """
    default = Rule.default()
    wanted = [*(_controls([*rules, default]) if fidelity else ()), *rules]
    settings = default.config(base, options)
    told = [
        default
        if rule.lead_in == default.lead_in and rule.config(base, options) == settings
        else rule
        for rule in wanted
    ]
    return list(dict.fromkeys([*told, default]))


def _controls(rules: Sequence[Rule]) -> list[Rule]:
    """Return what a selector is held against: plain reuse, and rows drawn at random."""
    places = dict.fromkeys((rule.lead_in, rule.ratio) for rule in rules if rule.ratio > 0)
    lead_ins = dict.fromkeys(["instruction", *(rule.lead_in for rule in rules)])
    reuse = [Rule.reuse(lead_in) for lead_in in lead_ins]
    return [*reuse, *(Rule(lead_in, "random", ratio) for lead_in, ratio in places)]


def _rules(cells: Sequence[Cell]) -> list[Rule]:
    rules: dict[Rule, None] = {}
    for lead_in, selector, ratios in cells:
        make_selector(selector)
        rules[Rule.reuse(lead_in)] = None
        for ratio in ratios:
            if ratio > 0 and selector != "none":
                rules[Rule(lead_in, selector, ratio)] = None
    return list(rules)
