"""The gate before production: all checks of one model, in order, on a small set of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import mean
from typing import cast

import torch

from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries, whole_config
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.loading import stated_dtype
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.fidelity import TOKENS, PromptFidelity, compare, reference
from cacheblend_rag.quality.forms import over_passages
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.quality.verify import numbers, wording
from cacheblend_rag.quality.verify.check import Check, Verdict
from cacheblend_rag.settings import EMBEDDED, Profile, StoreConfig
from cacheblend_rag.text.encoder import PromptEncoder

HOST_BYTES = 2 << 30
BLENDING = Check("blending", "runs the model layer by layer, at other positions, as it is loaded")
QUESTIONS, PASSAGES = 6, 4
FIDELITY = Check("fidelity", "compares the blend's predictions with full prefill's, on a small set")

MOST_KL = 0.25
"""Mean KL, in nats, that a model may lose on the small set: predictions keep 78 % likelihood."""
NEGLIGIBLE = 1e-3
"""A divergence so small that plain reuse cannot be told from it."""
OF_KV = (
    numbers.POSITIONS, numbers.EXACTNESS, numbers.STORED, numbers.PRECISION, FIDELITY,
)  # fmt: skip
"""Checks that need KV."""


def verify_model(
    model: str,
    *,
    profile: Profile | str | None = None,
    data: EvalDataset | None = None,
    device: str | None = None,
    dtype: str | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Verdict:
    """Return the verdict on a model, which is loaded into the embedded engine and checked.

    Args:
        model: as for open_engine.
        profile: the settings whose fidelity is checked, as for open_engine.
        data: the questions; a packaged set for None.
        device: where it runs.
        dtype: in what precision.
        on_check: called with each result.

    Raises:
        ModelLoadError: when the model cannot be loaded.
        PromptError: when a question does not fit its context window.
    """
    quiet_libraries()
    data = data or sample_questions()
    opened = open_engine(
        EMBEDDED,
        model=model,
        profile=profile,
        instruction=frame_of(load_tokenizer(model), data).opening,
        store=StoreConfig(host_bytes=HOST_BYTES),
        device=device,
        dtype=dtype,
    )
    with closing(cast(TransformersEngine, opened)) as engine:
        stated = stated_dtype(whole_config(model))
        return verify_engine(engine, data, checkpoint=stated, on_check=on_check)


def frame_of(tokenizer: object, data: EvalDataset) -> PromptFrame:
    """Return the prompts' frame; plain text if the chat template drops what the user says."""
    try:
        return PromptFrame.of(tokenizer, data.instruction)
    except ConfigError:
        return PromptFrame.of(tokenizer, data.instruction, chat_template=False)


def verify_engine(
    engine: TransformersEngine,
    data: EvalDataset,
    *,
    checkpoint: torch.dtype | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Verdict:
    """Check the model of an embedded engine.

    Args:
        engine: its instruction is the opening of ``frame_of``'s prompts. Its store gets the KV of
            the questions' documents.
        data: the questions.
        checkpoint: the dtype of the model's weights on disk, if known.
        on_check: called with each result.

    Raises:
        PromptError: when a question does not fit the context window.
    """
    found = []
    for check in _checks(engine, data, checkpoint):
        on_check(check)
        found.append(check)
    return Verdict(
        engine.model_name, engine.name, engine.dtype, str(engine.model.device), tuple(found)
    )


def _checks(
    engine: TransformersEngine, data: EvalDataset, checkpoint: torch.dtype | None
) -> Iterator[Check]:
    frame = frame_of(engine.tokenizer, data)
    data = fitting(data, frame, engine.encoder, engine.context_window)
    yield wording.check_template(engine.tokenizer, data)
    yield wording.check_tokenizer(engine.tokenizer, data.questions)
    yield wording.check_seams(engine, frame, data.questions)
    refusal = engine.blend_refusal
    if refusal is not None:
        remedy = "it is served by ordinary prefill: choose another model to blend"
        yield BLENDING.failed(str(refusal), remedy)
        yield from (asked.skipped("the model cannot be blended") for asked in OF_KV)
        return
    yield BLENDING.ok("every layer gives its result in the model")
    yield from _checks_of_kv(engine, frame, data, checkpoint)


def _checks_of_kv(
    engine: TransformersEngine,
    frame: PromptFrame,
    data: EvalDataset,
    checkpoint: torch.dtype | None,
) -> Iterator[Check]:
    questions = data.questions
    documents = [document for question in questions for document in question.documents]
    plain = engine.sibling(lead_in=engine.lead_in.with_changes(kind="instruction"))
    for each in (engine, plain):
        each.precompute(dict.fromkeys(documents), progress=False)
    prompted = numbers.Prompted(engine, frame, questions[0])
    precision = numbers.check_precision(prompted, checkpoint)
    yield precision
    if not prompted.wanted.isfinite().all():
        others = (asked for asked in OF_KV if asked != numbers.PRECISION)
        yield from (asked.skipped("the model computes NaN") for asked in others)
        return
    yield numbers.check_positions(prompted)
    yield numbers.check_exactness(prompted)
    yield numbers.check_stored(replace(prompted, engine=plain))
    yield check_fidelity(engine, plain, frame, questions)


def sample_questions() -> EvalDataset:
    """Return packaged questions over paragraphs of Wikipedia.

    Each question gets the paragraph that answers it behind some others.
    """
    sample, questions = load_passages(), []
    documents = sample.documents()
    for asked in sample.questions[:QUESTIONS]:
        at = [document.document_id for document in documents].index(asked.title)
        own, *others = [*documents[at:], *documents[:at]][:PASSAGES]
        questions.append(over_passages(asked.question, asked.answers, (*others, own)))
    return EvalDataset("packaged", tuple(questions))


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
        reuses.append(compare(wanted, plain, prompt, numbers.REUSE))
    recomputes = config.selector != numbers.REUSE.selector and config.ratio > 0
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
