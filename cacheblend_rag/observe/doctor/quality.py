"""Findings on answers that differ from those after full prefill."""

from __future__ import annotations

from statistics import median

from cacheblend_rag.observe.doctor.evidence import Evidence
from cacheblend_rag.observe.doctor.finding import Finding, FindingCode, SettingChange, quoted
from cacheblend_rag.settings.options import DEFAULT_RATIO

NOTICED = 0.05
"""Loss in nats per token that a ratio below the default must cost before it is named."""
TOO_MUCH = 0.25
"""Loss in nats per token that is too much at any ratio; `verify` has the same bound."""
FALLS_TO = 0.6
"""A higher ratio helps if it leaves at most this share of the loss."""
QUESTION_WORDS = 4
"""Fewer words after the last chunk are no question."""
SHORT_CHUNK = 0.5
"""A chunk of less than this share of the others' median length may be a question."""


def model_fails_verify(evidence: Evidence) -> Finding | None:
    """The model failed `verify`."""
    verdict = evidence.verdict
    if verdict is None or verdict.passed:
        return None
    failed = {check.name: check.found for check in verdict.failed}
    return Finding(
        FindingCode.MODEL_FAILS_VERIFY,
        f"The model fails the checks of `verify` ({', '.join(failed)}), so its blended answers "
        "cannot be trusted.",
        failed,
        SettingChange("model", "blended", "ordinary prefill, or another model", verdict.advice),
    )


def question_registered(evidence: Evidence) -> Finding | None:
    """The question is a registered chunk, so its KV is reused although it must see the passages."""
    prompt = evidence.prompt
    if not prompt.chunks or prompt.words_after >= QUESTION_WORDS:
        return None
    last, others = prompt.chunks[-1], prompt.chunk_tokens[:-1]
    asked = prompt.question.strip()
    is_short = bool(others) and prompt.chunk_tokens[-1] < SHORT_CHUNK * median(others)
    if not (is_short or last.rstrip().endswith("?") or (asked and asked in last)):
        return None
    return Finding(
        FindingCode.QUESTION_REGISTERED,
        "The prompt ends with a registered chunk, so the question's KV was computed without the "
        "passages and is reused.",
        {
            "words_after_last_chunk": prompt.words_after,
            "last_chunk_tokens": prompt.chunk_tokens[-1],
            "last_chunk": quoted(last),
        },
        SettingChange(
            "registered chunks",
            f"hold {quoted(last)}",
            "only passages: evict_document() the question",
            "the question is computed in the prompt, and sees all passages",
        ),
    )


def other_instruction(evidence: Evidence) -> Finding | None:
    """Chunks were computed after another instruction than the one before them in the prompt."""
    prompt = evidence.prompt
    expected = prompt.instruction.strip()
    uses_it = prompt.lead_in in ("instruction", "document")
    if not (evidence.is_blended and uses_it and expected):
        return None
    if prompt.before.strip().startswith(expected):
        return None
    figures: dict[str, float | int | str] = {
        "computed_after": quoted(prompt.instruction),
        "prompt_begins": quoted(prompt.before),
    }
    loss = None if evidence.in_force is None else evidence.in_force.loss
    if loss is not None:
        figures["loss_nats_per_token"] = round(loss, 4)
    return Finding(
        FindingCode.OTHER_INSTRUCTION,
        "The chunks' KV was computed after another instruction than the one that this prompt "
        "begins with.",
        figures,
        SettingChange(
            "instruction",
            quoted(prompt.instruction),
            quoted(prompt.before),
            "chunks are computed after the prompt's own beginning: index again with it",
        ),
    )


def ratio_too_low(evidence: Evidence) -> Finding | None:
    """Predictions come nearer to full prefill's if more tokens are recomputed."""
    now, more = evidence.in_force, evidence.more
    if now is None or more is None or now.loss is None or more.loss is None:
        return None
    least = NOTICED if now.ratio < DEFAULT_RATIO else TOO_MUCH
    if now.loss < least or more.loss > FALLS_TO * now.loss:
        return None
    return Finding(
        FindingCode.RATIO_TOO_LOW,
        "Too few tokens are recomputed: predictions are nearer to full prefill's at a higher "
        "ratio.",
        {
            "loss_nats_per_token": round(now.loss, 4),
            "loss_at_proposed": round(more.loss, 4),
            "compute_share": round(now.report.compute_share, 3),
            "compute_share_at_proposed": round(more.report.compute_share, 3),
        },
        SettingChange(
            "recompute_ratio",
            f"{now.ratio:g}",
            f"{more.ratio:g}",
            f"the loss falls from {now.loss:.3f} to {more.loss:.3f} nats per token",
        ),
    )


def predictions_differ(evidence: Evidence) -> Finding | None:
    """Predictions are far from full prefill's, and a higher ratio does not help."""
    now, more = evidence.in_force, evidence.more
    if now is None or now.loss is None or now.loss < TOO_MUCH:
        return None
    after = None if more is None else more.loss
    if after is not None and after <= FALLS_TO * now.loss:
        return None
    figures: dict[str, float | int | str] = {"loss_nats_per_token": round(now.loss, 4)}
    if more is not None and after is not None:
        figures |= {"higher_ratio": more.ratio, "loss_at_higher_ratio": round(after, 4)}
    return Finding(
        FindingCode.PREDICTIONS_DIFFER,
        "Predictions are far from full prefill's, and a higher ratio does not bring them nearer.",
        figures,
        SettingChange(
            "selector",
            evidence.config.selector,
            "what `cacheblend-rag tune` finds; run `verify` on the model first",
            f"a loss below {TOO_MUCH:g} nats per token, or the advice not to blend this model",
        ),
    )


CHECKS = (
    model_fails_verify, question_registered, other_instruction, ratio_too_low, predictions_differ,
)  # fmt: skip
