"""Tunes a model by its name, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.quality.dataset import EvalDataset
from cacheblend_rag.quality.engines import opened_engines
from cacheblend_rag.quality.frame import PromptFrame
from cacheblend_rag.quality.records import RecordLog
from cacheblend_rag.quality.tuning.bar import LEAST, BarKind
from cacheblend_rag.quality.tuning.candidates import LEAD_INS, candidates
from cacheblend_rag.quality.tuning.tune import OnRound, Tuned, tune
from cacheblend_rag.settings import EMBEDDED, LeadInConfig


def tune_model(
    model: str,
    data: EvalDataset,
    *,
    bar: BarKind = "score",
    least: float = LEAST,
    lead_ins: Sequence[str] = LEAD_INS,
    selectors: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    check_layers: Sequence[int] | None = None,
    name: str = "tuned",
    resume: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    on_round: OnRound = lambda name, steps: lambda: None,
) -> Tuned:
    """Return the cheapest settings that keep a model's quality on some questions.

    Chunk KV is kept in a store of its own, in memory.

    Args:
        model: as for open_engine.
        data: the questions.
        bar: ``score`` compares answers with gold answers, ``fidelity`` predictions with full
            prefill's.
        least: the share of full prefill's quality to keep.
        lead_ins: the lead-ins to try.
        selectors: the selectors to try, and so on; see ``candidates``.
        ratios: the recompute ratios to try.
        check_layers: the check layers to try.
        name: of the profile.
        resume: a file in which each prompt's results are kept, and from which known ones are taken.
        device: where the model runs.
        dtype: in what precision.
        on_round: called with each round's name and steps; returns a function that is called after
            each step.

    Raises:
        ModelLoadError: when the model cannot be loaded.
        UnsupportedModelError: when its KV cannot be blended.
        ConfigError: when a setting is wrong, or full prefill answers no question.
        PromptError: when a prompt does not fit the model.
        DatasetError: when ``resume`` holds other things.
    """
    log = RecordLog.resumed(resume) if resume else None
    frame = PromptFrame.of(load_tokenizer(model), data.instruction)
    kinds = [LeadInConfig.of(one).kind for one in dict.fromkeys(lead_ins)]
    opened = opened_engines(
        EMBEDDED, model, kinds, instruction=frame.opening, device=device, dtype=dtype
    )
    with opened as engines:
        first = cast(TransformersEngine, next(iter(engines.values())))
        tried = candidates(
            first.model.config.get_text_config().num_hidden_layers,
            lead_ins=kinds,
            selectors=selectors,
            ratios=ratios,
            check_layers=check_layers,
        )
        return tune(
            engines,
            frame,
            data,
            tried,
            bar=bar,
            least=least,
            log=log,
            on_round=on_round,
            name=name,
        )
