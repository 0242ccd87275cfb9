"""The gate before production: all checks of one model, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import cast

import torch

from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.loading import checkpoint_dtype
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalDataset, PromptFrame
from cacheblend_rag.quality.verify import numbers, small_set, wording
from cacheblend_rag.quality.verify.check import Check, Verdict
from cacheblend_rag.settings import EMBEDDED, Profile, StoreConfig

HOST_BYTES = 2 << 30
BLENDING = Check("blending", "runs the model layer by layer, at other positions, as it is loaded")
OF_KV = (
    numbers.POSITIONS, numbers.EXACTNESS, numbers.STORED, numbers.PRECISION, small_set.FIDELITY,
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
    tokenizer = load_tokenizer(model)
    data = data or small_set.sample_questions()
    opened = open_engine(
        EMBEDDED,
        model=model,
        profile=profile,
        instruction=frame_of(tokenizer, data).opening,
        store=StoreConfig(host_bytes=HOST_BYTES),
        device=device,
        dtype=dtype,
    )
    with closing(cast(TransformersEngine, opened)) as engine:
        return verify_engine(engine, data, checkpoint=checkpoint_dtype(model), on_check=on_check)


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
    data = small_set.fitting(data, frame, engine.encoder, engine.context_window)
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
    yield small_set.check_fidelity(engine, plain, frame, questions)
