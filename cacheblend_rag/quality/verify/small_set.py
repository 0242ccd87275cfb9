"""The check of fidelity: a blend's predictions on a small set, against full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.quality.dataset import EvalQuestion
from cacheblend_rag.quality.fidelity import PromptFidelity, compare, reference
from cacheblend_rag.quality.frame import PromptFrame
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.quality.verify.check import Asked, Check
from cacheblend_rag.settings import BlendConfig

FIDELITY = Asked("fidelity", "compares the blend's predictions with full prefill's, on a small set")

MOST_KL = 0.25
"""Mean KL, in nats, that a model may lose on the small set: predictions keep 78 % likelihood."""
NEGLIGIBLE = 1e-3
"""A divergence so small that plain reuse cannot be told from it."""
PLAIN = BlendConfig(recompute_ratio=0.0, selector="none", **ALWAYS)


def check_fidelity(
    engine: TransformersEngine,
    plain: TransformersEngine,
    frame: PromptFrame,
    questions: Sequence[EvalQuestion],
    on_question: Callable[[], None] = lambda: None,
) -> Check:
    """Check that an engine's own settings are near full prefill, and what they recompute helps.

    engine: its config is checked. plain: computes chunks after the instruction alone, around the
    same model. Both stores hold the questions' documents.
    """
    config = engine.config.with_changes(**ALWAYS)
    blends, reuses = [], []
    for question in questions:
        prompt = frame.prompt(question)
        wanted = reference(engine, prompt, question.answers)
        blends.append(compare(wanted, engine, prompt, config))
        reuses.append(compare(wanted, plain, prompt, PLAIN))
        on_question()
    recomputes = config.selector != PLAIN.selector and config.ratio > 0
    return _judged(blends, reuses, recomputes=recomputes)


def _judged(
    blends: Sequence[PromptFidelity], reuses: Sequence[PromptFidelity], *, recomputes: bool
) -> Check:
    kl, plain = mean(one.kl for one in blends), mean(one.kl for one in reuses)
    measured = {
        "prompts": len(blends),
        "kl": kl,
        "kl_plain_reuse": plain,
        "most_kl": MOST_KL,
        "top1": mean(one.top1 for one in blends),
        "same_answers": mean(float(one.same_answer) for one in blends),
    }
    told = f"mean KL {kl:.3f} on {len(blends)} prompts, plain reuse {plain:.3f}"
    if not kl <= MOST_KL:
        remedy = f"keep to ordinary prefill, or `tune` a profile that stays below {MOST_KL}"
        return FIDELITY.failed(f"{told}: more than {MOST_KL}", remedy, measured)
    if recomputes and kl >= plain and kl > NEGLIGIBLE:
        remedy = "recomputing does not help this model: `tune` it, or keep to ordinary prefill"
        return FIDELITY.failed(f"{told}: no better than that", remedy, measured)
    same = f"{measured['same_answers']:.0%} of answers the same"
    return FIDELITY.ok(f"{told}; {same}", measured)
