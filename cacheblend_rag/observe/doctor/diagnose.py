"""Runs a request, and returns what is wrong with it, most serious first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from cacheblend_rag.engines.answering import Hints
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.observe.doctor import quality, reuse, speed
from cacheblend_rag.observe.doctor.evidence import Evidence, Verified
from cacheblend_rag.observe.doctor.finding import SEVERITY, Finding
from cacheblend_rag.observe.doctor.machine import Machine
from cacheblend_rag.observe.doctor.measuring import Measurement
from cacheblend_rag.settings import BlendConfig

RUNS, ANSWER_TOKENS = 3, 16
CHECKS = (*quality.CHECKS, *reuse.CHECKS, *speed.CHECKS)


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a request, and the evidence.

    Args:
        findings: faults first, then notes, each the most serious first.
        evidence: all that was measured.
    """

    findings: tuple[Finding, ...]
    evidence: Evidence

    @property
    def has_fault(self) -> bool:
        """Whether a finding is a fault."""
        return any(finding.is_fault for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the findings, and the figures that they were drawn from."""
        told = self.evidence
        now = told.in_force
        return {
            "has_fault": self.has_fault,
            "findings": [finding.to_dict() for finding in self.findings],
            "measured": {
                "prompt_tokens": told.prompt.tokens,
                "chunks": len(told.prompt.chunks),
                "blended": told.is_blended,
                "runs": len(told.blends),
                "full_seconds": told.full_seconds,
                "blend_seconds": told.blend_seconds,
                "ratio": now and now.ratio,
                "compute_share": now and now.report.compute_share,
                "loss_nats_per_token": now and now.loss,
                "cpu": None if told.load is None else asdict(told.load),
                "is_quiet": told.is_quiet,
            },
        }


def diagnose(
    engine: Engine,
    prompt: PromptLike,
    *,
    config: BlendConfig | None = None,
    hints: Hints = (),
    question: str = "",
    runs: int = RUNS,
    answer_tokens: int = ANSWER_TOKENS,
    verdict: Verified | None = None,
    machine: Machine | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Diagnosis:
    """Return what is wrong with a request: its answer, its memory, its time to first token.

    The request is run by blend and by full prefill, in turn, and blended with other settings where
    that helps to judge those in force. To the engine and its store these are requests like any
    others.

    Args:
        engine: serves it.
        prompt: as for generate.
        config: how KV is blended; the engine's own for None.
        hints: as for generate.
        question: the question in the prompt, if it is known.
        runs: how often the request is timed each way, after one that is not.
        answer_tokens: over how many tokens of full prefill's answer predictions are compared.
        verdict: what ``verify_model`` found, if it was run.
        machine: whose CPU and memory counters are read; this one by default.
        on_step: called with what is done next.

    Raises:
        ConfigError: when a number is below 1, or ``config`` does not suit the model.
        PromptError: when the prompt is empty or longer than the context window.
        EngineUnavailableError: when a server does not answer.
    """
    for name, number in (("runs", runs), ("answer_tokens", answer_tokens)):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    measurement = Measurement(
        engine,
        engine.prepare(prompt, hints),
        config or engine.config,
        question,
        runs,
        answer_tokens,
        machine or Machine(),
        on_step,
    )
    evidence = replace(measurement.evidence(), verdict=verdict)
    return Diagnosis(examine(evidence), evidence)


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """Return all findings, faults first, then by severity."""
    found = [finding for check in CHECKS if (finding := check(evidence)) is not None]
    return tuple(sorted(found, key=lambda one: (not one.is_fault, SEVERITY[one.code])))
