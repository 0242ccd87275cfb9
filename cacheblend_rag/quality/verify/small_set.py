"""The small set of prompts that a model is verified with, and the check of fidelity on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from cacheblend_rag.demo.passages import PassageQuestion, PassageSample, load_passages
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.fidelity import TOKENS, PromptFidelity, compare, reference
from cacheblend_rag.quality.forms import over_passages
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.quality.verify.check import Check
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.encoder import PromptEncoder

QUESTIONS, PASSAGES = 6, 4
FIDELITY = Check("fidelity", "compares the blend's predictions with full prefill's, on a small set")

MOST_KL = 0.25
"""Mean KL, in nats, that a model may lose on the small set: predictions keep 78 % likelihood."""
NEGLIGIBLE = 1e-3
"""A divergence so small that plain reuse cannot be told from it."""
PLAIN = BlendConfig(recompute_ratio=0.0, selector="none", **ALWAYS)


def sample_questions() -> EvalDataset:
    """Return packaged questions over paragraphs of Wikipedia.

    Each question gets the paragraph that answers it behind some others.
    """
    sample = load_passages()
    chosen = sample.questions[:QUESTIONS]
    return EvalDataset("packaged", tuple(_over_passages(sample, one) for one in chosen))


def fitting(
    data: EvalDataset, frame: PromptFrame, encoder: PromptEncoder, context_window: int
) -> EvalDataset:
    """Return the questions over so many passages as fit a model's context window.

    Raises PromptError when a question and one passage do not fit.
    """
    found = tuple(_fitting(one, frame, encoder, context_window) for one in data.questions)
    return replace(data, questions=found)


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


def _fitting(
    question: EvalQuestion, frame: PromptFrame, encoder: PromptEncoder, context_window: int
) -> EvalQuestion:
    for count in range(len(question.passages), 0, -1):
        shorter = question.first_passages(count)
        tokens = len(frame.prompt(shorter).encode(encoder).token_ids)
        if tokens + TOKENS <= context_window:
            return shorter
    raise PromptError(
        f"question {question.question!r} with one passage does not fit the context window of "
        f"{context_window:,} tokens: give a dataset with shorter passages"
    )


def _over_passages(sample: PassageSample, asked: PassageQuestion) -> EvalQuestion:
    titles = [passage.title for passage in sample.passages]
    at = titles.index(asked.title)
    own, *others = [*sample.documents()[at:], *sample.documents()[:at]][:PASSAGES]
    return over_passages(asked.question, asked.answers, (*others, own))
